"""Train in fp16: gradients times a factor, or the small ones are rounded to zero (1710.03740, section 3.2).

A number of fp16 has 11 bits. The largest is 65504, from 2^-14 down there are fewer bits, and below 2^-24 is nothing.
Weights and activations fit in. Gradients of activations do not: those of the mean loss of 2^19 tokens begin at 2^-19,
and get smaller as the model learns. Backward is linear. So let the gradient of each token's loss be `scale`, and all
that follows from it is as many times as large:

                         2^-24          2^-14                                     2^15
    numbers of fp16        | fewer bits   | . . . . . . 11 bits . . . . . . . . . . | infinity
    gradients       o o O O O O O o o o
    times the scale                    o o O O O O O o o o

The parameters' gradients are added up in fp32 (main_grad) and divided by the scale where they are divided by the number
of tokens, before norm and clipping (zero.py). A scale is best a power of two: it changes exponents alone, so no bit of
a result depends on it, as long as nothing is too large or too small.

**Of what.** Of *one token's* loss. Megatron-LM scales a mean, so its first 2^32 is shared by the tokens that a replica
has in a batch: 2^13 for each of 2^19. Here no batch size, microbatch or layout comes into it. With a scale of 1 that is
the gradient of the loss sum, and not enough: after 60 steps of nano a quarter of what goes backward into its products
is below 2^-14. Since the gradient of a logit is at most the scale, more than 2^15 is of little use: that is the first
one. A sum over tokens would soon be too large too; all of those are of fp32 (buckets.py, bridge.py,
functions.py).

**How large.** Nobody knows, and it changes while training goes on. So it is tried (Megatron-LM's DynamicGradScaler):

    a gradient is not finite     the step is skipped, and from the `hysteresis`-th such step on the scale is halved
    `window` good steps in a row the scale is doubled, and the patience of the hysteresis is whole again

All ranks see the same: whether a step is finite is decided for the world (zero.py). Skipped so, a step is no sign of a
run that goes wrong, and not counted as one: at most hysteresis - 1 + log2(scale / least) of them follow each other. One
that is skipped at the least scale is, and so is one whose loss is not finite: the loss was not scaled.

A scale that is given (--loss-scale), and the 1 of all other types, is one that never moves.
"""

import math

LOSS_SCALE_LIMIT = 2.0**128    # of loss scales, which multiply fp32


class LossScale:
    """value: what the gradients of this step's losses are."""

    def __init__(self, config):
        given = config.loss_scale or (None if config.dtype == "float16" else 1.0)
        self.moves = given is None
        self.value = given or config.initial_loss_scale
        self.least = given or config.min_loss_scale
        self.window = config.loss_scale_window if self.moves else math.inf
        self.hysteresis = self.patience = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> bool:
        """After a step, whose gradients were not finite if it is an overflow. Returns whether a smaller scale may mend
        it."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps >= self.window and 2.0 * self.value < LOSS_SCALE_LIMIT:
                self.value, self.good_steps, self.patience = 2.0 * self.value, 0, self.hysteresis
            return False
        mends = self.value > self.least
        self.good_steps, self.patience = 0, max(self.patience - 1, 0)
        if self.patience == 0:
            self.value = max(self.value / 2.0, self.least)
        return mends

    def advice(self) -> str:
        """Of a run that gives up, where it may be the scale that is too large, and can't get smaller."""
        if self.value <= 1.0:
            return ""
        return (f"try a smaller --{'min-' * self.moves}loss-scale than {self.least:g}, or "
                if self.value <= self.least else "")

    # ---- for checkpoints

    def state(self) -> dict | None:
        """None of one that never moves."""
        return dict(value=self.value, good_steps=self.good_steps, patience=self.patience) if self.moves else None

    def restore(self, state: dict | None):
        """From what state() gave, here or in a run of other settings, whose scale may not have moved."""
        if self.moves and state:
            self.value = max(state["value"], self.least)
            self.good_steps, self.patience = state["good_steps"], min(state["patience"], self.hysteresis)


def is_valid_state(value) -> bool:
    """Whether a stranger's record can be restored."""
    return value is None or (isinstance(value, dict) and value.keys() == {"value", "good_steps", "patience"}
                             and all(type(number) in (int, float) and 0 <= number < LOSS_SCALE_LIMIT
                                     for number in value.values())
                             and value["value"] > 0 and {type(value["good_steps"]), type(value["patience"])} == {int})
