"""A sharded residual stream trains like a replicated one: the same numbers, other collectives, less memory."""

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.fake_world import fake_world
from support.harness import (build, difference, full_tensors, random_data, reference_for, relative, sizes_of, tiny,
                             train_rank, train_steps)
from support.reference import random_weights

from nanodomino.checkpoint import load, save
from nanodomino.checkpoint.find_checkpoints import newest_intact_checkpoint
from nanodomino.comm.trace import Trace
from nanodomino.config.config import Config
from nanodomino.config.setting import names_affecting
from nanodomino.domino import Domino, run_to_end
from nanodomino.mesh import make_mesh
from nanodomino.overlap.sequence_parallel import ReplicatedResidual, ShardedResidual, residual_stream
from nanodomino.run.check_copies import drift_warning

STEPS = 2
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.3)
SIX = dict(global_batch_size=6, num_layers=4)          # two microbatches of three samples


# ---- gather, reduce, own_rows

def numbers(seed, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arrive(flight):
    if flight.kind:
        flight.launch()
        flight.work.wait()
    return flight.result()


def three_of(kind, shape, dtype):
    """On a rank: its rows of a tensor; their gather, in one piece and in two chunks of features; and the reduce of a
    tensor of its own."""
    mesh = make_mesh(1, 1, torch.distributed.get_world_size(), torch.device("cpu"))
    stream = kind(mesh.tp_group)
    rows = stream.own_rows(numbers(99, shape, dtype))
    assert kind is ReplicatedResidual or rows.untyped_storage().nbytes() == rows.nbytes, (
        "a view would keep all rows in memory")
    return rows, arrive(stream.gather(rows)), [arrive(stream.gather(part)) for part in rows.chunk(2, dim=-1)], arrive(
        stream.reduce(numbers(mesh.tp_rank, shape, dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_returns_all_rows_and_reduce_the_sum_of_this_ranks_rows(pool, ranks, dtype):
    """Three samples of eight tokens, so that a rank holds rows of two samples; the sum has torch.sum's bits."""
    shape, whole_of_it = (3, 8, 6), numbers(99, (3, 8, 6), dtype)
    total = torch.stack([numbers(rank, shape, dtype) for rank in range(ranks)]).sum(dim=0)
    found = pool.run(three_of, ShardedResidual, shape, dtype, world_size=ranks)
    for rank, (own, spread, chunks, joined) in enumerate(found):
        for one, of in ((own, whole_of_it), (joined, total)):
            assert one.shape == (3, 8 // ranks, 6)
            assert torch.equal(one.flatten(0, 1), of.flatten(0, 1)[rank * 24 // ranks:(rank + 1) * 24 // ranks])
        assert torch.equal(spread, whole_of_it) and torch.equal(torch.cat(chunks, dim=-1), whole_of_it)


def test_with_a_replicated_stream_gather_does_nothing_and_reduce_is_an_all_reduce(pool):
    shape, dtype = (3, 8, 6), torch.float64
    total = numbers(0, shape, dtype) + numbers(1, shape, dtype)
    for own, spread, _, joined in pool.run(three_of, ReplicatedResidual, shape, dtype, world_size=2):
        assert torch.equal(own, spread) and torch.equal(own, numbers(99, shape, dtype)) and torch.equal(joined, total)


def two_products(kind, shape):
    """Return (<gather x, y>, <x, reduce y>) for this rank's rows x of a tensor and a y of its own."""
    mesh = make_mesh(1, 1, torch.distributed.get_world_size(), torch.device("cpu"))
    stream = kind(mesh.tp_group)
    x, y = stream.own_rows(numbers(99, shape, torch.float64)), numbers(mesh.tp_rank, shape, torch.float64)
    return float((arrive(stream.gather(x)) * y).sum()), float((x * arrive(stream.reduce(y.clone()))).sum())


@pytest.mark.parametrize("kind", [ShardedResidual, ReplicatedResidual])
def test_gather_and_reduce_are_each_others_backward(pool, kind):
    """<gather x, y> = <x, reduce y>, summed over the ranks. With a replicated stream each rank already has all of
    <x, reduce y>."""
    products = pool.run(two_products, kind, (3, 8, 6), world_size=4)
    spread, joined = (sum(side) for side in zip(*products))
    assert spread == pytest.approx(joined / (4 if kind is ReplicatedResidual else 1), rel=1e-12)


# ---- the same training

@pytest.mark.parametrize("tp, pp, options", [
    (4, 1, dict(columns=3, recompute_granularity="full")),
    (2, 2, dict(schedule="zb-v", columns=3, recompute_granularity="selective")),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        (2, 1, dict(columns=3)), (2, 2, dict(schedule="paired", recompute_granularity="full")),
        (4, 2, dict(schedule="zb-h1", columns=3))))],
    ids=["tp4-full", "tp2-pp2-zb-v", "tp2-columns3", "tp2-pp2-paired", "tp4-pp2-zb-h1"])
def test_dropout_masks_are_those_of_the_whole_sample(pool, tp, pp, options):
    """Three samples in two slices, so that a rank's rows begin in the middle of one; four layers, and all of it to
    1e-9."""
    config = tiny(tp * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **SIX, slices=2,
                  sequence_parallel=True, **DROPOUT, **options)
    weights, data, records, final = reference_for(config, STEPS)
    outcomes = pool.run(train_rank, config, weights, data, STEPS, world_size=tp * pp)
    assert relative(outcomes[0].losses, [record.loss for record in records]) < 1e-9
    assert relative(outcomes[0].norms, [record.gradient_norm for record in records]) < 1e-9
    for step, record in enumerate(records):
        assert difference(full_tensors(outcomes, lambda outcome: outcome.gradients[step]), record.gradients) < 1e-9
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights), final) < 1e-9


def test_on_one_rank_it_is_accepted_and_changes_no_bit(pool):
    options = dict(slices=2, **DROPOUT)
    weights = random_weights(sizes_of(tiny(1)), seed=3)
    data = random_data(tiny(1), STEPS)
    (one,), (other,) = (pool.run(train_rank, tiny(1, sequence_parallel=cut, **options), weights, data, STEPS,
                                 world_size=1) for cut in (False, True))
    assert one.losses == other.losses
    assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in weights)


def stopped_rank(configs, weights, data, folder):
    """A step with the first of the settings, saved; the next with the second. Losses and weights, as train_rank gives
    them."""
    folder, (first, second) = Path(folder), configs
    mesh, model, optimizer, stage = build(first, weights)
    before = train_steps((mesh, model, optimizer, stage), first, data, range(1, 2))
    saver = save.Saver(folder, mesh, keep_last=1)
    saver.save(1, model, optimizer, first)
    saver.wait()
    assert saver.failure() is None
    mesh, model, optimizer, stage = build(second)
    load.restore(newest_intact_checkpoint(folder), model, optimizer, mesh)
    after = train_steps((mesh, model, optimizer, stage), second, data, range(2, 3))
    after.losses[:0] = before.losses
    return after


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.exhaustive), True],
                         ids=["whole-then-cut", "cut-then-whole"])
def test_a_run_may_turn_sequence_parallelism_on_or_off_when_it_resumes(pool, tmp_path, first):
    """On another layout too, and with the numbers of the plain model."""
    assert "sequence_parallel" in names_affecting(Config, "nothing")
    boxes = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), dict(tensor_model_parallel_size=4)
    configs = [tiny(4, **box, **SIX, slices=2, sequence_parallel=cut, **DROPOUT)
               for box, cut in zip(boxes, (first, not first))]
    weights, data, records, final = reference_for(configs[0], STEPS)
    outcomes = pool.run(stopped_rank, configs, weights, data, str(tmp_path), world_size=4)
    assert relative(outcomes[0].losses, [record.loss for record in records]) < 1e-9
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights), final) < 1e-9


def drift_rank(config, weights, data):
    mesh, model, optimizer, stage = build(config, weights)
    train_steps((mesh, model, optimizer, stage), config, data, range(1, STEPS + 1))
    return drift_warning(model, optimizer, mesh)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_copies_over_tp_keep_the_same_bits(pool, zero_stage):
    """Norms, row biases and positions, of which each rank has a partial gradient; bfloat16 weights and masters."""
    config = tiny(4, tensor_model_parallel_size=2, data_parallel_size=2, slices=2, sequence_parallel=True,
                  dtype="bfloat16", global_batch_size=12, zero_stage=zero_stage)
    weights = random_weights(sizes_of(config), seed=3)
    assert pool.run(drift_rank, config, weights, random_data(config, STEPS), world_size=4) == [""] * 4


# ---- what runs between a launch and its wait

def windows_of(config, staggered=Domino.staggered):
    """Return (kind, site, slice, matmuls of other slices while it is in flight) for each collective of a microbatch on
    rank 0, forward and backward."""
    found, launched = [], {}
    with fake_world(0, config.world_size), mock.patch.object(Domino, "staggered", staggered):
        _, _, _, stage = build(config, trace=Trace())
        launch, wait, events = stage.ops.launch, stage.ops.wait, stage.trace.events

        def launched_at(piece, site, flight):
            launch(piece, site, flight)
            if flight.kind:
                launched[id(flight)] = flight, len(events)
            return flight

        def waited_at(piece, site, flights):
            for flight in flights:
                if id(flight) in launched:
                    _, begin = launched.pop(id(flight))
                    others = Counter(event.kind for event in events[begin:] if event.args.get("slice") != piece.index)
                    found.append((flight.kind, site, piece.index, others["matmul"]))
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


@pytest.mark.parametrize("slices", [2, 3])
def test_without_staggered_slices_collectives_are_exposed(slices):
    """At a sublayer's first gather and last reduce-scatter, all other slices would wait too."""
    forward, backward = windows_of(tiny(2, **FOUR, slices=slices), staggered=lambda self, piece, generator: generator)
    for windows in (forward, backward):
        assert {one for one in exposed(windows) if one[1].startswith("layers.1.")} == {
            one for site in ("layers.1.attention", "layers.1.mlp")
            for one in (("all_gather", site, 0), ("reduce_scatter", site, slices - 1))}


def test_with_a_replicated_stream_slices_are_not_staggered():
    """Their all-reduces are hidden without it."""
    with fake_world(0, 2):
        for cut in (False, True):
            config = tiny(2, **FOUR | dict(sequence_parallel=cut), slices=2)
            _, _, _, stage = build(config)
            assert type(stage.ops.stream) is type(residual_stream(config,
                                                                  stage.mesh)) is (ShardedResidual if cut
                                                                                   else ReplicatedResidual)
            turns = list(stage.staggered(type("Piece", (), dict(index=3)), iter(())))
            assert len(turns) == (3 if cut else 0)
