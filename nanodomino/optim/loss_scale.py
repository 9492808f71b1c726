"""Loss scaling: multiplies fp16 gradients by a factor, so that small ones are not rounded to 0 (1710.03740, 3.2).

An fp16 number has 11 significant bits. The largest is 65504; below 2^-14 numbers have fewer bits, below 2^-24 there is
only zero. Weights and activations fit into this range. Gradients of activations do not: for the mean loss of 2^19
tokens they start at 2^-19, and they shrink as the model learns. But backward is linear: if the gradient of each token's
loss is `scale` instead of 1, every gradient is `scale` times as large.

                         2^-24          2^-14                                     2^15
    numbers of fp16        | fewer bits   | . . . . . . 11 bits . . . . . . . . . . | infinity
    gradients       o o O O O O O o o o
    times the scale                    o o O O O O O o o o

zero.py divides the parameters' gradients, in fp32, by the scale and the number of tokens before it computes the norm.
A power of two changes only exponents, so it changes no bit of the result unless a number over- or underflows.

Megatron-LM scales the mean loss, and its initial 2^32 amounts to 2^13 for each of a replica's 2^19 tokens. Our scale is
that of one token, which does not depend on the batch or the layout. 1 would not do: after 60 steps of the preset nano
a quarter of the numbers that enter backward's matmuls are below 2^-14. Nor would much more than the initial 2^15, since
a logit's gradient can be as large as the scale. Sums over tokens could overflow earlier; all of them are in fp32.

The best scale changes during training, so it adapts, as Megatron-LM's DynamicGradScaler does:

    some gradient is not finite      skip the step; from the `hysteresis`-th such step on, also halve the scale
    `window` good steps in a row     double the scale, and count for the hysteresis anew

zero.py finds out for the world whether a step is finite, so all ranks decide alike. A skipped step leaves weights and
moments as they are, while the step number, the data and the learning rate go on. It is expected, so it does not count
as a failure: at most hysteresis - 1 + log2(scale / least) such steps follow each other. A step skipped at the smallest
scale does count, and so does one whose loss is not finite, since the loss itself is never scaled.
"""

import math

LOSS_SCALE_LIMIT = 2.0**128    # scales must be smaller: they multiply fp32 numbers


class LossScale:
    """value: the factor for this step. It never changes if it is set by --loss-scale, and is 1 for all other types."""

    def __init__(self, config):
        given = config.loss_scale or (None if config.dtype == "float16" else 1.0)
        self.moves = given is None
        self.value = given or config.initial_loss_scale
        self.least = given or config.min_loss_scale
        self.window = config.loss_scale_window if self.moves else math.inf
        self.hysteresis = self.patience = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> bool:
        """Adapt the scale after a step; return whether a smaller scale might have prevented its overflow."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps >= self.window and 2.0 * self.value < LOSS_SCALE_LIMIT:
                self.value, self.good_steps, self.patience = 2.0 * self.value, 0, self.hysteresis
            return False
        can_shrink = self.value > self.least
        self.good_steps, self.patience = 0, max(self.patience - 1, 0)
        if self.patience == 0:
            self.value = max(self.value / 2.0, self.least)
        return can_shrink

    def advice(self) -> str:
        """Return the start of an error message's advice if the scale may be too large and cannot get smaller."""
        if self.value <= 1.0 or self.value > self.least:
            return ""
        return f"try a smaller --{'min-' * self.moves}loss-scale than {self.least:g}, or "

    def state(self) -> dict | None:
        """Return what a checkpoint saves; None if the scale never changes."""
        return dict(value=self.value, good_steps=self.good_steps, patience=self.patience) if self.moves else None

    def restore(self, state: dict | None):
        """Restore what state() returned, perhaps in a run with other settings or with a fixed scale."""
        if self.moves and state:
            self.value = max(state["value"], self.least)
            self.good_steps, self.patience = state["good_steps"], min(state["patience"], self.hysteresis)


def is_valid_state(value) -> bool:
    """Return whether a checkpoint's entry, which may hold anything, can be restored."""
    return value is None or (isinstance(value, dict) and value.keys() == {"value", "good_steps", "patience"}
                             and all(type(number) in (int, float) and 0 <= number < LOSS_SCALE_LIMIT
                                     for number in value.values())
                             and value["value"] > 0 and {type(value["good_steps"]), type(value["patience"])} == {int})
