r"""What a step does with the gradients: the learning rate, the loss scale, and the optimizers AdamW and Muon.

**The learning rate** rises linearly to lr and then decays to min_lr. WSD ("warm-up, stable, decay"; 2404.06395, section
4) stays at lr until the last steps. So a run can continue with more steps from a checkpoint of its stable phase:

    lr         _                            ____________________
              / `--.                       /                    \
             /      `--.                  /                      \
    min_lr  /           `----            /                        `---
           warm-up | cosine             warm-up |    stable    | decay

**The loss scale** multiplies fp16 gradients, so that small ones are not rounded to 0 (1710.03740, section 3.2). An fp16
number has 11 significant bits. The largest is 65504. Numbers below 2^-14 have fewer bits, and below 2^-24 there is only
zero. Weights and activations fit into this range. Gradients of activations do not: for the mean loss of 2^19 tokens
they start at 2^-19, and they shrink as the model learns. But backward is linear. If it starts with a gradient of
`scale` instead of 1 for each token's loss, every gradient is `scale` times as large.

                         2^-24          2^-14                                     2^15
    numbers of fp16        | fewer bits   | . . . . . . 11 bits . . . . . . . . . . | infinity
    gradients       o o O O O O O o o o
    times the scale                    o o O O O O O o o o

A scale of 1 would be too small: after 60 steps of the preset nano a quarter of the numbers that enter backward's
matmuls are below 2^-14. Much more than the initial 2^15 would be too large, since a logit's gradient can be as large as
the scale. (Megatron-LM scales the mean loss, so its scales are larger.) zero.py divides the parameters' gradients, in
fp32, by the scale and the number of tokens before it computes the norm. A power of two changes only exponents. So such
a scale changes no bit of the result unless a number over- or underflows.

**AdamW** changes each element w of a weight by its gradient g, and keeps two moments, m and v (1711.05101):

    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2
    w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

t counts the updates. Because each element is updated by itself, ZeRO may cut flat buffers anywhere. Muon (muon.py)
updates whole matrices. A new optimizer is one entry of OPTIMIZERS.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanodomino.optim.muon import Muon

LOSS_SCALE_LIMIT = 2.0**128    # scales must be smaller, because they multiply fp32 numbers
SMALLEST_LOSS_SCALE = 2.0**-24     # with a smaller scale, fp16 gradients of up to 1 would all become 0

# What is left of lr - min_lr when the share x of a decay's steps is done, from 1 at x = 0 to 0 at x = 1
DECAY_CURVES = {"exponential": lambda x: 2.0 * 0.5**x - 1.0, "linear": lambda x: 1.0 - x,
                "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)), "minus_sqrt": lambda x: 1.0 - math.sqrt(x)}

# --lr-decay-style: a function of the Config and the last step of the decay, which returns (a key of DECAY_CURVES, the
# number of steps that decay); None: the rate stays
LR_DECAY_STYLES = {
    "cosine": lambda config, end: ("cosine", end), "linear": lambda config, end: ("linear", end),
    "constant": lambda config, end: None,
    "WSD": lambda config, end: (config.lr_wsd_decay_style, config.lr_wsd_decay_iters or math.ceil(end / 10))}


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step. Steps are counted from 1. The decay never starts before the warm-up ends."""
    end = config.lr_decay_iters or config.train_iters
    warmup_iters, decay = round(config.lr_warmup_fraction * end), LR_DECAY_STYLES[config.lr_decay_style](config, end)
    if step <= warmup_iters:                                   # round, because int() would make 0.29 x 100 steps 28
        return config.lr * step / warmup_iters
    if decay is None:
        return config.lr
    curve, steps = decay
    start = max(end - steps, warmup_iters)
    left = DECAY_CURVES[curve](min(max((step - start) / max(end - start, 1), 0.0), 1.0))
    return config.min_lr + (config.lr - config.min_lr) * left


class LossScale:
    """Holds the scale of the current step, `value`. It changes only in fp16 training without --loss-scale, as in
    Megatron-LM's DynamicGradScaler. For other types it is 1 unless --loss-scale is set.

        some gradient is not finite      skip the step; from the `hysteresis`-th such step on, also halve the scale
        `window` good steps in a row     double the scale, and again tolerate hysteresis - 1 such steps

    zero.py checks the gradients of the whole world, so all ranks decide alike. A skipped step leaves weights and
    moments as they are; the step number, the data and the learning rate advance as usual. At most hysteresis - 1 +
    log2(scale / least) such steps can follow each other, and they do not count as failures. A step that is skipped at
    the smallest scale is a failure. So is a step whose loss is not finite, because the loss itself is never scaled."""

    def __init__(self, config):
        given = config.loss_scale or (None if config.dtype == "float16" else 1.0)
        self.moves = given is None
        self.value = given or config.initial_loss_scale
        self.least = given or config.min_loss_scale
        self.window = config.loss_scale_window if self.moves else math.inf
        self.hysteresis = self.patience = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> bool:
        """Adapt the scale to whether a gradient was not finite. Return whether a smaller scale might prevent that."""
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
        """Return the start of an error's advice if the scale may be too large and can't get smaller by itself."""
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


class SignUpdate(torch.optim.Optimizer):
    """Moves each weight by `rate` against the sign of its gradient. It keeps no moments and ignores the groups' lr."""

    def __init__(self, params, rate):
        super().__init__(params, dict(rate=rate))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(group["rate"] * weight.grad.sign())


@dataclass(frozen=True)
class OptimizerSpec:
    """Describes an optimizer. make(groups, config, zero) returns a torch.optim.Optimizer. A group has some `buckets`,
    their masters as `params`, and weight_decay. zero.py sets `lr` in each step."""
    make: Callable
    moments: tuple[str, ...]            # the names of the state tensors that have the weight's shape
    counts_steps: bool = False          # whether the state also has a `step`
    counts_in_norm: bool = True         # whether the gradients belong to the global norm
    lr_factor: float = 1.0              # the default of --lr is the preset's value, which is for AdamW, times this


OPTIMIZERS = {
    "adamw": OptimizerSpec(lambda groups, config, zero: torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True),
        moments=("exp_avg", "exp_avg_sq"), counts_steps=True),
    "muon": OptimizerSpec(Muon, moments=("momentum_buffer",), lr_factor=2.0)}
