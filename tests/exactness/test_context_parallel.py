"""Checks which places and keys each rank has with context parallelism. test_layouts.py compares whole training steps on
every layout."""

from types import SimpleNamespace

import pytest
import torch
from support.harness import count_documents, tiny

from nanodomino.layers.dropout_and_positions import MasksAndPositions
from nanodomino.mesh import meta_mesh
from nanodomino.options.context_parallel import ExchangedHeads, bias_and_keys, by_rank, in_order, queries_and_keys


def mesh_of(ranks, rank):
    return meta_mesh(1, 1, 1, inner_axes=dict(cp=ranks), cp=rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_computes_as_many_scores_and_reads_as_many_keys(ranks):
    places = torch.arange(48).view(2, 24)
    own = by_rank(places, ranks)
    assert len({int((1 + part[0]).sum()) for part in own}) == 1
    assert torch.equal(in_order(own), places)
    for rank in range(ranks):
        found = queries_and_keys(tiny(1), torch.zeros_like(places), mesh_of(ranks, rank),
                                 torch.device("cpu"))
        assert found["keys"].numel() == 2 * (24 + 24 // (2 * ranks))


def test_sequences_of_queries_and_their_keys_are_those_counted_by_hand():
    """Eight tokens on two ranks. On rank 0 the first part holds the end of a document and the start of the next."""
    _, documents = count_documents(torch.tensor([[3, 1, 1, 3, 1, 1, 1, 1]]))
    assert documents.tolist() == [[0, 1, 1, 1, 2, 2, 2, 2]]
    expected = [([0], [1], [6, 7], [0, 1, 4, 5, 6, 7]), ([2, 3], [4, 5], [], [1, 2, 3, 4, 5])]
    for rank, (*sequences, keys) in enumerate(expected):
        found = queries_and_keys(tiny(1), documents, mesh_of(2, rank), torch.device("cpu"))
        starts = found["attend"].keywords["documents"]
        assert starts.starts.diff().tolist() == [len(queries) for queries in sequences if queries]
        assert starts.longest == 2 and starts.keys.longest == [4, 3][rank]
        assert starts.keys.starts.tolist() == [[0, 1, 2, 6], [0, 3, 5]][rank]
        gathered = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])               # the places of rank 0, then of rank 1
        assert gathered[found["keys"]].tolist() == [keys]


@pytest.mark.table
@pytest.mark.parametrize("documents, biases", [([[0] * 8, [0] * 8], 1), ([[0] * 8, [0] * 4 + [1] * 4], 2)])
def test_one_bias_serves_all_samples_only_if_each_is_one_document(documents, biases):
    found = bias_and_keys(tiny(1), torch.tensor(documents), mesh_of(2, 0), torch.device("cpu"))
    assert len(found["attention_bias"]) == biases


@pytest.mark.table
def test_after_an_all_to_all_each_rank_drops_scores_of_its_own_heads():
    """Tensor parallelism cuts the heads first, and the exchange cuts each part."""
    config, masks = tiny(4, tensor_model_parallel_size=2, attention_dropout=0.5, num_attention_heads=8), []
    for tp_rank in range(2):
        for rank in range(2):
            mesh = meta_mesh(1, 1, 2, tp_rank=tp_rank, inner_axes=dict(cp=2), cp=rank)
            inside = SimpleNamespace(config=config, mesh=mesh, ranks=2, site="layers.0.attention")
            shared = MasksAndPositions(config, mesh, [7])
            masks.append(ExchangedHeads.inputs(inside, shared, torch.zeros(1, 4, 1)).dropout_mask)
    assert torch.equal(torch.cat(masks, dim=1), shared.attention_dropout_mask("layers.0.attention", 8, masks[0]))
