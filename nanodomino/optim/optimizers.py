"""Optimizers: how a gradient g changes a weight w, element by element, and which moments (m, v) are kept for it.

    AdamW    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2                                        (1711.05101)
             w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    Lion     u = sign(b1 m + (1 - b1) g)     m = b2 m + (1 - b2) g     w = (1 - lr decay) w - lr u    (2302.06675)

t counts the updates. Because each element is updated by itself, ZeRO may cut flat buffers anywhere. zero.py passes this
rank's partition of each buffer as one tensor, and checkpoints save each moment next to its weight. A new optimizer is
one entry of OPTIMIZERS.

Layouts sum in different orders, so their gradients differ by rounding. AdamW's update is a smooth function of the
gradient, so its difference stays small. Lion's update is a sign: if the true gradient is 0, rounding decides the sign,
and the weight takes a full step of lr in a random direction. In a GPT without rotary positions this happens to the bias
of the keys: this bias shifts all attention scores of a query by the same amount, and softmax ignores such a shift. So
losses and all other weights still agree on every layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (2302.06675, algorithm 2): one moment, half of AdamW's state."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                moment = state.setdefault("exp_avg", torch.zeros_like(weight))
                update = torch.lerp(weight.grad, moment, beta1).sign_()
                weight.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                moment.lerp_(weight.grad, 1.0 - beta2)


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
    also_reads                    another optimizer whose settings it reads too, such as "adamw"
    """
    make: Callable
    moments: tuple[str, ...]
    counts_steps: bool = False
    counts_in_norm: bool = True
    also_reads: str | None = None


OPTIMIZERS = {
    "adamw": OptimizerSpec(lambda groups, config, zero: torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True),
        moments=("exp_avg", "exp_avg_sq"), counts_steps=True),
    "lion": OptimizerSpec(lambda groups, config, zero: Lion(
        groups, lr=config.lr, betas=(config.lion_beta1, config.lion_beta2)), moments=("exp_avg",)),
}
