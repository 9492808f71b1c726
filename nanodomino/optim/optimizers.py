"""Optimizers: how a gradient changes a weight, element by element, and which moments are kept for it.

    AdamW    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2                                        (1711.05101)
             w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    Lion     u = sign(b1 m + (1 - b1) g)     m = b2 m + (1 - b2) g     w = (1 - lr decay) w - lr u    (2302.06675)

Because each element is updated by itself, ZeRO may cut flat buffers anywhere. zero.py passes this rank's partition of
each buffer as one tensor, and checkpoints save each moment next to the weight. A new optimizer is one entry of
OPTIMIZERS.

Layouts differ by rounding. AdamW's update is a smooth function of the gradient, so the difference stays small. Lion's
is a sign: where a gradient is 0 but for rounding, it is a full step of lr in a random direction. A GPT has one such
parameter, the bias of the keys: it shifts all scores of a query alike, which softmax ignores. Nothing else depends on
it, so losses and all other weights still agree on every layout.
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


@dataclass(frozen=True)
class OptimizerSpec:
    """make(parameter groups, config) returns a torch.optim.Optimizer whose groups have an `lr`.

    moments: the names of the state tensors with the weight's shape; counts_steps: whether the state also has a `step`.
    """
    make: Callable
    moments: tuple[str, ...]
    counts_steps: bool = False


OPTIMIZERS = {
    "adamw": OptimizerSpec(lambda groups, config: torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True),
        moments=("exp_avg", "exp_avg_sq"), counts_steps=True),
    "lion": OptimizerSpec(lambda groups, config: Lion(
        groups, lr=config.lr, betas=(config.lion_beta1, config.lion_beta2)), moments=("exp_avg",)),
}
