"""Runs steps of training on a single pipeline stage, for the benchmarks of overlap."""

from nanodomino import pipeline
from nanodomino.domino import Domino
from nanodomino.schedules.actions import Forward, InputBackward, WeightBackward
from nanodomino.schedules.placement_and_messages import Placement, Timetable, timetable
from train import forward_step


def domino_step(stage: Domino, batches, table=None) -> float:
    """Run a step on a single stage as train.py does, and return the mean loss. table: the timetable; None: 1F1B's."""
    totals = pipeline.run(table or timetable("1f1b", 1, len(batches)), stage, stage.mesh, lambda i, chunk: batches[i],
                          forward_step, None, None, trace=stage.trace)
    return (totals.loss_sum / totals.tokens).item()


def split_backward_timetable(microbatches: int) -> Timetable:
    """Return the timetable F0 I0 W0 F1 I1 W1 ... of a single stage: each backward is split into input gradients (I) and
    weight gradients (W).
    """
    return Timetable(Placement(stages=1), (tuple(action(i) for i in range(microbatches)
                                                 for action in (Forward, InputBackward, WeightBackward)),))
