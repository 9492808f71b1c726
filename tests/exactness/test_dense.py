"""A dense GPT, which uses no option, equals one plain process on two layouts."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.harness import FAMILIES, check_against_reference, tiny

STAGES = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="zb-v", num_layers=5, slices=2,
              global_batch_size=12, **FAMILIES["llama"])
REPLICAS = dict(tensor_model_parallel_size=2, slices=3, columns=2, zero_stage=2, hidden_dropout=0.2,
                global_batch_size=12)


@pytest.mark.parametrize("settings", [STAGES, REPLICAS], ids=["stages", "replicas"])
def test_a_dense_model_equals_one_plain_process(pool, settings):
    check_against_reference(pool, tiny(4, **settings), steps=2)


def as_on_a_gpu(function, *arguments):
    """Return function(*arguments) on a rank whose generators draw other numbers than usual."""
    bernoulli = torch.Tensor.bernoulli_
    with mock.patch.object(torch.Tensor, "bernoulli_", lambda mask, p, generator: bernoulli(
            mask, p, generator=torch.Generator(mask.device).manual_seed(generator.initial_seed() + 1))):
        return function(*arguments)


def test_where_ranks_draw_other_dropout_masks_so_does_the_plain_process(pool):
    """On GPUs the exactness check of bench.py compares with a plain model, which computes on the CPU."""
    gpus = SimpleNamespace(run=lambda *given, world_size: pool.run(as_on_a_gpu, *given, world_size=world_size))
    check_against_reference(gpus, tiny(4, **REPLICAS, seed=5), steps=2)
