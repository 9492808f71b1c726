"""Seven pipeline schedules. Each is a pure function that returns the actions of one stage in order.

The layers are spread over p stages, numbered r = 0 to p - 1. A replica's batch is cut into m microbatches. The order in
which a stage runs their forwards and backwards decides how long it idles and how many activations it holds. A schedule
is data: it can be printed, counted and tested without a process (simulation.py). pipeline.py executes it.

The actions of a stage, for a microbatch and one of the stage's chunks of layers:

    F    Forward          receives hidden states, sends the chunk's output
    B    Backward         receives the gradient of the chunk's output, sends that of its input, adds up weight gradients
    I    InputBackward    the first part of B, for which another stage waits: the gradient of the input
    W    WeightBackward   the second part of B, for which no stage waits: the weight gradients
    BF   Pair             a B and the F of a later microbatch, which take turns

Zero-bubble schedules split B into I and W (2401.10241; the paper calls these parts B and W). The *bubble* of a schedule
is the busiest stage's idle time, divided by its computing time. Below, F, I and W are the times that a stage needs for
a microbatch. So a whole backward takes I + W. v is the number of chunks per stage:

                 idle time of a step        microbatches held           source
    gpipe        (p - 1)(F + I + W)         m                           1811.06965
    1f1b         (p - 1)(F + I + W)         p - r                       2006.09503; 2104.04473, section 2.2
    eager-1f1b   (p - 1)(F + I + W)         2 (p - r) - 1               2211.05322, section 4
    paired       (p - 1)(F + I + W)         2 (p - r)                   combined 1F1B of Megatron-Core, DualPipe
    interleaved  (p - 1)(F + I + W)/v       p + (p - 2 r - 1)/v         2104.04473, section 2.2
    zb-h1        (p - 1)(F + I - W)         p                           2401.10241, section 2.1
    zb-v         (p - 1) F/2                p                           2401.10241, section 6; 2405.15362

"Microbatches held" is the largest number that stage r holds at once, if m is large enough. A microbatch in one of v
chunks counts 1/v. Three formulas for the idle time hold only under conditions:

    interleaved  m is a multiple of p
    zb-h1        m is at least p, and W <= I; if W > I, the idle time is (p - 1) F
    zb-v         m is at least (3 p - 1)/2, and F = I = W

In zb-v no stage idles between its first and its last action. But the stages start and end at different times, and all
wait for the last one, because clipping needs the global gradient norm. (The paper updates before the norm is known, and
undoes the update if clipping was necessary: section 4.) A new schedule is a function and a line in SCHEDULES.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """The pass of a microbatch through a chunk. Microbatch 2's forward prints as F2 in chunk 0 and F2' in chunk 1."""
    microbatch: int
    chunk: int = 0
    letter, kind = "", ""
    length = 1               # its duration in pictures; a forward takes 1
    direction = 0            # 1: receives from the previous chunk, sends to the next; -1: the reverse; 0: no messages
    halves = property(lambda self: (self,))      # a Pair has two: its backward and its forward

    def __str__(self):
        return f"{self.letter}{self.microbatch}" + "'" * self.chunk


class Forward(Action):
    letter, kind, direction = "F", "forward", 1


class Backward(Action):
    letter, kind, length, direction = "B", "backward", 2, -1


class InputBackward(Action):
    letter, kind, direction = "I", "input_backward", -1


class WeightBackward(Action):
    letter, kind = "W", "weight_backward"


PASSES = (Forward, Backward, InputBackward, WeightBackward)


@dataclass(frozen=True)
class Pair:
    """A backward and a forward whose slices take turns. The matmuls of one hide the all-reduces of the other."""
    backward: Backward
    forward: Forward
    kind, length = "pair", 3
    halves = property(lambda self: (self.backward, self.forward))

    def __str__(self):
        return f"{self.backward}{self.forward}"


def gpipe(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """Run all forwards, then all backwards: simple, but every microbatch's activations are held at once."""
    return [Forward(i) for i in range(microbatches)] + [Backward(i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int, chunks=1, look_ahead=0) -> list:
    """After a warm-up of one forward for each later stage, alternate a forward and a backward. From then on the number
    of microbatches held does not grow.

        stage 0 |F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 B2 B2    B3 B3    B4 B4    B5 B5
        stage 1 |   F0 F1 F2             B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5
        stage 2 |      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4    B5 B5
        stage 3 |         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

    Eager 1F1B runs `look_ahead` more warm-up forwards for each later stage, so that a stage has work while messages
    travel (2211.05322, section 4). Stage r of p then holds (1 + look_ahead) (p - r - 1) + 1 microbatches.

        stage 0 |F0 F1 F2 F3 F4       B0 B0 F5 B1 B1    B2 B2    B3 B3    B4 B4    B5 B5
        stage 1 |   F0 F1 F2    B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5
        stage 2 |      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5
    """
    num_warmup = min((1 + look_ahead) * (stages - stage - 1), microbatches)
    actions = [Forward(i) for i in range(num_warmup)]
    for i in range(microbatches - num_warmup):
        actions += [Forward(num_warmup + i), Backward(i)]
    return actions + [Backward(i) for i in range(microbatches - num_warmup, microbatches)]


def paired(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """Run 1F1B with pairs of a backward and the next forward (drawn as B B F), which hide each other's all-reduces.

        stage 0 |F0 F1 F2 F3 F4             B0 B0 F5 B1 B1    B2 B2 B3 B3    B4 B4 B5 B5
        stage 1 |   F0 F1 F2       B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4 B5 B5
        stage 2 |      F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5

    A stage can use the activation or the gradient of another stage's pair only after that pair ends. So each later
    stage delays a microbatch's backward by two pairs: one in forward, one in backward. The last stage adds one more
    pair, because it runs the backward one pair after the forward. The warm-up has one forward for each of these pairs.
    With fewer, two pairs would wait for each other."""
    num_warmup = min(2 * (stages - stage - 1) + 1, microbatches)
    return ([Forward(i) for i in range(num_warmup)]
            + [Pair(Backward(i), Forward(num_warmup + i)) for i in range(microbatches - num_warmup)]
            + [Backward(i) for i in range(microbatches - num_warmup, microbatches)])


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list:
    """Run 1F1B over several chunks per stage. A chunk is shorter than a whole stage, so the pipeline fills faster.

    A round takes `stages` microbatches through chunk 0 of a stage, then the same microbatches through chunk 1, and so
    on. When the first of them comes back for the next chunk, the stage has just finished the last. If the last round
    has fewer microbatches, the actions of the missing ones are left out.
    """
    rounds = range(0, microbatches, stages)
    order = [(i, chunk) for first in rounds for chunk in range(chunks) for i in range(first, first + stages)]
    forwards = [Forward(i, chunk) for i, chunk in order]
    backwards = [Backward(i, chunks - 1 - chunk) for i, chunk in order]
    num_warmup = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards):
        actions += [forward, backward]
    return drop_missing(actions + backwards[len(order) - num_warmup:], microbatches)


def zb_h1(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """Run 1F1B, but delay the weight gradients by `stage` microbatches. So the last stages compute weight gradients at
    the end of the step, where they would idle in 1F1B. The price: all stages hold as many microbatches as the first."""
    num_warmup, actions = min(stages - stage - 1, microbatches), []
    for i in range(microbatches + stages):
        actions += [Forward(i)] if i < microbatches else []
        if 0 <= (ready := i - num_warmup) < microbatches:
            actions += [InputBackward(ready)] if stage else [Backward(ready)]    # no stage waits for the first stage
        if stage and 0 <= (late := i - num_warmup - stage) < microbatches:
            actions += [WeightBackward(late)]
    return actions


def zb_v(stage: int, stages: int, microbatches: int, chunks=2) -> list:
    """Run two chunks per stage, placed in a V: a microbatch goes through chunk 0 of each stage from first to last, then
    through chunk 1 (drawn with a prime) of each stage from last to first.

        stage 0 |F0  F1  F2  F0' I0' W0' F1' I1' W1' F3  B0  B0  F2' I2' W2' B1  B1  F3' I3' W3' B2  B2  B3  B3
        stage 1 |    F0  F0' F1  F1' I0' W0' F2  I0  W0  F2' I1' W1' F3  I1  W1  F3' I2' W2' I2  I3' I3  W2  W3' W3

    So the first stage holds both ends of the model. In the warm-up a stage runs forwards while the first microbatch
    goes down and up again. In the steady state it alternates F, I, W of one chunk and F, I, W of the other. In the
    cool-down, weight gradients fill the gaps between input gradients. The pattern needs at least 2 p - 1 microbatches.
    If there are fewer, the actions of the missing ones are left out."""
    count = max(microbatches, 2 * stages - 1)
    down, up = [{action: deque(action(i, chunk) for i in range(count))
                 for action in (Forward, InputBackward, WeightBackward)} for chunk in (0, 1)]
    actions = []

    def do(times, *steps):
        """Append the steps `times` times. A step is (chunk, action), for the chunk's next microbatch."""
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
    if stage == 0:     # no stage waits for the first chunk's input gradient: in a whole B, W hides the all-reduces
        actions = [Backward(action.microbatch) if isinstance(action, InputBackward) and action.chunk == 0 else action
                   for action in actions if not (isinstance(action, WeightBackward) and action.chunk == 0)]
    return drop_missing(actions, microbatches)


def drop_missing(actions: list, microbatches: int) -> list:
    """Drop the actions of microbatches that do not exist. No other action waits for them."""
    return [action for action in actions if action.microbatch < microbatches]


@dataclass(frozen=True)
class Schedule:
    name: str
    function: Callable                 # one of the functions above
    chunks: range = range(1, 2)        # the permitted numbers of chunks per stage
    folded: bool = False               # whether the chunks are placed in a V
    settings: tuple = ()               # (name, value) pairs: further arguments of the function

    def actions(self, stage: int, stages: int, microbatches: int, chunks: int) -> list:
        """Return the actions of one stage in order."""
        return self.function(stage, stages, microbatches, chunks, **dict(self.settings))


SCHEDULES = {schedule.name: schedule for schedule in (
    Schedule("1f1b", one_f_one_b), Schedule("gpipe", gpipe), Schedule("paired", paired),
    Schedule("interleaved", interleaved, chunks=range(2, 1000)), Schedule("zb-h1", zb_h1),
    Schedule("zb-v", zb_v, chunks=range(2, 3), folded=True),
    Schedule("eager-1f1b", one_f_one_b, settings=(("look_ahead", 1),)))}
