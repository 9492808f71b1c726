"""Measures what the docstrings of parallel.py and domino.py claim: bugs that they describe are put back, and autograd's
order is recorded.

A wrong docstring teaches what is wrong, and no other test would notice.
"""

import re

import pytest
import torch
import torch.distributed as dist
from support.harness import Outcome, build, full_tensors, random_data, shard_spec, tiny, weights_and_data

from nanodomino import parallel
from nanodomino.comm.trace import Trace
from nanodomino.config.config import Config
from nanodomino.domino import run_to_end
from nanodomino.parallel import ReduceFromTensorParallel

# ---- parallel.py: an all-reduce in g's backward

class AllReducedTwice(ReduceFromTensorParallel):
    """g whose backward also all-reduces, which is wrong."""

    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return ReduceFromTensorParallel.forward(ctx, partial, group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def plain_gradients_rank(config, data, g):
    """Return the gradients of a microbatch's summed loss: plain forward with this g, backward by autograd."""
    _, model, _, _ = build(config)
    original, parallel.ReduceFromTensorParallel = parallel.ReduceFromTensorParallel, g
    try:
        batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses = model(batch.tokens, batch.positions, batch.labels)
        (losses * batch.loss_mask).sum().backward()
    finally:
        parallel.ReduceFromTensorParallel = original
    gradients = {name: (weight.grad, shard_spec(weight)) for name, weight in model.named_parameters()}
    return Outcome((0, 0, model.mesh.tp_rank), [], [], [gradients], {}, 0.0)


def test_the_table_in_parallels_docstring_is_what_is_measured(pool):
    config = Config(dtype="float64", tensor_model_parallel_size=2, pipeline_model_parallel_size=1, global_batch_size=4)
    config = config.resolve(2).with_vocabulary(257)
    wrong, right = (full_tensors(pool.run(plain_gradients_rank, config, random_data(config, 1), g, world_size=2),
                                 lambda outcome: outcome.gradients[0])
                    for g in (AllReducedTwice, ReduceFromTensorParallel))
    rows = [re.search(rf"\n +{row} +([\d. ]+)\n", parallel.__doc__)[1] for row in ("layer", "ratio of norms", "cosine")]
    layers, ratios, cosines = ([float(number) for number in row.split()] for row in rows)
    assert sorted(layers) == list(range(config.num_layers))
    for layer, ratio, cosine in zip(layers, ratios, cosines, strict=True):
        twice, once = (side[f"layers.{layer:.0f}.mlp.dense_h_to_4h.weight"].flatten() for side in (wrong, right))
        assert float(twice.norm() / once.norm()) == pytest.approx(ratio, rel=0.01)
        assert float(torch.cosine_similarity(twice, once, dim=0)) == pytest.approx(cosine, abs=0.01)


# ---- domino.py: the order in which autograd and Domino run backward

class Step(torch.autograd.Function):
    """Appends its name to a log when backward reaches it."""

    @staticmethod
    def forward(ctx, name, log, *inputs):
        ctx.name, ctx.log, ctx.count = name, log, len(inputs)
        return sum(inputs[1:], inputs[0].clone())

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(ctx.name)
        return None, None, *[gradient] * ctx.count


def test_autograd_waits_for_each_gradient_right_after_its_launch():
    """Two slices are recorded in turn, as Domino runs them. f is split into launch and wait, so that the other slice's
    work could run in between; autograd does not use the chance."""
    log, x = [], {slice: torch.ones(1, requires_grad=True) for slice in "ab"}
    hidden = dict(x)
    for sublayer in ("attention 0", "mlp 0", "attention 1", "mlp 1"):
        for slice in "ab":
            h = Step.apply(f"wait {slice}", log, hidden[slice])
            h = Step.apply(f"launch {slice}", log, h)
            hidden[slice] = hidden[slice] + Step.apply(f"{sublayer} {slice}", log, h)
    torch.autograd.grad(hidden["a"] + hidden["b"], list(x.values()))
    assert log == [event for sublayer in ("mlp 1", "attention 1", "mlp 0", "attention 0") for slice in "ba"
                   for event in (f"{sublayer} {slice}", f"launch {slice}", f"wait {slice}")]


def first_stage_rank(config, data):
    """Return the kinds of the first stage's events after the last all-reduce launch, in forward and in backward."""
    _, model, _, stage = build(config, trace=Trace())
    if not model.pre_process:
        return None
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    output, tape = run_to_end(stage.forward(batch))
    kinds = [event.kind for event in stage.trace.events]
    last_launch = len(kinds) - kinds[::-1].index("all_reduce")
    forward = kinds[last_launch:]
    stage.trace.events.clear()
    run_to_end(stage.backward(tape, torch.ones_like(output)))
    kinds = [event.kind for event in stage.trace.events]
    return forward, kinds[len(kinds) - kinds[::-1].index("all_reduce"):]


def test_the_last_all_reduce_is_exposed_in_forward_and_hidden_by_weight_gradients_in_backward(pool):
    """Checks a stage that is not the last, where the cross entropy would follow."""
    config = tiny(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3)
    forward, backward = pool.run(first_stage_rank, config, random_data(config, 1), world_size=4)[0]
    assert set(forward) == {"resume", "wait"}
    assert set(backward) == {"resume", "wait", "weight_gradient"} and backward.count("weight_gradient") == 2


def final_rank(config, weights, data, defer_weights):
    """Return the names of the parameters whose main_grad changed after it was reported ready, and of all reported.
    defer_weights: weight gradients are left to weight_backward."""
    _, model, _, stage = build(config, weights)
    for weight in model.parameters():
        weight.main_grad.zero_()
    batch = data.batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    final = {}

    def on_gradients_ready(modules):
        final.update({weight: weight.main_grad.clone() for module in modules for weight in module.parameters()})

    run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype), on_gradients_ready, defer_weights))
    if defer_weights:
        run_to_end(stage.weight_backward(tape, on_gradients_ready))
    names = {weight: name for name, weight in model.named_parameters()}
    changed = [names[weight] for weight in final if not torch.equal(final[weight], weight.main_grad)]
    return changed, sorted(names[weight] for weight in final)


@pytest.mark.parametrize("defer_weights", [False, True], ids=["together", "apart"])
def test_a_sublayers_gradients_are_complete_when_it_is_reported_ready(pool, defer_weights):
    """That includes the row bias, whose gradient comes from the residual + norm of the next sublayer."""
    config = tiny(2, tensor_model_parallel_size=2, micro_batch_size=4, global_batch_size=4, slices=2)
    weights, data = weights_and_data(config, 1)
    for changed, final in pool.run(final_rank, config, weights, data, defer_weights, world_size=2):
        assert not changed
        assert "layers.0.attention.dense.bias" in final and final == sorted(weights)
