"""Loss scaling: multiplies fp16 gradients by a factor, so that small ones are not rounded to 0 (1710.03740, 3.2).

An fp16 number has 11 significant bits. The largest is 65504. Below 2^-14 numbers have fewer bits, and below 2^-24 there
is only zero. Weights and activations fit into this range. Gradients of activations do not: for the mean loss of 2^19
tokens they start at 2^-19, and they shrink as the model learns. But backward is linear. If it starts with a gradient of
`scale` instead of 1 for each token's loss, every gradient is `scale` times as large.

                         2^-24          2^-14                                     2^15
    numbers of fp16        | fewer bits   | . . . . . . 11 bits . . . . . . . . . . | infinity
    gradients       o o O O O O O o o o
    times the scale                    o o O O O O O o o o

zero.py divides the parameters' gradients, in fp32, by the scale and the number of tokens before it computes the norm.
A scale that is a power of two changes only exponents. So it changes no bit of the result unless a number over- or
underflows.

Megatron-LM scales the mean loss: its initial scale of 2^32 is 2^13 per token if a replica has 2^19 tokens. Our scale
applies to each token's loss, so it depends neither on the batch nor on the layout. A scale of 1 would be too small:
after 60 steps of the preset nano a quarter of the numbers that enter backward's matmuls are below 2^-14. Much more than
the initial 2^15 would be too large, since a logit's gradient can be as large as the scale. Sums over tokens can be
larger still, so all of them are computed in fp32.

The best scale changes during training. So it is adapted, as in Megatron-LM's DynamicGradScaler:

    some gradient is not finite      skip the step; from the `hysteresis`-th such step on, also halve the scale
    `window` good steps in a row     double the scale, and again tolerate hysteresis - 1 such steps

zero.py checks the gradients of the whole world, so all ranks decide alike. A skipped step leaves weights and moments as
they are; the step number, the data and the learning rate advance as usual. Such skips are expected and do not count as
failures: at most hysteresis - 1 + log2(scale / least) of them can follow each other. A step that is skipped at the
smallest scale is a failure. So is a step whose loss is not finite, because the loss itself is never scaled.
"""

import math

LOSS_SCALE_LIMIT = 2.0**128    # scales must be smaller, because they multiply fp32 numbers
SMALLEST_LOSS_SCALE = 2.0**-24     # with a smaller scale, fp16 gradients of up to 1 would all become 0


class LossScale:
    """Adapts the loss scale. value: the scale for the current step. It changes only in fp16 training without
    --loss-scale. For other types it is 1 unless --loss-scale is set."""

    def __init__(self, config):
        given = config.loss_scale or (None if config.dtype == "float16" else 1.0)
        self.moves = given is None
        self.value = given or config.initial_loss_scale
        self.least = given or config.min_loss_scale
        self.window = config.loss_scale_window if self.moves else math.inf
        self.hysteresis = self.patience = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> bool:
        """Adapt the scale after a step. overflow: whether a gradient was not finite. Return whether there was an
        overflow at a scale above the minimum, so that a smaller scale might have prevented it."""
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
        """Return the first part of an error message's advice: "try a smaller ..., or " if the scale may be too large
        and cannot get smaller by itself, otherwise an empty string."""
        if self.value <= 1.0 or self.value > self.least:
            return ""
        return f"try a smaller --{'min-' * self.moves}loss-scale than {self.least:g}, or "

    def state(self) -> dict | None:
        """Return what a checkpoint saves; None if the scale never changes."""
        return dict(value=self.value, good_steps=self.good_steps, patience=self.patience) if self.moves else None

    def restore(self, state: dict | None):
        """Restore what state() returned. The current settings take precedence: for example, a fixed scale stays."""
        if self.moves and state:
            self.value = max(state["value"], self.least)
            self.good_steps, self.patience = state["good_steps"], min(state["patience"], self.hysteresis)
