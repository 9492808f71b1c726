"""Actions: what a pipeline stage can do. A pass takes one microbatch through one of the stage's chunks of layers.

    F    Forward          receives hidden states, sends the chunk's output
    B    Backward         receives the gradient of the chunk's output, sends the gradient of its input, and adds up
                          weight gradients
    I    InputBackward    the first part of B, for which another stage waits: the gradient of the input
    W    WeightBackward   the second part of B, for which no stage waits: the weight gradients
    BF   Pair             a B and the F of a later microbatch, which take turns

Zero-bubble schedules split B into I and W (2401.10241; the paper calls these parts B and W).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """The pass of a microbatch through a chunk. Microbatch 2's forward prints as F2 in chunk 0 and F2' in chunk 1."""
    microbatch: int
    chunk: int = 0
    letter, kind = "", ""
    length = 1               # its duration in pictures; a forward takes 1
    direction = 0            # 1: receives from the previous chunk, sends to the next; -1: the reverse; 0: no messages

    def __str__(self):
        return f"{self.letter}{self.microbatch}" + "'" * self.chunk

    @property
    def halves(self) -> tuple["Action", ...]:
        """This action as a tuple of one. A Pair has two halves: its backward and its forward."""
        return (self,)


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

    def __str__(self):
        return f"{self.backward}{self.forward}"

    @property
    def halves(self) -> tuple[Action, ...]:
        return self.backward, self.forward
