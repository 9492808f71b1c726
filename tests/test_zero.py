"""ZeRO stages 1 and 2: when buckets are reduced, and what flat buffers must not forget."""

import math
from collections import Counter, deque
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.fake_world import fake_world
from support.harness import EXPERTS, build, random_data, tiny

import train
from nanodomino.comm.trace import NO_TRACE, Trace
from nanodomino.domino import run_to_end
from nanodomino.model import meta_model
from nanodomino.optim.buckets import Bucket, flat_layout, sort_into_buckets
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import MAX_REDUCES_IN_FLIGHT, ZeroOptimizer, sum_of_squares


def state_rank(config, data):
    """Run two steps. Return the names of the states, the largest number in the padding and the padding's elements."""
    mesh, model, optimizer, stage = build(config)
    for step in (1, 2):
        train.train_step(step, stage, optimizer, data, config, mesh)
    padding, elements = 0.0, 0
    for bucket in optimizer.buckets:
        is_padding = torch.ones(bucket.weights.numel(), dtype=torch.bool)
        for weight in bucket.parameters:
            offset = weight.storage_offset()
            is_padding[offset:offset + weight.numel()] = False
        own = bucket.own_grad[is_padding[bucket.own_offset:][:len(bucket.own_grad)]]
        padding = max([padding] + bucket.weights[is_padding].abs().tolist() + own.abs().tolist())
        elements += is_padding.sum().item()
    return optimizer.states_of(optimizer.buckets[0]), padding, elements


@pytest.mark.parametrize("dp, zero_stage", [(2, 2), (4, 1), (4, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_padding_of_flat_buffers_stays_zero(pool, dp, zero_stage, dtype):
    """It would count in the norm. tests/estimate compares the bytes of the buffers with the formulas."""
    config = tiny(dp, dtype=dtype, zero_stage=zero_stage, num_attention_heads=1, hidden_size=17, loss_scale=256.0,
                  micro_batch_size=6)
    for names, padding, elements in pool.run(state_rank, config, random_data(config, 2), world_size=dp):
        assert elements > 0 and padding == 0.0
        assert names == ("weight", *OPTIMIZERS["adamw"].moments), "what a checkpoint saves"


# ---- buckets

@pytest.mark.parametrize("bucket_size", [2000, 1024, 60])
def test_a_bucket_is_full_when_it_has_bucket_size_elements(bucket_size):
    """Without its last parameter it would have fewer. Of each kind only the last bucket may have fewer. An MLP's matrix
    has 1024 elements. With a size of 60, the vectors fill several buckets, too."""
    model = meta_model(tiny(bucket_size=bucket_size))
    buckets = [(kind, [weight.numel() for weight in weights]) for kind, weights in sort_into_buckets(model)]
    full = [sizes for _, sizes in buckets if sum(sizes) >= bucket_size]
    assert len(full) >= 3 and all(sum(sizes[:-1]) < bucket_size for _, sizes in buckets)
    assert [1024] in full or bucket_size != 1024
    assert set(Counter(kind for kind, sizes in buckets if sum(sizes) < bucket_size).values()) == {1}


@pytest.mark.table
def test_parameters_and_partitions_start_at_multiples_of_16_elements():
    """Tensor cores need aligned matrices. A parameter of 6 elements comes first, then one of 40, then one of 16."""
    offsets, length = flat_layout([torch.ones(6), torch.ones(2, 20), torch.ones(16)], 3)
    assert [*offsets.values()] == [0, 16, 64] and length == 96


# ---- stage 2

def in_flight_rank(config, data):
    """Run a warm-up and a step. Return the peak bytes of this rank's main_grads, including reduces in flight; the bytes
    after the step; the number of reduces in flight after each launch of the step; how often the step reduced each
    bucket; the largest peak that is right: matrices of one sublayer and of the embedding, all vectors, and two reduces
    with their receive buffers."""
    mesh, _, optimizer, stage = build(config, warm=False)
    allocate, reduce, peaks, in_flight, reduced = Bucket.allocate_gradients, optimizer.reduce, [], [], Counter()

    def bytes_now():
        sent = [tensor for _, flat, _, received in optimizer.reduces_in_flight for tensor in (flat, received)]
        return sum(tensor.nbytes for tensor in [*(bucket.main_grad for bucket in optimizer.buckets), *sent]
                   if tensor is not None)

    def measured_allocate(bucket):
        allocate(bucket)
        peaks.append(bytes_now())

    def measured_reduce(bucket):
        reduce(bucket)
        reduced[optimizer.buckets.index(bucket)] += 1
        in_flight.append(len(optimizer.reduces_in_flight))
        peaks.append(bytes_now())

    with (mock.patch.object(Bucket, "allocate_gradients", measured_allocate),
          mock.patch.object(optimizer, "reduce", measured_reduce)):
        train.warm_up(stage, optimizer, config, mesh)
        reduced.clear()
        in_flight.clear()
        train.train_step(1, stage, optimizer, data, config, mesh)
    matrices, vectors = (sorted(bucket.weights.numel() for bucket in optimizer.buckets
                                if (bucket.kind.update == "decay") == decays) for decays in (True, False))
    most = sum(matrices[-2 - config.virtual_stages:]) + sum(vectors) + 2 * MAX_REDUCES_IN_FLIGHT * max(matrices)
    return max(peaks), bytes_now(), in_flight, list(reduced.values()), most * config.params_dtype.itemsize


@pytest.mark.parametrize("schedule, bucket_size", [
    *((schedule, 1) for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v")), ("interleaved", 10_000_000),
    *(pytest.param(schedule, size, marks=pytest.mark.exhaustive) for schedule in SCHEDULES
      for size in (1, 2000, 10_000_000))])
def test_stage_2_holds_the_main_grads_being_filled_and_two_in_flight(pool, schedule, bucket_size):
    """No more bytes than these. Each microbatch reduces each bucket once. A launch waits only for the oldest reduce."""
    config = tiny(4, pipeline_model_parallel_size=2, num_layers=8, slices=2, zero_stage=2, schedule=schedule,
                  bucket_size=bucket_size, global_batch_size=12, device="cpu",
                  untie_embeddings_and_output_weights=schedule == "zb-h1")
    outcomes = pool.run(in_flight_rank, config, random_data(config, 1), world_size=4)
    for peak, left, in_flight, reduced, most in outcomes:
        assert most / 3 < peak <= most and left == 0
        assert in_flight == [1, *[MAX_REDUCES_IN_FLIGHT] * (len(in_flight) - 1)]
        assert set(reduced) == {config.microbatches}


# ---- what flat buffers must not forget

@pytest.mark.parametrize("rank, options", [(0, {}), (1, {}), (0, EXPERTS), (1, EXPERTS)])
def test_without_tokens_that_count_a_step_has_neither_a_loss_nor_a_gradient(rank, options):
    """0/0 would be NaN, and routers have losses of their own."""
    config = tiny(2, tensor_model_parallel_size=2, **options)
    data = random_data(config, 1)
    data.loss_mask.zero_()
    with fake_world(rank, 2):
        mesh, _, optimizer, stage = build(config)
        result = train.train_step(1, stage, optimizer, data, config, mesh)
        assert (result.loss, result.tokens, result.grad_norm, result.skipped) == (0.0, 0.0, 0.0, False)
        assert not any(bucket.own_grad.any() for bucket in optimizer.buckets)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_sees_all_ranks_act_upon(rank):
    """A loss sum, a copy of a gradient, or the wish to stop, also on a rank whose numbers do not count in the sums."""
    config = tiny(2, tensor_model_parallel_size=2)
    with fake_world(rank, 2):
        _, model, optimizer, _ = build(config)
        totals = SimpleNamespace(loss_sum=math.nan, tokens=1.0)
        assert math.isnan(optimizer.sum_over_world(totals)[0])
        assert optimizer.sum_over_world(totals, stop=True)[3] == 1.0
        model.final_norm.weight.main_grad.fill_(math.nan)
        assert math.isnan(optimizer.sum_over_world(totals)[2])
        optimizer.sum_over_world = lambda totals, stop: [math.nan, 1.0, 0.0, 2.0]
        result = optimizer.step(0.1, totals)
        assert (result.skipped, result.stop) == (True, True)


@pytest.mark.parametrize("grad_norm, factor", [(4.0, 0.25), (0.5, 1.0)])
def test_clipping_never_enlarges_a_gradient(grad_norm, factor):
    with fake_world(0, 1):
        _, _, optimizer, _ = build(tiny(1, clip_grad=1.0))
        for bucket in optimizer.buckets:
            bucket.own_grad.fill_(1.0)
        optimizer.update(0.0, grad_norm, 3.0)
        assert all(torch.allclose(bucket.own_grad, torch.tensor(3.0 * factor).double(), rtol=1e-5)
                   for bucket in optimizer.buckets)


def test_the_oldest_reduces_end_first():
    waited, one = [], SimpleNamespace(kind=SimpleNamespace(replicas="dp"), partitions=1, partition=0,
                                      shards_gradients=False)
    optimizer = SimpleNamespace(trace=NO_TRACE, wait=lambda group, work: waited.append(work), reduces_in_flight=deque(
        (one, torch.zeros(2), work, None) for work in "abc"))
    ZeroOptimizer.finish_reduces(optimizer, max_in_flight=1)
    assert waited == ["a", "b"] and len(optimizer.reduces_in_flight) == 1


def test_the_squares_of_blocks_are_added_in_float64():
    """1 + 2^-28 is 1 in fp32."""
    flat = torch.zeros(3 << 18)
    flat[0], flat[-1] = 1.0, 2.0 ** -14
    assert sum_of_squares(flat).item() == 1 + 2.0 ** -28


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


def test_a_bucket_is_reduced_while_backward_goes_on(pool):
    """After the last slice of the last microbatch, while the layers below compute."""
    config = tiny(4, tensor_model_parallel_size=2, slices=3, num_layers=4, micro_batch_size=3, bucket_size=1)
    for kinds in pool.run(order_rank, config, random_data(config, 1), world_size=4):
        last = max(i for i, kind in enumerate(kinds) if kind == "weight_gradient")
        assert kinds.count("weight_gradient") == config.microbatches * config.slices * (4 * config.num_layers + 1)
        assert kinds[:last].count("reduce") >= 3 * 8


def order_rank(config, data):
    """Return the order of a step's weight gradients and of the reduces over replicas."""
    mesh, _, optimizer, stage = build(config, trace=Trace())
    train.train_step(1, stage, optimizer, data, config, mesh)
    return ["weight_gradient" if event.kind == "weight_gradient" else "reduce" for event in stage.trace.events
            if event.kind == "weight_gradient" or event.kind == "reduce_scatter" and event.args["group"] == "dp"]
