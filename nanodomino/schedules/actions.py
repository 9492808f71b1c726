from dataclasses import dataclass


# ---- actions

@dataclass(frozen=True)
class Action:
    """What a stage does with one microbatch, in one of its chunks."""
    microbatch: int
    chunk: int = 0
    letter, kind = "", ""
    length = 1               # in the picture's units: a forward's products
    direction = 0            # of the message that it takes and the one that it gives: 1 down the model, -1 up, 0 none

    def __str__(self):
        return f"{self.letter}{self.microbatch}" + "'" * self.chunk

    @property
    def halves(self) -> tuple["Action", ...]:
        return (self,)


class Forward(Action):
    letter, kind, direction = "F", "forward", 1


class Backward(Action):
    """Input and weight gradients, these as the cover of those's wires."""
    letter, kind, length, direction = "B", "backward", 2, -1


class InputBackward(Action):
    """What the stage before waits for."""
    letter, kind, direction = "I", "input_backward", -1


class WeightBackward(Action):
    """What an InputBackward left to do."""
    letter, kind = "W", "weight_backward"


PASSES = (Forward, Backward, InputBackward, WeightBackward)      # of a microbatch through a chunk


@dataclass(frozen=True)
class Pair:
    """A backward and the forward of a later microbatch, both under way at once."""
    backward: Backward
    forward: Forward
    kind, length = "pair", 3

    def __str__(self):
        return f"{self.backward}{self.forward}"

    @property
    def halves(self) -> tuple[Action, ...]:
        return self.backward, self.forward
