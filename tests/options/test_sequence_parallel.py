"""What a sharded residual stream keeps, what hides its collectives, and which places and keys a rank has with context
parallelism. test_layouts.py compares whole training steps, comm/test_collectives.py the two operations."""

from types import SimpleNamespace

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, count_documents, random_data, tiny
from test_domino import trace_rank, windows

from nanodomino.domino import run_to_end
from nanodomino.layers.attention_mask import AttentionMask, document_begins
from nanodomino.mesh import meta_mesh
from nanodomino.options.context_parallel import by_rank, gathered_places, in_order, own_places

# three layers
FOUR = dict(tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, sequence_parallel=True)
EXPERTS = dict(num_experts=2, disable_bias_linear=True)


def test_a_rank_keeps_its_own_rows_without_the_memory_of_the_others():
    """Without learned positions and dropout, the reduced words are the residual stream itself. Their reduce leaves them
    in a tensor of all rows, of which a view would keep every row."""
    config = tiny(2, **FOUR, position_embedding_type="rope", slices=1)
    with fake_world(0, 2):
        _, _, _, stage = build(config)
        (piece,) = run_to_end(stage.forward(random_data(config, 1).batch(0, 0, 0, 1, 4, 4)))[1]
        own = stage.ops.stream.own_rows(torch.ones(4, config.seq_length, config.hidden_size))
    for x in (piece.tape[0].norm.x, own):
        assert x.shape == (4, config.seq_length // 2, config.hidden_size)
        assert x.untyped_storage().nbytes() == x.nbytes


# ---- what runs between a launch and its wait

def exposed(launches):
    """The collectives during which no other slice computes a matmul."""
    return {(kind, site, piece) for kind, site, piece, others, _ in launches if not others["matmul"]}


@pytest.mark.parametrize("slices, columns, granularity, options", [
    (2, 1, "none", {}), (3, 1, "none", {}), (2, 2, "none", {}), (2, 1, "full", {}), (3, 2, "selective", {}),
    (2, 1, "none", EXPERTS)])
def test_another_slices_matmul_hides_every_all_gather_and_reduce_scatter(slices, columns, granularity, options):
    """Except at the model's ends, where no slice has a matmul left."""
    config = tiny(2, **FOUR, **options, slices=slices, columns=columns, recompute_granularity=granularity)
    with fake_world(0, 2):
        forward, backward = map(windows, trace_rank(config, random_data(config, 1)))
    assert exposed(forward) <= {("reduce_scatter", "embedding", 0), ("all_gather", "layers.0.attention", 0),
                             ("all_gather", "head", slices - 1),
                             *(("all_reduce", "cross_entropy", piece) for piece in range(slices))}
    assert exposed(backward) <= {("reduce_scatter", "head", 0), ("all_gather", "layers.2.mlp", 0),
                              ("reduce_scatter", "layers.0.attention", slices - 1),
                              ("all_gather", "embedding", slices - 1)}
    assert len(forward) == slices * (6 * 2 * columns + 1 + columns + 2)
    assert len(backward) == slices * (6 * 3 * columns + 2 * columns)


def test_slices_of_a_replicated_stream_are_not_staggered():
    """Their all-reduces are hidden without it."""
    for cut, turns in ((False, 0), (True, 3)):
        with fake_world(0, 2):
            _, _, _, stage = build(tiny(2, **FOUR | dict(sequence_parallel=cut), slices=2))
        assert len([*stage.staggered(SimpleNamespace(index=3), iter(()))]) == turns


# ---- context parallelism

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
