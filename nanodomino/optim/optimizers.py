"""What becomes of a gradient: the arithmetic of an update, element by element, and the moments that it keeps.

    AdamW    m = b1 m + (1 - b1) g     v = b2 v + (1 - b2) g^2                                        (1711.05101)
             w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    Lion     u = sign(b1 m + (1 - b1) g)     m = b2 m + (1 - b2) g     w = (1 - lr decay) w - lr u    (2302.06675)

Both look at one element at a time. That is why ZeRO can cut flat buffers anywhere: zero.py hands over this rank's part
of each buffer as one tensor, decides what is decayed, and asks here for nothing but an optimizer and the names of its
moments, which checkpoints save beside the weight. So another optimizer is one entry of OPTIMIZERS.

What the layout may show. AdamW's update is a smooth function of the gradient, so rounding stays rounding. Lion's is a
step: where a gradient is 0 but for rounding its sign is noise, a full step of lr either way, and layouts part. A GPT
has one such place, the bias of the keys, which moves all scores of a query alike, and softmax does not see that. Nor
does anything else depend on it: losses and all other weights still agree on every layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (2302.06675, algorithm 2): one moment, and half of AdamW's state."""

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
    """make(parameter groups, config) -> a torch.optim.Optimizer, whose groups have `lr`; moments: the names under which
    it keeps a tensor of the weight's shape each, whatever its settings;
    counts_steps: whether it also keeps the number of its updates, as `step`."""
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
