"""What a sharded residual stream keeps, and what hides its collectives. test_layouts.py compares whole training steps,
comm/test_collectives.py the two operations."""

from types import SimpleNamespace

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny
from test_domino import trace_rank, windows

from nanodomino.domino import run_to_end

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
