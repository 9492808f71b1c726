"""Each optimizer follows its formula. tests/exactness has its layouts."""

import math

import pytest
from support.fake_world import fake_world
from support.harness import difference, random_data, sizes_of, tiny, train_rank
from support.reference import random_weights

from nanodomino.optim.optimizers import OPTIMIZERS

# ---- every setting, against formulas that do not read it from the config

NOT_A_DEFAULT = dict(lr=0.02, min_lr=0.0, lr_decay_style="linear", lr_warmup_fraction=0.45, train_iters=4,
                     weight_decay=0.3, clip_grad=0.05, adam_beta1=0.6, adam_beta2=0.7, adam_eps=0.01)
RATES = 0.01, 0.02, 0.01, 0.0         # round(1.8) steps of warm-up, then linearly down to min_lr


def adamw(w, g, state, t, lr, decay):
    m, v = state
    m, v = 0.6 * m + 0.4 * g, 0.7 * v + 0.3 * g * g
    return (1 - lr * decay) * w - lr * (m / (1 - 0.6 ** t)) / ((v / (1 - 0.7 ** t)).sqrt() + 0.01), (m, v)


FORMULAS = dict(adamw=adamw)


@pytest.mark.table
def test_each_optimizer_of_the_core_has_its_formula_above():
    assert FORMULAS.keys() == OPTIMIZERS.keys(), "write the new optimizer's formula, and add it to FORMULAS"


@pytest.mark.parametrize("name, formula", FORMULAS.items())
def test_each_step_follows_the_formulas_when_no_setting_has_its_default(name, formula):
    """A setting that never reaches the optimizer would show, even if both sides read their numbers from one config."""
    config = tiny(1, optimizer=name, micro_batch_size=24, **NOT_A_DEFAULT)
    assert [setting for setting, value in NOT_A_DEFAULT.items() if value == getattr(tiny(1), setting)] == []
    weights, data = random_weights(sizes_of(config), seed=3), random_data(config, len(RATES))
    with fake_world(0, 1):
        outcome = train_rank(config, weights, data, len(RATES))
    states = dict.fromkeys(weights, (0.0, 0.0))
    for t, (rate, gradients, norm) in enumerate(zip(RATES, outcome.gradients, outcome.norms), 1):
        gradients = {key: gradient for key, (gradient, _) in gradients.items()}
        assert norm == pytest.approx(math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))) and norm > 0.05
        for key, gradient in gradients.items():
            weights[key], states[key] = formula(weights[key], gradient * 0.05 / (norm + 1e-6), states[key], t, rate,
                                                decay=0.3 if gradient.dim() == 2 else 0.0)
    found = {key: weight for key, (weight, _) in outcome.weights.items()}
    assert difference(found, weights) < 1e-12
