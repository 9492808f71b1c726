"""The learning rate follows its formulas. tests/exactness has AdamW, test_muon.py has Muon."""

import dataclasses
import math

import pytest
from support.harness import tiny

from nanodomino.optim.optimizers import LR_DECAY_STYLES, OPTIMIZERS, learning_rate


@pytest.mark.table
def test_the_learning_rate_climbs_then_falls_to_min_lr():
    middles = dict(cosine=0.55, linear=0.55, constant=1.0, WSD=1.0)
    assert middles.keys() == LR_DECAY_STYLES.keys(), "add the new decay style, with its rate half-way, to `middles`"
    for style, middle in middles.items():
        config = tiny(1, lr=1.0, min_lr=0.1, train_iters=110, lr_warmup_fraction=10.25 / 110, lr_decay_style=style)
        rates = [learning_rate(step, config) for step in range(1, 111)]
        assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
        assert rates[59] == pytest.approx(middle) and rates[-1] == pytest.approx(1.0 if style == "constant" else 0.1)
        assert all(one >= other for one, other in zip(rates[9:], rates[10:]))
    for fraction, iters, steps in ((0.29, 100, 29), (0.05, 215, 11), (0.0, 100, 0)):       # 0.29 x 100 is 28.999...
        config = tiny(1, lr=1.0, train_iters=iters, lr_warmup_fraction=fraction, lr_decay_style="constant")
        rates = [learning_rate(step, config) for step in range(1, iters + 1)]
        assert sum(rate < config.lr for rate in rates) == max(steps - 1, 0)


@pytest.mark.table
@pytest.mark.parametrize("style, left", [
    ("exponential", lambda x: 2.0 * math.pow(0.5, x) - 1.0), ("linear", lambda x: 1.0 - x),
    ("cosine", lambda x: 0.5 * (math.cos(math.pi * x) + 1.0)), ("minus_sqrt", lambda x: 1.0 - math.sqrt(x))])
def test_wsd_is_megatrons(style, left):
    """Here the rate rises until step 10 and falls from step 70 to step 90. By default a tenth of the steps decay, and a
    decay that would start during the warm-up starts after it."""
    config = tiny(1, lr=1.0, min_lr=0.1, train_iters=100, lr_decay_iters=90, lr_warmup_fraction=1 / 9,
                  lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style=style)
    for step in range(11, 101):
        rest = 1.0 if step <= 70 else left((step - 70) / 20) if step <= 90 else 0.0
        assert learning_rate(step, config) == pytest.approx(0.1 + 0.9 * rest)
    for steps, start in ((None, 81), (90, 10), (1000, 10), (1, 89)):
        other = dataclasses.replace(config, lr_wsd_decay_iters=steps)
        assert learning_rate(start, other) == 1.0 > learning_rate(start + 1, other) and learning_rate(90, other) == 0.1


@pytest.mark.table
def test_the_steps_of_each_optimizer_are_compared_and_the_default_rate_of_muon_is_twice_that_of_adamw():
    """Of AdamW by tests/exactness with torch's; settings/test_effects.py shows that each of its settings counts."""
    assert OPTIMIZERS.keys() == {"adamw", "muon"}, "compare the new optimizer with its formula, as test_muon.py does"
    assert tiny(1, lr=None, optimizer="muon").lr == 2 * tiny(1, lr=None).lr
