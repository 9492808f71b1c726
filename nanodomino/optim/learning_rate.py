"""The learning rate of each step: a linear rise, then a decay."""

import math

# --lr-decay-style: 1 (the rate is lr) .. 0 (it is min_lr), as a function of the progress from 0 to 1 and of the Config
LR_DECAY_STYLES = {"cosine": lambda progress, config: 0.5 * (1.0 + math.cos(math.pi * progress)),
                   "linear": lambda progress, config: 1.0 - progress, "constant": lambda progress, config: 1.0}


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step, from 1. The rate rises linearly to lr, then decays to min_lr at the step
    lr_decay_iters, by default the last. With the decay style `constant` it stays at lr."""
    end = config.lr_decay_iters or config.train_iters
    warmup = round(config.lr_warmup_fraction * end)            # int() would make 0.29 x 100 steps 28
    if step <= warmup:
        return config.lr * step / warmup
    progress = min((step - warmup) / max(end - warmup, 1), 1.0)
    return config.min_lr + (config.lr - config.min_lr) * LR_DECAY_STYLES[config.lr_decay_style](progress, config)
