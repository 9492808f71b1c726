"""Domino hides its collectives: what runs between a launch and its wait, how many bytes are sent, and the gradients."""

import gc
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.delayed_collectives import delayed_collectives
from support.harness import (FixedData, build, difference, full_tensors, random_data, reference_for, relative,
                             shard_spec, sizes_of, tiny, train_rank, weights_and_data)
from support.reference import dropout_masks, train_reference

import train
from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.overlap.flight import Flight, result_of

TP2 = dict(tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, num_layers=2)


def one_microbatch(data: FixedData, config, stage, model):
    """Run microbatch 0 of step 0 forward and backward; return the events of both, the losses, the gradients by name."""
    for weight in model.parameters():
        weight.main_grad.zero_()
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    forward_events = [(event.kind, event.args) for event in stage.trace.events]
    stage.trace.events.clear()
    run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
    backward_events = [(event.kind, event.args) for event in stage.trace.events]
    gradients = {name: (weight.main_grad.clone(), shard_spec(weight)) for name, weight in model.named_parameters()}
    return forward_events, backward_events, losses, gradients


def trace_rank(config, data):
    _, model, _, stage = build(config, trace=Trace())
    return one_microbatch(data, config, stage, model)[:2]


def windows(events):
    """Return, for each launch, (site, slice, what other slices did before the wait, what the slice itself did)."""
    found = []
    for i, (kind, about) in enumerate(events):
        if kind == "all_reduce":
            key = (about["slice"], about["site"])
            j = next(j for j in range(i, len(events)) if events[j][0] == "wait"
                     and (events[j][1]["slice"], events[j][1]["site"]) == key)
            others = Counter(k for k, a in events[i:j] if a["slice"] != about["slice"])
            own = Counter(k for k, a in events[i + 1:j] if a["slice"] == about["slice"])
            found.append((about["site"], about["slice"], others, own))
    return found


@pytest.mark.parametrize("slices", [2, 3])
def test_in_every_window_between_launch_and_wait_another_slice_computes(pool, slices):
    """A wait that comes too early hides nothing. Every window that can contain a matmul of another slice does."""
    config = tiny(2, **TP2, slices=slices)
    forward, backward = pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]

    for site, piece, others, _ in windows(forward) + windows(backward):
        assert others["resume"] >= slices - 1, f"nobody ran while slice {piece} waited for {site}"
    # No matmul is left for the embedding (the next slices only look words up) and the cross entropy.
    bare = {(site, piece) for site, piece, others, _ in windows(forward) if not others["matmul"]}
    assert bare <= {("embedding", piece) for piece in range(slices - 1)} | {("cross_entropy", piece)
                                                                            for piece in range(slices)}
    # At the last slice's last all-reduce only its own weight gradients are left, and they run there.
    bare = [(site, piece, own) for site, piece, others, own in windows(backward) if not others["matmul"]]
    assert [(site, piece) for site, piece, _ in bare] == [("layers.0.attention", slices - 1)]
    assert bare[0][2]["weight_gradient"] == 2
    assert len(windows(forward)) == slices * (1 + 2 * config.num_layers + 2)
    assert len(windows(backward)) == slices * (2 * config.num_layers + 1)


def test_weight_gradients_run_after_the_launch_and_before_the_wait(pool):
    config = tiny(2, **TP2, slices=2)
    _, backward = pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]
    found = [(site == "head", own["weight_gradient"]) for site, _, _, own in windows(backward)]
    assert set(found) == {(True, 1), (False, 2)}
    assert sum(kind == "weight_gradient" for kind, _ in backward) == sum(count for _, count in found)


def test_a_matmul_is_launched_between_a_reduce_scatter_and_the_next_all_gather(pool):
    """With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), what follows the all-gather cannot start before the
    reduce-scatter has ended. So one of the weight gradients that hide the reduce-scatter is launched before."""
    config = tiny(2, **TP2, slices=1, sequence_parallel=True)
    _, backward = pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]
    kinds = [kind for kind, _ in backward if kind in ("reduce_scatter", "all_gather", "weight_gradient")]
    head, *between, last = [i for i, kind in enumerate(kinds) if kind == "reduce_scatter"]
    assert len(between) == 2 * config.num_layers - 1
    assert kinds[head + 1:head + 3] == ["all_gather", "weight_gradient"]       # the only one, which hides both
    assert all(kinds[i + 1:i + 4] == ["weight_gradient", "all_gather", "weight_gradient"] for i in between)


def test_with_one_slice_every_launch_is_followed_by_its_wait(pool):
    """--slices 1 is Megatron's blocking tensor parallelism: forward, nothing at all runs in between."""
    config = tiny(2, **TP2, slices=1)
    forward, _ = pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]
    assert all(set(own) <= {"resume"} and not others for _, _, others, own in windows(forward))


def test_with_columns_each_chunk_is_in_flight_while_the_next_is_computed(pool):
    """The column split hides communication even with a single slice."""
    config = tiny(2, **TP2, slices=1, columns=4)
    forward, backward = pool.run(trace_rank, config, random_data(config, 1), world_size=2)[0]
    site = "layers.1.mlp"
    steps = [kind for kind, about in forward if about.get("site") == site]
    # the column-parallel matmul, then four chunks
    assert steps == ["matmul"] + ["matmul", "all_reduce"] * 4 + ["wait"]
    steps = [kind for kind, about in backward if about.get("site") == site]
    assert steps == ["matmul"] + ["matmul", "all_reduce"] * 4 + ["weight_gradient", "weight_gradient", "wait"]


# ---- correct, whenever a collective completes


def with_delayed_collectives(kind, *arguments):
    """Run train_rank with collectives that complete at once (early) or only in wait() (late)."""
    with ExitStack() as stack:
        for patch in delayed_collectives(kind):
            stack.enter_context(mock.patch.object(*patch))
        return train_rank(*arguments)


@pytest.mark.parametrize("world_size, options", [
    (4, {}), pytest.param(4, dict(sequence_parallel=True, micro_batch_size=12), marks=pytest.mark.exhaustive),
    (8, dict(num_experts=4, expert_model_parallel_size=2, disable_bias_linear=True, schedule="paired",
             recompute_granularity="full"))], ids=["whole", "cut", "experts"])
def test_collectives_that_complete_late_or_early_give_the_same_bits(pool, world_size, options):
    """Code that reads a sum before wait(), or writes to a tensor in flight, computes different numbers here."""
    config = tiny(world_size, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3, columns=2,
                  global_batch_size=12, **options)
    weights, data, records, _ = reference_for(config, 2)
    early, late = (pool.run(with_delayed_collectives, kind, config, weights, data, 2, world_size=world_size)
                   for kind in ("early", "late"))
    for one, other in zip(early, late):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)
    assert relative(late[0].losses, [record.loss for record in records]) < 1e-9


def plain_rank(config, weights, data):
    """Run the definition on this rank's microbatch: GPT.forward with blocking collectives, and autograd."""
    _, model, _, _ = build(config, weights)
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses = model(batch.tokens, batch.positions, batch.labels, sample_ids=batch.sample_ids)
    (losses * batch.loss_mask).sum().backward()
    return losses.detach(), {name: (weight.grad, shard_spec(weight)) for name, weight in model.named_parameters()}


def domino_rank(config, weights, data):
    _, model, _, stage = build(config, weights, trace=Trace())
    return one_microbatch(data, config, stage, model)[2:]


@pytest.mark.parametrize("tp, slices, columns, dropout", [(1, 2, 1, 0.0), (2, 1, 1, 0.2), (2, 3, 2, 0.2),
                                                          (4, 2, 3, 0.0), (8, 4, 1, 0.1)])
def test_domino_computes_what_the_plain_model_defines(pool, tp, slices, columns, dropout):
    """Compares the losses and every gradient, tape against autograd, with and without dropout."""
    changes = dict(TP2, tensor_model_parallel_size=tp, hidden_dropout=dropout, attention_dropout=dropout)
    config = tiny(tp, **changes, slices=slices, columns=columns)
    weights, data = weights_and_data(config, 1)
    plain = pool.run(plain_rank, config, weights, data, world_size=tp)
    domino = pool.run(domino_rank, config, weights, data, world_size=tp)
    for (plain_losses, plain_gradients), (losses, gradients) in zip(plain, domino):
        assert torch.allclose(losses, plain_losses, rtol=1e-12, atol=0)
        assert difference({name: tensor for name, (tensor, _) in gradients.items()},
                          {name: tensor for name, (tensor, _) in plain_gradients.items()}) < 1e-10


# ---- how many bytes are sent


def count_rank(config, data):
    """Count the collectives and sends of one training step on this rank, by (kind, group)."""
    import nanodomino.zero as zero
    counts = Counter()
    blocking = set()
    mesh, _, optimizer, stage = build(config)
    groups = {mesh.tp_group: "tp", mesh.dp_group: "dp", mesh.embedding_group: "embedding", None: "world"}

    def counted(name, original, payload):
        def collective(*args, **kwargs):
            key = (name, groups[kwargs.get("group")])
            counts[key, "calls"] += 1
            counts[key, "elements"] += args[payload].numel()
            if name == "all_reduce" and not kwargs.get("async_op"):
                blocking.add(key)
            return original(*args, **kwargs)
        return collective

    def exchange(operations):
        for operation in operations:
            if operation.op is dist.isend:
                way = "down" if operation.peer > dist.get_rank() else "up"
                counts[("send", way), "calls"] += 1
                counts[("send", way), "elements"] += operation.tensor.numel()
        return kept[1](operations)

    kept = dist.all_reduce, dist.batch_isend_irecv, zero.reduce_scatter, zero.all_gather
    try:
        dist.all_reduce, dist.batch_isend_irecv = counted("all_reduce", kept[0], 0), exchange
        zero.reduce_scatter, zero.all_gather = counted("reduce_scatter", kept[2], 0), counted("all_gather", kept[3], 0)
        train.train_step(1, stage, optimizer, data, config, mesh)
    finally:
        dist.all_reduce, dist.batch_isend_irecv, zero.reduce_scatter, zero.all_gather = kept
    padded = sum(bucket.main_grad.numel() for bucket in optimizer.buckets)
    tied = sum(bucket.main_grad.numel() for bucket in optimizer.buckets if "embedding" in bucket.kind.addends)
    return dict(counts), blocking, padded, tied


@pytest.mark.parametrize("slices, columns", [(1, 1), (2, 1), (2, 2)])
def test_collectives_and_bytes_equal_the_formulas(pool, slices, columns):
    """A layer all-reduces 4 activations per microbatch; slices and columns make more calls, not more bytes."""
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4, num_layers=3,
                  global_batch_size=16, slices=slices, columns=columns)
    results = pool.run(count_rank, config, random_data(config, 1))
    m, b, s, h = config.microbatches, config.micro_batch_size, config.seq_length, config.hidden_size
    activation, tokens = b * s * h, b * s
    for rank, (counts, blocking, padded, tied) in enumerate(results):
        first = rank < 4
        layers = 2 if first else 1
        calls = m * slices * (4 * layers * columns + (1 if first else columns + 2))
        elements = m * (4 * layers * activation + (activation if first else activation + 3 * tokens))
        assert (counts[("all_reduce", "tp"), "calls"], counts[("all_reduce", "tp"), "elements"]) == (calls, elements)
        way = "down" if first else "up"
        assert (counts[("send", way), "calls"], counts[("send", way), "elements"]) == (m, m * activation)
        assert counts[("reduce_scatter", "dp"), "elements"] == counts[("all_gather", "dp"), "elements"] == padded
        embedding = counts[("all_reduce", "embedding"), "calls"], counts[("all_reduce", "embedding"), "elements"]
        assert embedding == (1, tied / config.dp)              # after the sum over replicas, by each shard's owner
        assert counts[("all_reduce", "world"), "elements"] == 4
        assert not counts.get((("all_reduce", "dp"), "calls"))
        assert ("all_reduce", "tp") not in blocking, "a tensor-parallel all-reduce blocks"


def test_a_tensors_chunks_are_freed_when_they_are_joined():
    """Backward keeps the flights of a gradient while it uses the gradient, so its chunks would take as much again."""
    flights = [Flight(torch.ones(2)), Flight(torch.zeros(1))]
    chunks = [weakref.ref(flight.tensor) for flight in flights]
    assert result_of(flights).tolist() == result_of(flights).tolist() == [1, 1, 0]
    assert [chunk() for chunk in chunks] == [None, None]


def deferred_rank(config, data):
    """Return how many tokens, outputs, masks and attention biases of a microbatch exist before and after a backward
    that leaves the weight gradients for later."""
    _, _, _, stage = build(config)
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    held = [weakref.ref(part) for slice in tape for part in (
        slice.batch, slice.output, slice.masks_and_positions, slice.masks_and_positions.shared["attention_bias"])]
    before = sum(part() is not None for part in held)
    run_to_end(stage.backward(tape, torch.ones_like(losses), defer_weights=True))
    gc.collect()
    return before, sum(part() is not None for part in held)


def test_deferred_weight_gradients_keep_no_masks_and_attention_biases(pool):
    config = tiny(1, micro_batch_size=4, global_batch_size=4, slices=2, reset_attention_mask=True)
    assert pool.run(deferred_rank, config, random_data(config, 1), world_size=1) == [(8, 0)]


@pytest.mark.parametrize("schedule", [
    "zb-v", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("1f1b", "paired"))])
def test_dropout_is_the_reference_model_with_the_same_masks_on_every_layout(pool, schedule):
    """Masks agree where ranks replicate the stream; heads and layers keep their own masks where they are split."""
    options = dict(hidden_dropout=0.2, attention_dropout=0.3)
    layout = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, num_layers=5,
                  schedule=schedule, global_batch_size=12)
    config = tiny(8, **layout, **options, seed=77)
    weights, data = weights_and_data(config, 2)

    masks = [dropout_masks(77, range(step * 12, step * 12 + 12), hidden=0.2, attention=0.3) for step in (0, 1)]
    batches = [(data.tokens[i], data.labels[i], data.loss_mask[i].double()) for i in range(2)]
    records, final = train_reference(sizes_of(config), weights, batches,
                                     [train.learning_rate(step, config) for step in (1, 2)],
                                     config.weight_decay, config.clip_grad, (config.adam_beta1, config.adam_beta2),
                                     config.adam_eps, masks=masks)
    outcomes = pool.run(train_rank, config, weights, data, 2)
    assert relative(outcomes[0].losses, [record.loss for record in records]) < 1e-9
    for step, record in enumerate(records):
        assert difference(full_tensors(outcomes, lambda outcome: outcome.gradients[step]),
                          record.gradients) < 1e-9
    weights_now = full_tensors(outcomes, lambda outcome: outcome.weights)
    assert difference(weights_now, final) < 1e-9

    without = tiny(8, **layout)
    evaluated = pool.run(train_rank, without, weights_now, data, 0)
    assert evaluated[0].evaluation == pytest.approx(outcomes[0].evaluation, rel=1e-12), "evaluation drops nothing"
