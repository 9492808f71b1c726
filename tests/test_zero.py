"""ZeRO-1 and 2: who owns what, how many bytes it takes, and that flat buffers forget nothing that matters."""

from collections import Counter

import pytest
import torch
from support.harness import build, random_data, reference_for, relative, tiny, train_rank

import train
from nanodomino.analysis import expected_memory
from nanodomino.comm.trace import Trace
from nanodomino.domino import run_alone
from nanodomino.optim.buckets import Bucket
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.zero import MAX_REDUCES_IN_FLIGHT


def state_rank(config, data):
    """After two steps: per parameter element, the bytes of weights, gradients, master and moments; and what padding
    holds."""
    mesh, model, optimizer, stage = build(config)
    for step in (1, 2):
        train.train_step(step, stage, optimizer, data, config, mesh)
    tensors = [tensor for bucket in optimizer.buckets for tensor in (bucket.weights, bucket.own_grad, bucket.master)]
    tensors += [tensor for tensor in optimizer.state_tensors() if tensor.dim()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    elements = sum(bucket.weights.numel() for bucket in optimizer.buckets)
    padding = 0.0
    for bucket in optimizer.buckets:
        outside = torch.ones(bucket.weights.numel(), dtype=torch.bool)
        for weight in bucket.parameters:
            offset = weight.storage_offset()
            outside[offset:offset + weight.numel()] = False
        own = bucket.own_grad[outside[bucket.own_offset:][:len(bucket.own_grad)]]
        padding = max([padding] + bucket.weights[outside].abs().tolist() + own.abs().tolist())
    own = sum(bucket.master.numel() for bucket in optimizer.buckets)
    return sum(storages.values()) / elements, padding, own / elements, outside.sum().item()


@pytest.mark.parametrize("dp, zero_stage", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (4, 0)])
@pytest.mark.parametrize("dtype, weights, gradients, optimizer",
                         [("float32", 4, 4, 8), ("bfloat16", 2, 4, 12), ("float16", 2, 4, 12), ("float64", 8, 8, 16)])
def test_bytes_per_parameter_are_the_formulas(pool, dp, zero_stage, dtype, weights, gradients, optimizer):
    """16-bit training 6 + 12/dp, fp32 8 + 8/dp, ZeRO-2 2 + 16/dp, 4 + 12/dp; and the padding of a flat buffer, which
    would count in the norm, stays zero."""
    config = tiny(dp, dtype=dtype, zero_stage=zero_stage, num_attention_heads=1, hidden_size=17, loss_scale=256.0)
    expected = weights + gradients / (dp if zero_stage == 2 else 1) + optimizer / (dp if zero_stage else 1)
    assert expected == expected_memory.state_bytes_per_parameter(config)
    for bytes_per_parameter, padding, own, padded in pool.run(state_rank, config, random_data(config, 2),
                                                              world_size=dp):
        assert bytes_per_parameter == pytest.approx(expected)
        assert own == pytest.approx(1 / (dp if zero_stage else 1))
        assert padded > 0 and padding == 0.0


# ---- stage 2

def test_with_one_microbatch_stage_2_has_the_bits_of_stage_1(pool):
    """Its only sum is the same: buckets, replicas, order. (With more of them the order is another, and the layouts'
    tests say 1e-9.)"""
    outcomes = {}
    for zero_stage in (1, 2):
        config = tiny(4, zero_stage=zero_stage, micro_batch_size=6, slices=2, dtype="float32")
        weights, data, _, _ = reference_for(tiny(4), 3)
        outcomes[zero_stage] = pool.run(train_rank, config, weights, data, 3, world_size=4)
    for one, other in zip(*outcomes.values()):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)


def in_flight_rank(config, data):
    """Of a warm-up and a step: (bytes of gradients that this rank's buckets have in memory beside their own parts, at
    most; those that are left; reduces under way, at most; how often each bucket was reduced in the step; the formula's
    bytes)."""
    mesh, _, optimizer, stage = build(config)
    take, reduce, most, under_way, reduced = Bucket.allocate_gradients, optimizer.reduce, 0, 0, Counter()

    def bytes_now():
        travelling = [tensor for _, flat, _, received in optimizer.reduces_in_flight for tensor in (flat, received)]
        return sum(tensor.nbytes for tensor in [*(bucket.main_grad for bucket in optimizer.buckets), *travelling]
                   if tensor is not None)

    def look():
        nonlocal most, under_way
        most, under_way = max(most, bytes_now()), max(under_way, len(optimizer.reduces_in_flight))

    def taking(bucket):
        take(bucket)
        look()

    def reducing(bucket):
        reduce(bucket)
        reduced[optimizer.buckets.index(bucket)] += 1
        look()

    Bucket.allocate_gradients, optimizer.reduce = taking, reducing
    try:
        train.warm_up(stage, optimizer, config, mesh)
        reduced.clear()
        train.train_step(1, stage, optimizer, data, config, mesh)
    finally:
        Bucket.allocate_gradients = take
    return most, bytes_now(), under_way, list(reduced.values()), expected_memory.gradient_buffer_bytes(config, mesh)


@pytest.mark.parametrize("schedule, bucket_size",
                         [*((schedule, 1) for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v")), ("1f1b", 2000), *(
    pytest.param(schedule, size, marks=pytest.mark.exhaustive) for schedule in SCHEDULES
    for size in (1, 2000, 10_000_000))])
def test_gradients_in_memory_are_those_that_are_being_added_up_and_two_on_their_way(pool, schedule, bucket_size):
    """No more than the formula says and, of many small buckets, no more than a part of them all. Each is reduced by
    every microbatch."""
    config = tiny(4, pipeline_model_parallel_size=2, num_layers=8, slices=2, zero_stage=2, schedule=schedule,
                  bucket_size=bucket_size, device="cpu", untie_embeddings_and_output_weights=schedule == "zb-h1")
    for most, left, under_way, reduced, said in pool.run(in_flight_rank, config, random_data(config, 1), world_size=4):
        assert said / 3 < most <= said and left == 0
        assert under_way == MAX_REDUCES_IN_FLIGHT
        assert set(reduced) == {config.microbatches}


# ---- what flat buffers must not forget


def decay_rank(config, data):
    mesh, model, optimizer, stage = build(config)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    result = train.train_step(config.train_iters, stage, optimizer, data, config, mesh)
    return result.loss, result.grad_norm, {name: (before[name], weight.detach().clone())
                                           for name, weight in model.named_parameters()}


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_matrices_decay_and_nothing_else(pool, zero_stage):
    """With a batch in which no token counts all gradients are zero, and what is left of the step is the decay."""
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
            losses, tape = run_alone(stage.forward(batch))
            run_alone(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
        grown.append({name: weight.main_grad.clone() for name, weight in model.named_parameters()})
    return grown, str(losses.dtype)


def test_bfloat16_gradients_accumulate_in_fp32(pool):
    """In bfloat16 the sum of equal gradients would stop growing at 256 of them."""
    config = tiny(1, dtype="bfloat16", num_layers=1)
    (((once, often), loss_dtype),) = pool.run(accumulate_rank, config, random_data(config, 1), 300, world_size=1)
    assert loss_dtype == "torch.float32"
    for name, gradient in once.items():
        assert gradient.dtype == torch.float32
        assert torch.allclose(often[name], 300 * gradient, rtol=1e-4,
                              atol=1e-5 * 300 * float(gradient.abs().max())), name


def test_bfloat16_training_follows_float32(pool):
    """With fp32 master weights: an update that is too small for bfloat16 is not lost."""
    layout = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, train_iters=8, lr=1e-3,
                  clip_grad=1.0)
    runs = {}
    for dtype in ("float32", "bfloat16"):
        config = tiny(8, dtype=dtype, **layout)
        weights, data, _, _ = reference_for(tiny(8, **layout), 8)
        runs[dtype] = pool.run(train_rank, config, weights, data, 8)
    assert relative(runs["bfloat16"][0].losses, runs["float32"][0].losses) < 0.02
    assert relative(runs["bfloat16"][0].norms, runs["float32"][0].norms) < 0.1


def order_rank(config, data):
    """The order in which one step computes and reduces; and the names of the gradients that still grew after that."""
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


def test_a_bucket_is_reduced_behind_the_rest_of_backward_and_never_before_it_is_final(pool):
    """After the last microbatch's last slice, before the layers below; a tied matrix after both its uses. Norms and
    biases have no product by which to know them: to none of the gradients is anything added once it is on the wires."""
    config = tiny(4, tensor_model_parallel_size=2, slices=3, num_layers=4, micro_batch_size=3, bucket_size=1)
    outcomes = pool.run(order_rank, config, random_data(config, 1), world_size=4)
    assert [late for _, late in outcomes] == [[]] * 4
    events = outcomes[0][0]
    reduces = [i for i, (kind, _) in enumerate(events) if kind == "reduce"]
    products = [i for i, (kind, _) in enumerate(events) if kind == "weight_gradient"]
    assert len(products) == config.microbatches * config.slices * (2 * config.num_layers + 1)
    for i in reduces:
        for name in events[i][1]["names"]:
            site = ".".join(name.split(".")[:3]) if name.startswith("layers") else "head"
            assert not any(about["site"] == site for _, about in events[i:]
                           if about.get("site")), f"{name} was reduced before it was final"
    assert len([i for i in reduces
                if i < products[-1]]) >= 3 * 8, "layers above the first are reduced behind the layers below"


@pytest.mark.parametrize("dtype, zero_stage", [("float32", 1), ("bfloat16", 2)])
def test_the_same_run_twice_gives_the_same_bits(pool, dtype, zero_stage):
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, columns=2, dtype=dtype,
                  hidden_dropout=0.1, attention_dropout=0.1, zero_stage=zero_stage)
    weights, data, _, _ = reference_for(tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 3)
    first, second = (pool.run(train_rank, config, weights, data, 3) for _ in range(2))
    for one, other in zip(first, second):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(one.weights[name][0], other.weights[name][0]) for name in one.weights)
