"""Each optimizer of the table does what its paper says on every layout; what is kept of it has the bytes that formulas
say."""

import pytest
import torch
from support.harness import build, difference, full_tensors, random_data, reference_for, relative, tiny, train_rank

import train
from nanodomino.analysis import expected_memory
from nanodomino.optim.optimizers import OPTIMIZERS

LAYOUTS = [{}, dict(tensor_model_parallel_size=2, slices=2),
           dict(pipeline_model_parallel_size=2, data_parallel_size=2),
           dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2, slices=2,
                bucket_size=500),
           dict(data_parallel_size=4, zero_stage=0)]
STEPS = 3


def world(layout) -> int:
    return layout.get("tensor_model_parallel_size", 1) * layout.get("pipeline_model_parallel_size",
                                                                    1) * layout.get("data_parallel_size", 1)


def without_key_bias(weights: dict, heads: int) -> tuple[dict, torch.Tensor]:
    """(all weights, but of the qkv biases only q and v; the key biases of all layers)."""
    rest, keys = dict(weights), []
    for name, weight in weights.items():
        if name.endswith("qkv.bias"):
            parts = weight.view(heads, 3, -1)
            keys.append(parts[:, 1].flatten())
            rest[name] = parts[:, [0, 2]]
    return rest, torch.cat(keys)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lion_agrees_on_every_layout_but_where_the_true_gradient_is_zero(pool, layout):
    """The keys' bias moves all scores of a query alike, which softmax does not see: its gradient is rounding, and the
    sign of that is a full step. Nothing else depends on it: losses, norms and all other weights are the reference's."""
    config = tiny(world(layout), optimizer="lion", lr=1e-3, **layout)
    weights, data, records, final = reference_for(config, STEPS)
    outcomes = pool.run(train_rank, config, weights, data, STEPS, world_size=config.world_size)
    assert relative(outcomes[0].losses, [record.loss for record in records]) < 1e-9
    assert relative(outcomes[0].norms, [record.gradient_norm for record in records]) < 1e-9
    heads = config.num_attention_heads
    (ours, our_keys), (theirs, their_keys), (_, first_keys) = (
        without_key_bias(one, heads) for one in (full_tensors(outcomes, lambda outcome: outcome.weights, config.tp),
                                                 final, weights))
    assert difference(ours, theirs) < 1e-9
    farthest = sum(train.learning_rate(step, config) for step in range(1, STEPS + 1)) * (1 + 1e-9)
    for keys in (our_keys, their_keys):
        assert (keys - first_keys).abs().max() <= farthest, "a step moves it by the rate, at most"
    assert not torch.allclose(their_keys, first_keys, atol=1e-5), "rounding moves it: else there is nothing to say"


def test_with_adamw_the_key_bias_stays_where_it_is():
    """What is only rounding is far below eps."""
    config = tiny(1)
    weights, _, _, final = reference_for(config, STEPS)
    (_, before), (_, after) = (without_key_bias(one, config.num_attention_heads) for one in (weights, final))
    assert torch.allclose(before, after, atol=1e-8)


def state_rank(config, data):
    _, model, optimizer, stage = build(config)
    train.train_step(1, stage, optimizer, data, config, stage.mesh)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in [bucket.main_grad for bucket in optimizer.buckets]
                + [bucket.weights for bucket in optimizer.buckets]
                + optimizer.state_tensors()}
    return sum(storages.values()), sum(expected_memory.state_bytes(config, stage.mesh).values()), optimizer.state_names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_keeps_what_the_formulas_count_and_names_what_must_be_saved(pool, name, dtype):
    config = tiny(4, data_parallel_size=2, pipeline_model_parallel_size=2, optimizer=name, dtype=dtype)
    for found, said, kept in pool.run(state_rank, config, random_data(config, 1), world_size=4):
        assert found == said and kept == ("weight", *OPTIMIZERS[name].moments)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_learns(pool, name):
    """The same tokens again and again."""
    config = tiny(1, optimizer=name, lr=3e-3, clip_grad=1.0, train_iters=30, lr_decay_style="constant")
    data = random_data(config, 1)
    data.tokens, data.labels, data.loss_mask = (one.expand(30, -1, -1)
                                                for one in (data.tokens, data.labels, data.loss_mask))
    (outcome,) = pool.run(train_rank, config, None, data, 30, world_size=1)
    assert outcome.losses[-1] < 0.8 * outcome.losses[0]
