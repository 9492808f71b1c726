"""Each optimizer trains alike on every layout and follows its formula."""

import math

import pytest
import torch
from support.fake_world import fake_world
from support.harness import difference, full_tensors, random_data, reference_for, relative, sizes_of, tiny, train_rank
from support.reference import random_weights

import train
from nanodomino.optim.optimizers import OPTIMIZERS

STEPS = 3


def without_key_bias(weights: dict, heads: int) -> tuple[dict, torch.Tensor]:
    """Return (all weights without the biases of the keys, the biases of the keys)."""
    rest, keys = dict(weights), []
    for name, weight in weights.items():
        if name.endswith("qkv.bias"):
            qkv = weight.view(heads, 3, -1)
            keys.append(qkv[:, 1].flatten())
            rest[name] = qkv[:, [0, 2]]
    return rest, torch.cat(keys)


@pytest.mark.parametrize("tp, pp, dp, options", [
    (1, 1, 1, {}), (2, 2, 2, dict(slices=2, bucket_size=500)),
    pytest.param(1, 1, 4, dict(zero_stage=0), marks=pytest.mark.exhaustive)])
def test_lion_agrees_on_every_layout_but_where_the_true_gradient_is_zero(pool, tp, pp, dp, options):
    """The bias of the keys shifts all scores of a query alike, which softmax ignores: its gradient is rounding, and the
    sign is a full step. Nothing else depends on it: losses, norms and all other weights equal the reference's."""
    config = tiny(tp * pp * dp, optimizer="lion", lr=1e-3, global_batch_size=12, tensor_model_parallel_size=tp,
                  pipeline_model_parallel_size=pp, **options)
    weights, data, records, final = reference_for(config, STEPS)
    outcomes = pool.run(train_rank, config, weights, data, STEPS, world_size=config.world_size)
    assert relative(outcomes[0].losses, [record.loss for record in records]) < 1e-9
    assert relative(outcomes[0].norms, [record.gradient_norm for record in records]) < 1e-9
    heads = config.num_attention_heads
    (ours, our_keys), (theirs, their_keys), (_, first_keys) = (
        without_key_bias(side, heads)
        for side in (full_tensors(outcomes, lambda outcome: outcome.weights), final, weights))
    assert difference(ours, theirs) < 1e-9
    farthest = sum(train.learning_rate(step, config) for step in range(1, STEPS + 1)) * (1 + 1e-9)
    for keys in (our_keys, their_keys):
        assert (keys - first_keys).abs().max() <= farthest, "a step moves it by at most lr"
    assert not torch.allclose(their_keys, first_keys, atol=1e-5), "rounding must move it, or this shows nothing"


# ---- every setting, against formulas that do not read it from the config

NOT_A_DEFAULT = dict(lr=0.02, min_lr=0.0, lr_decay_style="linear", lr_warmup_fraction=0.45, train_iters=4,
                     weight_decay=0.3, clip_grad=0.05, adam_beta1=0.6, adam_beta2=0.7, adam_eps=0.01, lion_beta1=0.3,
                     lion_beta2=0.8)
RATES = 0.02, 0.02 * 2 / 3, 0.02 / 3, 0.0         # int(1.8) steps of warm-up, then linearly down to min_lr


def adamw(w, g, state, t, lr, decay):
    m, v = state
    m, v = 0.6 * m + 0.4 * g, 0.7 * v + 0.3 * g * g
    return (1 - lr * decay) * w - lr * (m / (1 - 0.6 ** t)) / ((v / (1 - 0.7 ** t)).sqrt() + 0.01), (m, v)


def lion(w, g, state, t, lr, decay):
    m, _ = state
    return (1 - lr * decay) * w - lr * torch.sign(0.3 * m + 0.7 * g), (0.8 * m + 0.2 * g, 0.0)


FORMULAS = dict(adamw=adamw, lion=lion)


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
