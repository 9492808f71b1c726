"""Checks which places and keys each rank has with context parallelism. test_layouts.py compares whole training steps on
every layout."""

import pytest
import torch
from support.harness import count_documents

from nanodomino.layers.attention_mask import AttentionMask, document_begins
from nanodomino.mesh import meta_mesh
from nanodomino.options.context_parallel import by_rank, gathered_places, in_order, own_places


def mask_of(documents, ranks, rank, window=None):
    """Return the mask of a rank's queries of samples with these documents [b, s]."""
    mesh = meta_mesh(1, 1, 1, inner_axes=dict(cp=ranks), cp=rank)
    places = own_places(torch.arange(documents.size(1)), mesh, dim=0)
    return AttentionMask(places, document_begins(documents)[:, places], window, documents.size(1),
                         gathered_places(*documents.shape, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_computes_as_many_scores_and_reads_as_many_keys(ranks):
    places = torch.arange(48).view(2, 24)
    own = by_rank(places, ranks)
    assert len({int((1 + part[0]).sum()) for part in own}) == 1
    assert torch.equal(in_order(own), places)
    for rank in range(ranks):
        found = mask_of(torch.zeros_like(places), ranks, rank).runs(torch.device("cpu"))
        middle = rank == ranks - 1                             # its two parts are neighbours, so they are one run
        assert found.keys.numel() == 2 * (12 + 24 // (2 * ranks) if middle else 24 + 24 // (2 * ranks))


def test_sequences_of_queries_and_their_keys_are_those_counted_by_hand():
    """Eight tokens on two ranks. On rank 0 the first part holds the end of a document and the start of the next."""
    _, documents = count_documents(torch.tensor([[3, 1, 1, 3, 1, 1, 1, 1]]))
    assert documents.tolist() == [[0, 1, 1, 1, 2, 2, 2, 2]]
    expected = [([0], [1], [6, 7], [0, 1, 4, 5, 6, 7]), ([2, 3], [4, 5], [], [1, 2, 3, 4, 5])]
    for rank, (*sequences, keys) in enumerate(expected):
        found = mask_of(documents, 2, rank).runs(torch.device("cpu"))
        assert found.starts.diff().tolist() == [len(queries) for queries in sequences if queries]
        assert found.longest == 2 and found.longest_keys == [4, 3][rank]
        assert found.key_starts.tolist() == [[0, 1, 2, 6], [0, 3, 5]][rank]
        gathered = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])               # the places of rank 0, then of rank 1
        assert gathered[found.keys].tolist() == [keys]
    windowed = mask_of(documents, 2, 0, window=1).runs(torch.device("cpu"))
    assert gathered[windowed.keys].tolist() == [[0, 1, 5, 6, 7]] and windowed.window == 1
