"""Each optimizer trains alike on every layout, and its state has the predicted size."""

import math

import pytest
import torch
from support.fake_world import fake_world
from support.harness import (build, difference, full_tensors, random_data, reference_for, relative, sizes_of, tiny,
                             train_rank)
from support.reference import random_weights

import train
from nanodomino.analysis.formulas import state_bytes_per_parameter
from nanodomino.optim.optimizers import OPTIMIZERS

LAYOUTS = [{}, dict(tensor_model_parallel_size=2, slices=2),
           dict(pipeline_model_parallel_size=2, data_parallel_size=2),
           dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2, slices=2,
                bucket_size=500),
           dict(data_parallel_size=4, zero_stage=0)]
STEPS = 3


def world(layout) -> int:
    return math.prod(size for name, size in layout.items() if name.endswith("parallel_size"))


def without_key_bias(weights: dict, heads: int) -> tuple[dict, torch.Tensor]:
    """Return (all weights without the biases of the keys, the biases of the keys)."""
    rest, keys = dict(weights), []
    for name, weight in weights.items():
        if name.endswith("qkv.bias"):
            qkv = weight.view(heads, 3, -1)
            keys.append(qkv[:, 1].flatten())
            rest[name] = qkv[:, [0, 2]]
    return rest, torch.cat(keys)


@pytest.mark.parametrize("layout", [
    layout if i in (0, 1, 3) else pytest.param(layout, marks=pytest.mark.exhaustive)
    for i, layout in enumerate(LAYOUTS)], ids=str)
def test_lion_agrees_on_every_layout_but_where_the_true_gradient_is_zero(pool, layout):
    """The bias of the keys shifts all scores of a query alike, which softmax ignores: its gradient is rounding, and the
    sign is a full step. Nothing else depends on it: losses, norms and all other weights equal the reference's."""
    config = tiny(world(layout), optimizer="lion", lr=1e-3, global_batch_size=12, **layout)
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


def test_with_adamw_the_key_bias_does_not_move():
    """Its gradient, which is only rounding, is far below eps."""
    config = tiny(1)
    weights, _, _, final = reference_for(config, STEPS)
    (_, before), (_, after) = (without_key_bias(side, config.num_attention_heads) for side in (weights, final))
    assert torch.allclose(before, after, atol=1e-8)


def state_rank(config, data):
    _, model, optimizer, stage = build(config)
    train.train_step(1, stage, optimizer, data, config, stage.mesh)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in [bucket.main_grad for bucket in optimizer.buckets]
                + [bucket.weights for bucket in optimizer.buckets]
                + optimizer.state_tensors()}
    return (sum(storages.values()) / sum(bucket.weights.numel() for bucket in optimizer.buckets),
            state_bytes_per_parameter(config), optimizer.state_names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_has_the_predicted_size_and_names_all_that_must_be_saved(pool, name, dtype):
    config = tiny(4, data_parallel_size=2, pipeline_model_parallel_size=2, optimizer=name, dtype=dtype)
    for measured, predicted, names in pool.run(state_rank, config, random_data(config, 1), world_size=4):
        assert measured == pytest.approx(predicted, rel=1e-3) and names == ("weight", *OPTIMIZERS[name].moments)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_learns(pool, name):
    """Every step has the same tokens."""
    config = tiny(1, optimizer=name, lr=3e-3, clip_grad=1.0, train_iters=30, lr_decay_style="constant",
                  micro_batch_size=24)
    data = random_data(config, 1)
    data.tokens, data.labels, data.loss_mask = (rows.expand(30, -1, -1)
                                                for rows in (data.tokens, data.labels, data.loss_mask))
    (outcome,) = pool.run(train_rank, config, None, data, 30, world_size=1)
    assert outcome.losses[-1] < 0.8 * outcome.losses[0]


# ---- every setting, against formulas that do not read it from the config

NOT_A_DEFAULT = dict(lr=0.02, min_lr=0.0, lr_decay_style="linear", lr_warmup_fraction=0.25, train_iters=4,
                     weight_decay=0.3, clip_grad=0.05, adam_beta1=0.6, adam_beta2=0.7, adam_eps=0.01, lion_beta1=0.3,
                     lion_beta2=0.8)
RATES = 0.02, 0.02 * 2 / 3, 0.02 / 3, 0.0         # one step of warm-up, then linearly down to min_lr


def adamw(w, g, state, t, lr, decay):
    m, v = state
    m, v = 0.6 * m + 0.4 * g, 0.7 * v + 0.3 * g * g
    return (1 - lr * decay) * w - lr * (m / (1 - 0.6 ** t)) / ((v / (1 - 0.7 ** t)).sqrt() + 0.01), (m, v)


def lion(w, g, state, t, lr, decay):
    m, _ = state
    return (1 - lr * decay) * w - lr * torch.sign(0.3 * m + 0.7 * g), (0.8 * m + 0.2 * g, 0.0)


@pytest.mark.parametrize("name, formula", [("adamw", adamw), ("lion", lion)])
def test_each_step_follows_the_formulas_when_no_setting_has_its_default(name, formula):
    """A setting that never reaches the optimizer would show, even if both sides read their numbers from one config."""
    config = tiny(1, optimizer=name, micro_batch_size=24, **NOT_A_DEFAULT)
    assert [setting for setting, value in NOT_A_DEFAULT.items() if value == getattr(tiny(1), setting)] == []
    assert set(OPTIMIZERS) == {"adamw", "lion"}, "a new optimizer needs its formula here"
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
