"""Eager 1F1B: 1F1B with more warm-up forwards, for messages between stages that are slow (--schedule eager-1f1b).

In 1F1B a stage runs a forward and then waits for the gradient that this forward's activations make possible: the
activations travel to the next stage, the gradient comes back. With equal stages, every microbatch waits for both
messages. If each later stage adds k further warm-up forwards, the stage has other work while messages travel. With 4
stages, 64 microbatches and messages that take as long as a forward, a step takes 207 units of time instead of 301. The
price is memory: stage r of p holds (1 + k) (p - r - 1) + 1 microbatches instead of p - r.

    stage 0 |F0 F1 F2 F3 F4       B0 B0 F5 B1 B1    B2 B2    B3 B3    B4 B4    B5 B5       p = 3, m = 6, k = 1
    stage 1 |   F0 F1 F2    B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5
    stage 2 |      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

The name and the idea are from 2211.05322, section 4.
"""

from dataclasses import dataclass

from nanodomino.schedules.actions import Backward, Forward
from nanodomino.schedules.definitions import Schedule
from nanodomino.settings.flags import layout_setting


def eager_1f1b(stage: int, stages: int, microbatches: int, chunks=1, look_ahead=1) -> list:
    """Run 1F1B with `look_ahead` more warm-up forwards for each later stage. With look_ahead 0 it is 1F1B."""
    warm_up = min((1 + look_ahead) * (stages - stage - 1), microbatches)
    actions = [Forward(i) for i in range(warm_up)]
    for i in range(microbatches):
        actions += [Forward(warm_up + i)] * (warm_up + i < microbatches) + [Backward(i)]
    return actions


SCHEDULES = {"eager-1f1b": Schedule("eager-1f1b", eager_1f1b)}


@dataclass(frozen=True)
class Settings:
    """The part of Config that is about eager 1F1B."""
    look_ahead: int = layout_setting(1, "number of further warm-up forwards for each later stage",
                                     needs="--schedule eager-1f1b", at_least=0, at_most=2**16)

    @property
    def schedule_settings(self):
        if self.schedule != "eager-1f1b":
            return super().schedule_settings
        return (("look_ahead", self.look_ahead),)
