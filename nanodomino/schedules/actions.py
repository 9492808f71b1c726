"""What a pipeline stage does with a microbatch, in one of its chunks of layers: four passes, and a pair of two.

    F    Forward          receives hidden states, sends hidden states on
    B    Backward         receives the gradient of its output, sends the gradient of its input, adds weight gradients
    I    InputBackward    the half of B that another stage waits for: the gradient of the input
    W    WeightBackward   the other half, for which no stage waits: the weight gradients
    BF   Pair             a B and the F of a later microbatch at the same time

Zero-bubble schedules split B (2401.10241; the paper calls the halves B and W).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    microbatch: int
    chunk: int = 0
    letter, kind = "", ""
    length = 1               # in the unit of the pictures: the matmuls of a forward
    direction = 0            # of the messages it receives and sends: 1 down the model, -1 up the model, 0 no messages

    def __str__(self):
        return f"{self.letter}{self.microbatch}" + "'" * self.chunk

    @property
    def halves(self) -> tuple["Action", ...]:
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
    """Runs both halves slice by slice in turn, so that the matmuls of one hide the all-reduces of the other."""
    backward: Backward
    forward: Forward
    kind, length = "pair", 3

    def __str__(self):
        return f"{self.backward}{self.forward}"

    @property
    def halves(self) -> tuple[Action, ...]:
        return self.backward, self.forward
