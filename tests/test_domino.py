"""Domino hides its collectives: what runs between a launch and its wait, how many bytes are sent, and the gradients."""

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.fake_world import fake_world
from support.harness import (EXPERTS, build, difference, random_data, reference_for, relative, tiny, train_rank,
                             weights_and_data)
from support.pitfall_runner import delayed_collectives, replaced

import train
from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.estimate.rank import dry_run
from nanodomino.overlap.slices import Flight, prepare_all_reduce, result_of
from nanodomino.pictures.merged_trace import COLLECTIVES

TP2 = dict(tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, num_layers=2)
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.2)
SHARED = EXPERTS | dict(moe_shared_expert_intermediate_size=16)


def trace_rank(config, data):
    """Run a microbatch forward and backward; return the (kind, args) of both passes' events."""
    _, _, _, stage = build(config, trace=Trace())
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    in_forward = len(stage.trace.events)
    run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
    events = [(event.kind, event.args) for event in stage.trace.events]
    return events[:in_forward], events[in_forward:]


def traced(pool, **options):
    """Return the events of rank 0 of two: (forward, backward)."""
    config = tiny(2, **TP2, **options)
    return pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]


def windows(events):
    """Return (collective, site, slice, what other slices did before the wait, what the slice itself did) of each
    launch."""
    found = []
    for i, (kind, about) in enumerate(events):
        if kind in COLLECTIVES:
            key = (about["slice"], about["site"])
            j = next(j for j in range(i, len(events)) if events[j][0] == "wait"
                     and (events[j][1]["slice"], events[j][1]["site"]) == key)
            others = Counter(k for k, a in events[i:j] if a["slice"] != about["slice"])
            own = Counter(k for k, a in events[i + 1:j] if a["slice"] == about["slice"])
            found.append((kind, about["site"], about["slice"], others, own))
    return found


@pytest.mark.parametrize("slices", [2, 3])
def test_in_every_window_between_launch_and_wait_another_slice_computes(pool, slices):
    """A wait that comes too early hides nothing. Every window that can contain a matmul of another slice does. Weight
    gradients run after the launch and before the wait: one of the head, two of any other pair of matmuls."""
    forward, backward = traced(pool, slices=slices)
    for _, site, piece, others, _ in windows(forward) + windows(backward):
        assert others["resume"] >= slices - 1, f"nobody ran while slice {piece} waited for {site}"
    # No matmul is left for the embedding (the next slices only look words up) and the cross entropy.
    bare = {(site, piece) for _, site, piece, others, _ in windows(forward) if not others["matmul"]}
    assert bare <= {("embedding", piece) for piece in range(slices - 1)} | {("cross_entropy", piece)
                                                                            for piece in range(slices)}
    # At the last slice's last all-reduce only its own weight gradients are left, and they run there.
    bare = [(site, piece) for _, site, piece, others, _ in windows(backward) if not others["matmul"]]
    assert bare == [("layers.0.attention", slices - 1)]
    found = [(site == "head", own["weight_gradient"]) for _, site, _, _, own in windows(backward)]
    assert set(found) == {(True, 1), (False, 2)}
    assert sum(kind == "weight_gradient" for kind, _ in backward) == sum(count for _, count in found)
    assert len(windows(forward)) == slices * (1 + 2 * TP2["num_layers"] + 2)
    assert len(windows(backward)) == slices * (2 * TP2["num_layers"] + 1)


def test_a_matmul_is_launched_between_a_reduce_scatter_and_the_next_all_gather(pool):
    """With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), what follows the all-gather cannot start before the
    reduce-scatter has ended. So one of the weight gradients that hide the reduce-scatter is launched before."""
    _, backward = traced(pool, slices=1, sequence_parallel=True)
    kinds = [kind for kind, _ in backward if kind in ("reduce_scatter", "all_gather", "weight_gradient")]
    head, *between, last = [i for i, kind in enumerate(kinds) if kind == "reduce_scatter"]
    assert len(between) == 2 * TP2["num_layers"] - 1
    assert kinds[head + 1:head + 3] == ["all_gather", "weight_gradient"]       # the only one, which hides both
    assert all(kinds[i + 1:i + 4] == ["weight_gradient", "all_gather", "weight_gradient"] for i in between)


def test_with_one_slice_every_launch_is_followed_by_its_wait(pool):
    """--slices 1 is Megatron's blocking tensor parallelism: forward, nothing at all runs in between."""
    forward, _ = traced(pool, slices=1)
    assert all(set(own) <= {"resume"} and not others for _, _, _, others, own in windows(forward))


def test_with_columns_each_chunk_is_in_flight_while_the_next_is_computed(pool):
    """The column split hides communication even with a single slice."""
    for events, cover in zip(traced(pool, slices=1, columns=4), ([], ["weight_gradient"] * 2)):
        steps = [kind for kind, about in events if about.get("site") == "layers.1.mlp"]
        # the column-parallel matmul, then four chunks
        assert steps == ["matmul"] + ["matmul", "all_reduce"] * 4 + cover + ["wait"]


# ---- correct, whenever a collective completes

def with_delayed_collectives(kind, *arguments):
    """Run train_rank with collectives that complete at once (early) or only in wait() (late)."""
    with replaced(delayed_collectives(kind)):
        return train_rank(*arguments)


@pytest.mark.parametrize("world_size, options", [
    (8, {}), pytest.param(4, dict(sequence_parallel=True, micro_batch_size=12), marks=pytest.mark.exhaustive),
    (8, dict(num_experts=4, expert_model_parallel_size=2, disable_bias_linear=True, schedule="paired", num_layers=2,
             recompute_granularity="full"))], ids=["whole", "cut", "experts"])
def test_collectives_that_complete_late_or_early_give_the_same_bits(pool, world_size, options):
    """Code that reads a sum before wait(), or writes to a tensor in flight, computes different numbers here."""
    config = tiny(world_size, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3, columns=2,
                  global_batch_size=12, **options)
    weights, data, records, _ = reference_for(pool, config, 2)
    early, late = (pool.run(with_delayed_collectives, kind, config, weights, data, 2, world_size=world_size)
                   for kind in ("early", "late"))
    for one, other in zip(early, late):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)
    assert relative(late[0].losses, [record.loss for record in records]) < 1e-9


def both_ways_rank(config, weights, data):
    """Return (losses, gradients) of one microbatch on this rank by Domino, and by the definition: GPT.forward with
    blocking collectives, and autograd. Domino's gradients are scaled as in fp16, the losses of the router included."""
    mesh, model, _, stage = build(config, weights)
    batch = data.batch(0, 0, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    run_to_end(stage.backward(tape, 4.0 * batch.loss_mask.to(losses.dtype), loss_scale=4.0))
    plain = model(batch.tokens, batch.positions, batch.labels, sample_ids=batch.sample_ids)
    routing = sum(layer.mlp.auxiliary_loss for layer in model.layers.values()) if config.num_experts else 0.0
    ((plain * batch.loss_mask).sum() + routing).backward()
    trained = {name: weight for name, weight in model.named_parameters() if not name.endswith("expert_bias")}
    return ((losses, {name: weight.main_grad / 4.0 for name, weight in trained.items()}),
            (plain.detach(), {name: weight.grad for name, weight in trained.items()}))


@pytest.mark.parametrize("tp, dp, options", [
    (1, 1, dict(slices=2)), (2, 1, DROPOUT), (2, 1, dict(DROPOUT, slices=3, columns=2)),
    (4, 1, dict(slices=2, columns=3)), (8, 1, dict(DROPOUT, slices=4)), (1, 1, dict(SHARED, slices=2)),
    (1, 2, dict(SHARED, **DROPOUT, slices=2, expert_model_parallel_size=2, swiglu=True)),
    (2, 2, dict(SHARED, slices=2, expert_model_parallel_size=2, moe_router_score_function="sigmoid"))])
def test_domino_computes_what_the_plain_model_defines(pool, tp, dp, options):
    """Compares the losses and every gradient, tape against autograd, the losses of the router included."""
    config = tiny(tp * dp, **TP2 | dict(tensor_model_parallel_size=tp, global_batch_size=4 * dp) | options)
    weights, data = weights_and_data(config, 1)
    for (losses, gradients), (plain, expected) in pool.run(both_ways_rank, config, weights, data, world_size=tp * dp):
        assert torch.allclose(losses, plain, rtol=1e-12, atol=1e-13)
        assert difference(gradients, expected) < 1e-10


# ---- how many bytes are sent

@pytest.mark.parametrize("rank", [0, 7], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("slices, columns", [(1, 1), (2, 1), (2, 2)])
def test_collectives_and_bytes_equal_the_formulas(rank, slices, columns):
    """A layer all-reduces 4 activations per microbatch; slices and columns make more calls, not more bytes. A dry run
    counts them, and tests/estimate compares dry runs with real ones."""
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4, num_layers=3,
                  global_batch_size=16, slices=slices, columns=columns, bucket_size=10_000_000, device="cpu")
    found, size, first = dry_run(train, config, rank).traffic, config.params_dtype.itemsize, rank == 0
    m, tokens = config.microbatches, config.micro_batch_size * config.seq_length
    activation, layers = tokens * config.hidden_size, 2 if first else 1
    calls = m * slices * (4 * layers * columns + (1 if first else columns + 2))
    elements = m * (4 * layers * activation + (activation if first else activation + 3 * tokens))
    assert found["tp", "all_reduce"] == (calls, elements * size)
    for kind in ("send", "receive"):
        assert found["pp", kind] == (m, m * activation * size)
    assert found["dp", "reduce_scatter"] == found["dp", "all_gather"], "ZeRO sends gradients and weights once"
    words = config.padded_vocab_size // 2 * config.hidden_size
    assert found["embedding", "all_reduce"] == (1, words / config.dp * size), "each shard by its owner"
    assert found["world", "all_reduce"] == (1, 4 * 8) and ("dp", "all_reduce") not in found


def test_a_tensors_chunks_are_freed_when_they_are_joined():
    """Backward keeps the flights of a gradient while it uses the gradient, so its chunks would take as much again."""
    flights = [Flight(torch.ones(2)), Flight(torch.zeros(1))]
    chunks = [weakref.ref(flight.tensor) for flight in flights]
    assert result_of(flights).tolist() == result_of(flights).tolist() == [1, 1, 0]
    assert [chunk() for chunk in chunks] == [None, None]


def test_an_all_reduce_may_take_the_largest(monkeypatch):
    """The cross entropy takes it. With any other number it would be right, too, until exp() overflows."""
    asked, two = [], SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, **_: asked.append(op))
    prepare_all_reduce(torch.ones(1), two, dist.ReduceOp.MAX).launch()
    assert asked == [dist.ReduceOp.MAX]


def test_deferred_weight_gradients_keep_no_logits_masks_attention_biases_and_received_hidden_states():
    config = tiny(2, pipeline_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, slices=2,
                  reset_attention_mask=True)
    with fake_world(1, 2):
        _, _, _, stage = build(config)
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        hidden = torch.ones(4, config.seq_length, config.hidden_size).double()
        losses, tape = run_to_end(stage.forward(batch, hidden))
        held = [weakref.ref(hidden.untyped_storage()), *(weakref.ref(part) for slice in tape for part in (
            slice.batch, slice.output, slice.head.logits, slice.masks_and_positions,
            slice.masks_and_positions.visible[None]["bias"]))]
        del hidden
        assert sum(part() is not None for part in held) == 11
        run_to_end(stage.backward(tape, torch.ones_like(losses), defer_weights=True))
    gc.collect()
    assert all(part() is None for part in held)
