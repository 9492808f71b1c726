"""What parallel.py itself promises: f and g, the gathered logits, the words and logits of each rank, and the table in
its docstring."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pitfalls
import pytest
import torch
import torch.distributed as dist
from support.harness import full_tensors, random_data, tiny, train_rank
from support.pitfall_runner import TABLE, call_with_bug

from nanodomino import parallel
from nanodomino.mesh import meta_mesh
from nanodomino.settings.config import Config


def f_and_g_rank():
    """Return this rank's results and gradients of f and g, each beside the tensor that the all-reduce must not change.
    In the second round no tensor is contiguous."""
    rank, group = dist.get_rank(), dist.group.WORLD
    results = []
    for function, shape in product((parallel.copy_to_tensor_parallel, parallel.reduce_from_tensor_parallel),
                                   ((2, 3), (3, 2))):
        x, outgoing = torch.full(shape, 1.0 + rank), torch.full(shape, 10.0 ** rank)
        x, outgoing = (x, outgoing) if shape == (2, 3) else (x.t(), outgoing.t())
        y = function(x.requires_grad_(), group)
        gradient, = torch.autograd.grad(y, x, outgoing)
        results.append([tensor.unique().item() for tensor in (y, gradient, x, outgoing)])
    part = (torch.arange(6.0).view(3, 2) + 10 * rank).t().requires_grad_()
    whole = parallel.GatherFromTensorParallel.apply(part, group)
    gradient, = torch.autograd.grad(whole, part, torch.arange(12.0).view(2, 6))
    vocabulary = SimpleNamespace(weight=torch.empty(16, 1), num_words=(16, 1)[rank], num_logits=(16, 8)[rank],
                                 group=group)
    logits = parallel.gather_logits(torch.arange(17.0)[None].split(16, dim=-1)[rank], vocabulary, 17)
    return results, whole[0].tolist(), gradient.tolist(), logits[0].tolist()


def test_f_and_g_are_mirror_images_and_change_neither_their_input_nor_their_gradient(pool):
    for rank, (results, whole, gradient, logits) in enumerate(pool.run(f_and_g_rank, world_size=2)):
        x, outgoing = 1.0 + rank, 10.0 ** rank
        assert results == 2 * [[x, 11.0, x, outgoing]] + 2 * [[3.0, outgoing, x, outgoing]]
        assert whole == [0, 2, 4, 10, 12, 14]
        assert logits == list(range(17))
        assert gradient == [[3.0 * rank + i for i in range(3)], [6 + 3.0 * rank + i for i in range(3)]]


@pytest.mark.table
@pytest.mark.parametrize("words, tp, num_words, num_logits", [
    (29, 1, [29], [32]), (17, 2, [16, 1], [16, 8]), (29, 4, [8, 8, 8, 5], [8, 8, 8, 8]),
    (9, 4, [8, 1, 0, 0], [8, 8, 0, 0]), (35, 2, [32, 3], [32, 8]), (20, 16, [2] * 10 + [0] * 6, [2] * 10 + [0] * 6)])
def test_each_rank_owns_its_words_and_computes_a_multiple_of_eight_logits(words, tp, num_words, num_logits):
    """Some ranks have only padding. No rank has more logits than rows."""
    config = replace(tiny(tp, tensor_model_parallel_size=tp, num_attention_heads=16), vocab_size=words)
    shards = [parallel.VocabParallelEmbedding(config, meta_mesh(1, 1, tp, tp_rank=rank)) for rank in range(tp)]
    assert ([shard.num_words for shard in shards], [len(shard.logits_weight()) for shard in shards]) == (
        num_words, num_logits)
    tokens = torch.arange(words)
    local = [shard.local_rows(tokens) for shard in shards]
    assert sum(is_local.int() for _, is_local in local).tolist() == [1] * words
    for shard, (row, is_local) in zip(shards, local):
        assert torch.equal(row, (tokens - shard.first_row) * is_local)


@pytest.mark.exhaustive
def test_the_table_in_parallels_docstring_is_what_is_measured(pool):
    """A backward of g that also all-reduces, which is one of the pitfalls."""
    config = Config(dtype="float64", tensor_model_parallel_size=2, pipeline_model_parallel_size=1, global_batch_size=4)
    config = config.resolve(2).with_vocabulary(257)
    number = [entry.bug for entry in TABLE].index(pitfalls.summed_twice) + 1
    wrong, right = (full_tensors(pool.run(call_with_bug, number, is_wrong, train_rank, config, None,
                                          random_data(config, 1), 1, world_size=2),
                                 lambda outcome: outcome.gradients[0]) for is_wrong in (True, False))
    rows = [re.search(rf"\n +{row} +([\d. ]+)\n", parallel.__doc__)[1] for row in ("layer", "ratio of norms", "cosine")]
    layers, ratios, cosines = ([float(number) for number in row.split()] for row in rows)
    assert sorted(layers) == list(range(config.num_layers))
    for layer, ratio, cosine in zip(layers, ratios, cosines, strict=True):
        twice, once = (side[f"layers.{layer:.0f}.mlp.dense_h_to_4h.weight"].flatten() for side in (wrong, right))
        assert float(twice.norm() / once.norm()) == pytest.approx(ratio, rel=0.01)
        assert float(torch.cosine_similarity(twice, once, dim=0)) == pytest.approx(cosine, abs=0.01)
