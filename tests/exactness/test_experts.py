"""Experts are dropless however tokens choose, and Domino computes what their definition says.

test_features.py compares whole training steps on every layout.
"""

import dataclasses
from collections import Counter

import pytest
from support.harness import EXPERTS, build, check_against_reference, difference, tiny, weights_and_data

from nanodomino.comm.trace import Trace
from nanodomino.domino import run_to_end
from nanodomino.overlap.recompute import GRANULARITIES

STEPS = 2                # the second step sees the weights, moments and expert biases that the first step wrote
SIGMOID, PRE_SOFTMAX = dict(moe_router_score_function="sigmoid"), dict(moe_router_pre_softmax=True)
SHARED, DROPOUT = dict(moe_shared_expert_intermediate_size=16), dict(hidden_dropout=0.2, attention_dropout=0.3)
ZEROS = ("router.weight", 0.0)
NO_LOSSES = dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0, moe_router_enable_expert_bias=False)


@pytest.mark.parametrize("rigged, topk, options", [
    (("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 1, PRE_SOFTMAX),
    (("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 2, SIGMOID),
    (ZEROS, 1, NO_LOSSES | SIGMOID), (ZEROS, 2, NO_LOSSES), (ZEROS, 3, NO_LOSSES | PRE_SOFTMAX)],
    ids=["all tokens on one expert", "one expert without tokens", "ties 1", "ties 2", "ties 3"])
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_however_the_tokens_choose_no_row_is_dropped(pool, rigged, topk, options, ep):
    """Also ranks without any row compute. Of equal scores the first counts: without losses of the router, the rows of
    experts that were never chosen stay 0, so ties remain in the second step."""
    config = tiny(4, **EXPERTS | options, data_parallel_size=4, expert_model_parallel_size=ep, num_layers=2, slices=2,
                  moe_router_topk=topk)
    first = check_against_reference(pool, config, STEPS, rigged=(rigged,))[0].gradients
    used = [bool(gradient.any()) for gradient in first["layers.0.mlp.experts.dense_h_to_4h"]]
    assert used == {"expert_bias": [False, topk > 1, topk > 1, True]}.get(rigged[0], [e < topk for e in range(4)])


def both_ways(config, weights, data):
    """Return (gradients by Domino, gradients by GPT.forward and autograd) of one microbatch on this rank."""
    mesh, model, _, stage = build(config, weights)
    batch = data.batch(0, 0, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    losses, tape = run_to_end(stage.forward(batch))
    run_to_end(stage.backward(tape, batch.loss_mask.to(losses.dtype)))
    plain = model(batch.tokens, batch.positions, batch.labels, sample_ids=batch.sample_ids)
    assert (plain - losses).abs().max() < 1e-12
    auxiliary = sum(layer.mlp.auxiliary_loss for layer in model.layers.values())
    ((plain * batch.loss_mask).sum() + auxiliary).backward()
    weights = {name: weight for name, weight in model.named_parameters() if not name.endswith("expert_bias")}
    return ({name: weight.main_grad for name, weight in weights.items()},
            {name: weight.grad for name, weight in weights.items()})


@pytest.mark.parametrize("tp, dp, ep, options", [
    (1, 1, 1, SHARED), (1, 2, 2, SHARED | DROPOUT | dict(swiglu=True)), (2, 2, 2, SIGMOID | SHARED)])
def test_domino_computes_what_the_definition_says(pool, tp, dp, ep, options):
    """Compares every gradient, tape against autograd, the losses of the router included."""
    config = tiny(tp * dp, **EXPERTS | options, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, slices=2,
                  num_layers=2)
    weights, data = weights_and_data(config, 1)
    for domino, plain in pool.run(both_ways, config, weights, data, world_size=tp * dp):
        assert difference(domino, plain) < 1e-10


def exchanges(config, weights, data):
    """Return the all-to-alls of a microbatch's forward and of its backward by (site, slice)."""
    mesh, _, _, stage = build(config, weights, Trace())
    batch = data.batch(0, 0, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
    _, tape = run_to_end(stage.forward(batch))
    in_forward = len(stage.trace.events)
    run_to_end(stage.backward(tape, batch.loss_mask.double()))
    return [Counter((event.args["site"], event.args["slice"]) for event in events if event.kind == "all_to_all")
            for events in (stage.trace.events[:in_forward], stage.trace.events[in_forward:])]


def test_recomputation_repeats_no_dispatch(pool):
    """Forward has three all-to-alls in each layer with experts: counts, dispatch, combine. Backward has two."""
    config = tiny(2, **EXPERTS | SHARED, expert_model_parallel_size=2, slices=2, num_layers=3, moe_layer_freq=2)
    places = [(f"layers.{layer}.mlp", slice) for layer in (0, 2) for slice in (0, 1)]
    for granularity in GRANULARITIES:
        config = dataclasses.replace(config, recompute_granularity=granularity)
        for found in pool.run(exchanges, config, *weights_and_data(config, 1), world_size=2):
            assert found == [dict.fromkeys(places, 3), dict.fromkeys(places, 2)]
