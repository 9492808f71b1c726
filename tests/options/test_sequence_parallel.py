"""A sharded residual stream: what its two operations compute, and what hides them. test_layouts.py compares whole
training steps."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny

from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.mesh import make_mesh
from nanodomino.options.sequence_parallel import ShardedResidual

SHAPE = (3, 8, 6)                    # three samples of eight tokens, so that a rank holds rows of two samples


def numbers(seed, dtype):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arrive(flight):
    if flight.collective:
        flight.launch()
        flight.work.wait()
    return flight.result()


def rows_rank(dtype):
    """Return this rank's rows of a tensor; all rows gathered, in one piece and in two chunks of features; and the
    reduce of a tensor that each rank has of its own."""
    mesh = make_mesh(1, 1, torch.distributed.get_world_size(), torch.device("cpu"))
    stream = ShardedResidual(mesh.tp_group)
    rows = stream.own_rows(numbers(99, dtype))
    assert rows.untyped_storage().nbytes() == rows.nbytes, "a view would keep all rows in memory"
    chunks, addend = [arrive(stream.gather(part)) for part in rows.chunk(2, dim=-1)], numbers(mesh.tp_rank, dtype)
    reduce = stream.reduce(addend)
    place = addend.flatten().chunk(stream.shards)[mesh.tp_rank]
    assert reduce.tensor.data_ptr() == place.data_ptr(), "where a GPU's reduce-scatter leaves this rank's sums"
    return rows, arrive(stream.gather(rows)), chunks, arrive(reduce)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gather_returns_all_rows_and_reduce_the_sum_of_this_ranks_rows(pool, ranks, dtype):
    """The sum has torch.sum's bits."""
    whole = numbers(99, dtype)
    total = torch.stack([numbers(rank, dtype) for rank in range(ranks)]).sum(dim=0)
    for rank, (own, gathered, chunks, reduced) in enumerate(pool.run(rows_rank, dtype, world_size=ranks)):
        for found, expected in ((own, whole), (reduced, total)):
            assert found.shape == (3, 8 // ranks, 6)
            assert torch.equal(found.flatten(0, 1), expected.flatten(0, 1).chunk(ranks)[rank])
        assert torch.equal(gathered, whole) and torch.equal(torch.cat(chunks, dim=-1), whole)


def test_the_tape_keeps_only_this_ranks_rows_of_the_word_embeddings():
    """Without learned positions and dropout, the reduced words are the residual stream itself. Their reduce leaves them
    in a tensor of all rows, of which a view would keep every row."""
    config = tiny(2, **FOUR, position_embedding_type="rope", slices=1)
    with fake_world(0, 2):
        _, _, _, stage = build(config)
        (piece,) = run_to_end(stage.forward(random_data(config, 1).batch(0, 0, 0, 1, 4, 4)))[1]
    x = piece.tape[0].norm.x
    assert x.shape == (4, config.seq_length // 2, config.hidden_size) and x.untyped_storage().nbytes() == x.nbytes


# ---- what runs between a launch and its wait

def windows_of(config):
    """Return (kind, site, slice, matmuls of other slices while it is in flight) for each collective of a microbatch on
    rank 0, forward and backward."""
    found, launched = [], {}
    with fake_world(0, config.world_size):
        _, _, _, stage = build(config, trace=Trace())
        launch, wait, events = stage.ops.launch, stage.ops.wait, stage.trace.events

        def launched_at(piece, site, flight):
            launch(piece, site, flight)
            if flight.collective:
                launched[id(flight)] = flight, len(events)
            return flight

        def waited_at(piece, site, flights):
            for flight in flights:
                if id(flight) in launched:
                    _, begin = launched.pop(id(flight))
                    others = Counter(event.kind for event in events[begin:] if event.args.get("slice") != piece.index)
                    found.append((flight.collective, site, piece.index, others["matmul"]))
            return wait(piece, site, flights)

        stage.ops.launch, stage.ops.wait = launched_at, waited_at
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses, tape = run_to_end(stage.forward(batch))
        forward, found = found, []
        run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
    assert not launched
    return forward, found


# three layers
FOUR = dict(tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, sequence_parallel=True)
EXPERTS = dict(num_experts=2, disable_bias_linear=True)


def exposed(windows):
    """The collectives during which no other slice computes a matmul."""
    return {(kind, site, piece) for kind, site, piece, products in windows if not products}


@pytest.mark.parametrize("slices, columns, granularity, options", [
    (2, 1, "none", {}), (3, 1, "none", {}), (2, 2, "none", {}), (2, 1, "full", {}), (3, 2, "selective", {}),
    (2, 1, "none", EXPERTS)])
def test_another_slices_matmul_hides_every_all_gather_and_reduce_scatter(slices, columns, granularity, options):
    """Except at the model's ends, where no slice has a matmul left."""
    forward, backward = windows_of(tiny(2, **FOUR, **options, slices=slices, columns=columns,
                                        recompute_granularity=granularity))
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
