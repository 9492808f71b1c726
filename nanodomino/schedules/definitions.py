"""Pipeline schedules as data: what each stage does in a step, in which order, and what that costs.

Stage r of p holds a run of layers. A global batch is cut into m microbatches, and what a stage does in a step is a list
of actions, made by a pure function of (stage, stages, microbatches, chunks): it can be printed, counted and tested
without a process; pipeline.py executes it. p = 4, m = 6, a backward twice as long as a forward:

    stage 0 |F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 B2 B2    B3 B3    B4 B4    B5 B5
    stage 1 |   F0 F1 F2             B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5            1F1B: at most p - r
    stage 2 |      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4    B5 B5                  microbatches alive
    stage 3 |         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5                        on stage r

The *bubble* is the time in which a stage is idle, as a part of the ideal time, in which it is busy. In this project the
word means nothing else. F, B, W: a forward, a backward's input gradients, its weight gradients, of one stage:

                 idle in a step             microbatches alive             source
    gpipe        (p - 1)(F + B + W)         m                              1811.06965
    1f1b         the same                   p - r                          2006.09503; 2104.04473, section 2.2
    paired       the same                   2 (p - r)                      Megatron-Core's combined 1F1B, DualPipe
    interleaved  the same / v               p + (p - 2 r - 1)/v            2104.04473, section 2.2
    zb-h1        (p - 1)(F + B - W)         p                              2401.10241, section 2.1
    zb-v         (p - 1) F/2 if F = B = W   p                              2401.10241, section 6; 2405.15362

Three ideas stand behind them. A stage may hold v *chunks*, shorter runs of layers: then the pipeline fills in shorter
steps. Input gradients are what the stage before waits for, weight gradients nobody waits for: done later, they fill
idle time. And a forward and a backward of two microbatches, done as a *pair*, hide each other's wires (domino.py).

Of few microbatches more is idle: of fewer than p in zb-h1, than (3 p - 1)/2 in zb-v. (p - 1)(F + B - W) holds where W
is not longer than B, else it is (p - 1) F; interleaved stages want m divisible by p.

zb-v's (p - 1) F/2 is no stage's own idle time: each begins so much later than the first, and ends so much later. But
clipping by the global norm joins all stages at each step's end. The paper's post-validation (section 4), which updates
before the norm is known and takes back what it should not have done, would save it. 2 (p - r) microbatches are alive in
a pair, but one tape grows as the other shrinks.

What a schedule costs is read off its actions, and never asked by its name: how many microbatches are alive at once, and
by playing it through, with any durations and with messages that take time, its step and its bubble; the order of the
messages too. So a new schedule is one function and one line in SCHEDULES.
"""

from collections import deque
from dataclasses import dataclass

from nanodomino.schedules.actions import Backward, Forward, InputBackward, Pair, WeightBackward


# ---- schedules: the actions of one stage

def gpipe(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """All forwards, then all backwards: simple, and all microbatches are alive at once."""
    return [Forward(i) for i in range(microbatches)] + [Backward(i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """After a warm-up that is the longer the earlier the stage, a forward and a backward in turn: one activation comes,
    one goes."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [Forward(i) for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    return actions + [Backward(i) for i in range(microbatches - warm_up, microbatches)]


def paired(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """1F1B with each backward and the forward after it as a pair.

    A pair takes its gradient from the pair of the next stage, so it begins when that one ends; and what it sends
    forward is wanted there after that stage's next pair. Hence two forwards of warm-up for each stage that follows, and
    one for the pair's own. With fewer, a pair would wait for a pair that waits for it.
    """
    warm_up = min(2 * (stages - stage - 1) + 1, microbatches)
    return ([Forward(i) for i in range(warm_up)]
            + [Pair(Backward(i), Forward(warm_up + i)) for i in range(microbatches - warm_up)]
            + [Backward(i) for i in range(microbatches - warm_up, microbatches)])


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list:
    """1F1B over chunks. They take turns: `stages` microbatches through the first, the same through the second, and so
    on; so a microbatch comes back to the stage when the stage is done with the others. In a last round of fewer
    microbatches a stage waits where the others would be."""
    rounds = range(0, microbatches, stages)
    order = [(i, chunk) for first in rounds for chunk in range(chunks) for i in range(first, first + stages)]
    forwards = [Forward(i, chunk) for i, chunk in order]
    backwards = [Backward(i, chunks - 1 - chunk) for i, chunk in order]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        actions += [forward, backward]
    return only_first(microbatches, actions + backwards[len(order) - warm_up:])


def zb_h1(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """1F1B whose weight gradients come `stage` microbatches late: on the last stages they are left for the cool-down,
    where 1F1B would be idle. So each stage holds p microbatches, as 1F1B's first one does."""
    warm_up, actions = min(stages - stage - 1, microbatches), []
    for i in range(microbatches + stages):
        actions += [Forward(i)] if i < microbatches else []
        if 0 <= (back := i - warm_up) < microbatches:
            actions += [InputBackward(back)] if stage else [Backward(back)]      # nobody waits for the first stage's
        if stage and 0 <= (late := i - warm_up - stage) < microbatches:
            actions += [WeightBackward(late)]
    return actions


def zb_v(stage: int, stages: int, microbatches: int, chunks=2) -> list:
    """Two chunks in a V: down the stages and up again, so that the first stage holds both ends of the model, and the
    last one turns a forward into the next at once.

    In the steady state each stage does F, B, W of one chunk, then of the other. Before it, the stage fills up while the
    first microbatches go down and come up; after it, input gradients go on and weight gradients fill what is idle. The
    pattern needs 2 p - 1 microbatches: of fewer, a stage waits where the others would be.
    """
    count = max(microbatches, 2 * stages - 1)
    down, up = [{action: deque(action(i, chunk) for i in range(count))
                 for action in (Forward, InputBackward, WeightBackward)} for chunk in (0, 1)]
    actions = []

    def do(times, *steps):
        for _ in range(times):
            actions.extend(chunk[action].popleft() for chunk, action in steps)

    do(2 * (stages - stage) - 1, (down, Forward))
    do(stage, (up, Forward), (down, Forward))
    do(stages - stage, (up, Forward), (up, InputBackward), (up, WeightBackward))
    for _ in range(len(up[Forward])):
        do(min(1, len(down[Forward])), (down, Forward))
        do(1, (down, InputBackward), (down, WeightBackward), (up, Forward), (up, InputBackward), (up, WeightBackward))
    do(stage, (down, InputBackward), (up, InputBackward))
    do(stages - stage, (down, InputBackward), (down, WeightBackward))
    actions += [*up[WeightBackward], *down[WeightBackward]]
    return only_first(microbatches, actions if stage else undivided(actions, chunk=0))


def undivided(actions: list, chunk: int) -> list:
    """With both gradients of a chunk in one action again, so that the wires have their cover: nobody waits for the
    input gradient of the model's first layers."""
    return [Backward(one.microbatch, chunk) if isinstance(one, InputBackward) and one.chunk == chunk else one
            for one in actions if not (isinstance(one, WeightBackward) and one.chunk == chunk)]


def only_first(microbatches: int, actions: list) -> list:
    """Without those of microbatches that are not there: whatever the others wait for is among them, in this order."""
    return [action for action in actions if action.microbatch < microbatches]


@dataclass(frozen=True)
class Schedule:
    """actions: one of the functions above; chunks: how many of them a stage may hold; folded: they lie in a V."""
    actions: object
    chunks: range = range(1, 2)
    folded: bool = False


SCHEDULES = {"1f1b": Schedule(one_f_one_b), "gpipe": Schedule(gpipe), "paired": Schedule(paired),
             "interleaved": Schedule(interleaved, chunks=range(2, 1000)), "zb-h1": Schedule(zb_h1),
             "zb-v": Schedule(zb_v, chunks=range(2, 3), folded=True)}
