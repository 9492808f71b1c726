"""ZeRO stages 1 and 2: bytes per parameter, when buckets are reduced, and what flat buffers must not forget."""

from collections import Counter

import pytest
import torch
from support.harness import build, random_data, relative, tiny, train_rank, weights_and_data

import train
from nanodomino.analysis.formulas import state_bytes_per_parameter
from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.model import meta_model
from nanodomino.optim.buckets import Bucket, sort_into_buckets
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import MAX_REDUCES_IN_FLIGHT


def state_rank(config, data):
    """Run two steps. Return the bytes of weights, gradients and optimizer state per parameter, the largest number in
    the padding, the part of the parameters that this rank owns, and the elements of padding."""
    mesh, model, optimizer, stage = build(config)
    for step in (1, 2):
        train.train_step(step, stage, optimizer, data, config, mesh)
    tensors = [tensor for bucket in optimizer.buckets for tensor in (bucket.weights, bucket.own_grad, bucket.master)]
    tensors += [tensor for tensor in optimizer.state_tensors() if tensor.dim()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    elements = sum(bucket.weights.numel() for bucket in optimizer.buckets)
    padding = 0.0
    for bucket in optimizer.buckets:
        is_padding = torch.ones(bucket.weights.numel(), dtype=torch.bool)
        for weight in bucket.parameters:
            offset = weight.storage_offset()
            is_padding[offset:offset + weight.numel()] = False
        own = bucket.own_grad[is_padding[bucket.own_offset:][:len(bucket.own_grad)]]
        padding = max([padding] + bucket.weights[is_padding].abs().tolist() + own.abs().tolist())
    own = sum(bucket.master.numel() for bucket in optimizer.buckets)
    return sum(storages.values()) / elements, padding, own / elements, is_padding.sum().item()


@pytest.mark.parametrize("dp, zero_stage", [
    pytest.param(1, 1, marks=pytest.mark.exhaustive), (2, 2), (4, 1), (4, 0)])
@pytest.mark.parametrize("dtype, weights, gradients, optimizer",
                         [("float32", 4, 4, 8), ("bfloat16", 2, 4, 12), ("float16", 2, 4, 12), ("float64", 8, 8, 16)])
def test_bytes_per_parameter_follow_the_formulas(pool, dp, zero_stage, dtype, weights, gradients, optimizer):
    """ZeRO-1: 6 + 12/dp in 16 bit, 8 + 8/dp in fp32; ZeRO-2: 2 + 16/dp and 4 + 12/dp. The padding of flat buffers stays
    zero, since it would count in the norm."""
    config = tiny(dp, dtype=dtype, zero_stage=zero_stage, num_attention_heads=1, hidden_size=17, loss_scale=256.0,
                  micro_batch_size=6)
    expected = weights + gradients / (dp if zero_stage == 2 else 1) + optimizer / (dp if zero_stage else 1)
    assert expected == state_bytes_per_parameter(config)
    for bytes_per_parameter, padding, own, padded in pool.run(state_rank, config, random_data(config, 2),
                                                              world_size=dp):
        assert bytes_per_parameter == pytest.approx(expected)
        assert own == pytest.approx(1 / (dp if zero_stage else 1))
        assert padded > 0 and padding == 0.0


# ---- buckets

def test_a_bucket_is_full_when_it_has_bucket_size_elements():
    """Without its last parameter it would have fewer. Of each kind only the last bucket may have fewer."""
    model = meta_model(tiny(bucket_size=2000))
    buckets = [(kind, [weight.numel() for weight in weights]) for kind, weights in sort_into_buckets(model)]
    full = [sizes for _, sizes in buckets if sum(sizes) >= 2000]
    assert len(full) >= 3 and all(sum(sizes[:-1]) < 2000 for _, sizes in buckets)
    assert set(Counter(kind for kind, sizes in buckets if sum(sizes) < 2000).values()) == {1}


# ---- stage 2

def test_with_one_microbatch_stages_1_and_2_have_the_same_bits(pool):
    """They reduce the same gradients in the same order. With more microbatches the order of the sums differs."""
    outcomes = {}
    for zero_stage in (1, 2):
        config = tiny(4, zero_stage=zero_stage, micro_batch_size=6, slices=2, dtype="float32")
        weights, data = weights_and_data(config, 3)
        outcomes[zero_stage] = pool.run(train_rank, config, weights, data, 3, world_size=4)
    for stage_1, stage_2 in zip(*outcomes.values()):
        assert stage_1.losses == stage_2.losses and stage_1.norms == stage_2.norms
        assert all(torch.equal(stage_1.weights[name][0], stage_2.weights[name][0]) for name in stage_1.weights)


def in_flight_rank(config, data):
    """Run a warm-up and a step. Return the peak bytes of this rank's main_grads, including reduces in flight; the bytes
    after the step; the peak number of reduces in flight; how often the step reduced each bucket; the largest peak that
    is right: matrices of one sublayer and of the embedding, all vectors, and two reduces with their receive buffers."""
    mesh, _, optimizer, stage = build(config)
    allocate, reduce, peak, in_flight, reduced = Bucket.allocate_gradients, optimizer.reduce, 0, 0, Counter()

    def bytes_now():
        sent = [tensor for _, flat, _, received in optimizer.reduces_in_flight for tensor in (flat, received)]
        return sum(tensor.nbytes for tensor in [*(bucket.main_grad for bucket in optimizer.buckets), *sent]
                   if tensor is not None)

    def measure():
        nonlocal peak, in_flight
        peak, in_flight = max(peak, bytes_now()), max(in_flight, len(optimizer.reduces_in_flight))

    def measured_allocate(bucket):
        allocate(bucket)
        measure()

    def measured_reduce(bucket):
        reduce(bucket)
        reduced[optimizer.buckets.index(bucket)] += 1
        measure()

    Bucket.allocate_gradients, optimizer.reduce = measured_allocate, measured_reduce
    try:
        train.warm_up(stage, optimizer, config, mesh)
        reduced.clear()
        train.train_step(1, stage, optimizer, data, config, mesh)
    finally:
        Bucket.allocate_gradients = allocate
    matrices, vectors = (sorted(bucket.weights.numel() for bucket in optimizer.buckets
                                if (bucket.kind.update == "decay") == decays) for decays in (True, False))
    most = sum(matrices[-2 - config.virtual_stages:]) + sum(vectors) + 2 * MAX_REDUCES_IN_FLIGHT * max(matrices)
    return peak, bytes_now(), in_flight, list(reduced.values()), most * config.params_dtype.itemsize


@pytest.mark.parametrize("schedule, bucket_size", [
    *((schedule, 1) for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v")), ("1f1b", 2000),
    *(pytest.param(schedule, size, marks=pytest.mark.exhaustive) for schedule in SCHEDULES
      for size in (1, 2000, 10_000_000))])
def test_stage_2_holds_the_main_grads_being_filled_and_two_in_flight(pool, schedule, bucket_size):
    """No more bytes than these. Each microbatch reduces each bucket once."""
    config = tiny(4, pipeline_model_parallel_size=2, num_layers=8, slices=2, zero_stage=2, schedule=schedule,
                  bucket_size=bucket_size, global_batch_size=12, device="cpu",
                  untie_embeddings_and_output_weights=schedule == "zb-h1")
    outcomes = pool.run(in_flight_rank, config, random_data(config, 1), world_size=4)
    for peak, left, in_flight, reduced, most in outcomes:
        assert most / 3 < peak <= most and left == 0
        assert in_flight == MAX_REDUCES_IN_FLIGHT
        assert set(reduced) == {config.microbatches}


# ---- what flat buffers must not forget

def decay_rank(config, data):
    mesh, model, optimizer, stage = build(config)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    result = train.train_step(config.train_iters, stage, optimizer, data, config, mesh)
    return result.loss, result.grad_norm, {name: (before[name], weight.detach().clone())
                                           for name, weight in model.named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_only_matrices_decay(pool, zero_stage):
    """If no token of the batch counts, all gradients are zero, and the step consists of the decay alone."""
    config = tiny(4, tensor_model_parallel_size=2, zero_stage=zero_stage, min_lr=1e-2, weight_decay=0.5)
    data = random_data(config, config.train_iters)
    data.loss_mask.zero_()
    for loss, norm, weights in pool.run(decay_rank, config, data, world_size=4):
        assert loss == 0.0 and norm == 0.0
        for name, (before, after) in weights.items():
            expected = before * (1 - 1e-2 * 0.5) if before.dim() == 2 else before
            assert torch.allclose(after, expected, rtol=1e-12, atol=0), name


def accumulate_rank(config, data, times):
    _, model, _, stage = build(config)
    grown = []
    for count in (1, times):
        for weight in model.parameters():
            weight.main_grad.zero_()
        for _ in range(count):
            batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
            losses, tape = run_to_end(stage.forward(batch))
            run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
        grown.append({name: weight.main_grad.clone() for name, weight in model.named_parameters()})
    return grown, str(losses.dtype)


def test_bfloat16_gradients_accumulate_in_fp32(pool):
    """In bfloat16 a sum of equal gradients would stop growing after 256 of them."""
    config = tiny(1, dtype="bfloat16", num_layers=1)
    (((once, often), loss_dtype),) = pool.run(accumulate_rank, config, random_data(config, 1), 300, world_size=1)
    assert loss_dtype == "torch.float32"
    for name, gradient in once.items():
        assert gradient.dtype == torch.float32
        assert torch.allclose(often[name], 300 * gradient, rtol=1e-4,
                              atol=1e-5 * 300 * float(gradient.abs().max())), name


def test_bfloat16_training_follows_float32(pool):
    """The fp32 master weights keep updates that are too small for bfloat16."""
    layout = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, micro_batch_size=12,
                  train_iters=8, lr=1e-3, clip_grad=1.0)
    runs = {}
    for dtype in ("float32", "bfloat16"):
        config = tiny(4, dtype=dtype, **layout)
        weights, data = weights_and_data(config, 8)
        runs[dtype] = pool.run(train_rank, config, weights, data, 8, world_size=4)
    assert relative(runs["bfloat16"][0].losses, runs["float32"][0].losses) < 0.02
    assert relative(runs["bfloat16"][0].norms, runs["float32"][0].norms) < 0.1


def order_rank(config, data):
    """Return the order of a step's weight gradients and reduces, and the gradients that changed after their reduce."""
    trace = Trace()
    mesh, model, optimizer, stage = build(config, trace=trace)
    name_of = {weight: name for name, weight in model.named_parameters()}
    reduce = optimizer.reduce

    sent, late, finalize_gradients = {}, [], optimizer.finalize_gradients

    def watched(bucket):
        trace.moment("reduce", names=[name_of[weight] for weight in bucket.parameters])
        sent[bucket] = bucket.main_grad.clone()
        reduce(bucket)

    def finish():
        late.extend(name_of[weight] for bucket in optimizer.buckets for weight in bucket.parameters
                    if not torch.equal(bucket.view(weight, sent[bucket]), bucket.view(weight, bucket.main_grad)))
        finalize_gradients()

    optimizer.reduce, optimizer.finalize_gradients = watched, finish
    train.train_step(1, stage, optimizer, data, config, mesh)
    return [(event.kind, event.args) for event in trace.events if event.kind in ("reduce", "weight_gradient")], late


def test_a_bucket_is_reduced_while_backward_goes_on_and_only_when_it_is_complete(pool):
    """That is after the last slice of the last microbatch, before the layers below, and for a tied matrix after both of
    its uses. No gradient changes after its reduce was launched; this covers norms and biases, too."""
    config = tiny(4, tensor_model_parallel_size=2, slices=3, num_layers=4, micro_batch_size=3, bucket_size=1)
    outcomes = pool.run(order_rank, config, random_data(config, 1), world_size=4)
    assert [late for _, late in outcomes] == [[]] * 4
    events = outcomes[0][0]
    reduces = [i for i, (kind, _) in enumerate(events) if kind == "reduce"]
    weight_gradients = [i for i, (kind, _) in enumerate(events) if kind == "weight_gradient"]
    assert len(weight_gradients) == config.microbatches * config.slices * (4 * config.num_layers + 1)
    for i in reduces:
        for name in events[i][1]["names"]:
            site = ".".join(name.split(".")[:3]) if name.startswith("layers") else "head"
            late = any(args["site"] == site for _, args in events[i:] if args.get("site"))
            assert not late, f"{name} was reduced before it was complete"
    assert len([i for i in reduces if i < weight_gradients[-1]]) >= 3 * 8, "reduces overlap the layers below"


@pytest.mark.parametrize("dtype, zero_stage", [
    pytest.param("float32", 1, marks=pytest.mark.exhaustive), ("bfloat16", 2)])
def test_a_rerun_has_the_same_bits(pool, dtype, zero_stage):
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, columns=2, dtype=dtype,
                  hidden_dropout=0.1, attention_dropout=0.1, zero_stage=zero_stage, micro_batch_size=6)
    weights, data = weights_and_data(config, 2)
    first, second = (pool.run(train_rank, config, weights, data, 2) for _ in range(2))
    for run, rerun in zip(first, second):
        assert run.losses == rerun.losses and run.norms == rerun.norms
        assert all(torch.equal(run.weights[name][0], rerun.weights[name][0]) for name in run.weights)
