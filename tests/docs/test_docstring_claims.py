"""Measures what the docstring of parallel.py claims: the bug that it describes is put back."""

import re

import pytest
import torch
import torch.distributed as dist
from support.harness import Outcome, build, full_tensors, random_data, shard_spec

from nanodomino import parallel
from nanodomino.config.config import Config
from nanodomino.parallel import ReduceFromTensorParallel


class AllReducedTwice(ReduceFromTensorParallel):
    """g whose backward also all-reduces, which is wrong."""

    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return ReduceFromTensorParallel.forward(ctx, partial, group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def plain_gradients_rank(config, data, g):
    """Return the gradients of a microbatch's summed loss: plain forward with this g, backward by autograd."""
    _, model, _, _ = build(config)
    original, parallel.ReduceFromTensorParallel = parallel.ReduceFromTensorParallel, g
    try:
        batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses = model(batch.tokens, batch.positions, batch.labels)
        (losses * batch.loss_mask).sum().backward()
    finally:
        parallel.ReduceFromTensorParallel = original
    gradients = {name: (weight.grad, shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((0, 0, model.mesh.tp_rank), [], [], [gradients], {}, 0.0)


def test_the_table_in_parallels_docstring_is_what_is_measured(pool):
    config = Config(dtype="float64", tensor_model_parallel_size=2, pipeline_model_parallel_size=1, global_batch_size=4)
    config = config.resolve(2).with_vocabulary(257)
    wrong, right = (full_tensors(pool.run(plain_gradients_rank, config, random_data(config, 1), g, world_size=2),
                                 lambda outcome: outcome.gradients[0])
                    for g in (AllReducedTwice, ReduceFromTensorParallel))
    rows = [re.search(rf"\n +{row} +([\d. ]+)\n", parallel.__doc__)[1] for row in ("layer", "ratio of norms", "cosine")]
    layers, ratios, cosines = ([float(number) for number in row.split()] for row in rows)
    assert sorted(layers) == list(range(config.num_layers))
    for layer, ratio, cosine in zip(layers, ratios, cosines, strict=True):
        twice, once = (side[f"layers.{layer:.0f}.mlp.dense_h_to_4h.weight"].flatten() for side in (wrong, right))
        assert float(twice.norm() / once.norm()) == pytest.approx(ratio, rel=0.01)
        assert float(torch.cosine_similarity(twice, once, dim=0)) == pytest.approx(cosine, abs=0.01)
