"""The optimizer AdamW: how a gradient g changes a weight w, element by element, and which moments (m, v) are kept.

    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2                                                 (1711.05101)
    w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

t counts the updates. Because each element is updated by itself, ZeRO may cut flat buffers anywhere. zero.py passes this
rank's partition of each buffer as one tensor, and checkpoints save each moment next to its weight. A new optimizer is
one entry of OPTIMIZERS.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


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
    """Describes an optimizer.

    make(groups, config, zero)    returns a torch.optim.Optimizer. Each of the parameter groups has the masters of some
                                  buckets as `params`, these buckets, and weight_decay. zero.py sets `lr` in each step
    moments                       the names of the optimizer's state tensors that have the weight's shape
    counts_steps                  whether the state also has a `step`
    counts_in_norm                whether the gradients belong to the global norm
    lr_factor                     the default of --lr is the preset's value, which is for AdamW, times this
    """
    make: Callable
    moments: tuple[str, ...]
    counts_steps: bool = False
    counts_in_norm: bool = True
    lr_factor: float = 1.0


OPTIMIZERS = {
    "adamw": OptimizerSpec(lambda groups, config, zero: torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True),
        moments=("exp_avg", "exp_avg_sq"), counts_steps=True),
}
