"""Experts are dropless however tokens choose, recomputation repeats no dispatch, and the parts of an expert layer that
other tests do not reach on a CPU. test_layouts.py compares whole training steps on every layout."""

from collections import Counter

import pytest
import torch
from support.fake_world import fake_world
from support.harness import (EXPERTS, build, check_against_reference, random_data, tiny, train_rank,
                             weights_and_data)
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.comm.trace import Trace
from nanodomino.comm.device import StandIn, standing_for
from nanodomino.domino import run_to_end
from nanodomino.estimate.rank import dry_run
from nanodomino.options import experts
from nanodomino.options.recompute import GRANULARITIES
from nanodomino.options.router import SCORE_FUNCTIONS


def microbatch(config, training=True):
    """Run one microbatch on one process. Return the model's counts and its weights."""
    with fake_world(0, 1):
        _, model, _, stage = build(config)
        batch = random_data(config, 1).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
        losses, tape = run_to_end(stage.forward(batch, training=training))
        if training:
            run_to_end(stage.backward(tape, torch.ones_like(losses)))
    return model.statistics, model.parameters()


def test_the_grouped_kernel_is_called_as_torch_defines_it(monkeypatch):
    """It runs on CPUs too, in float32. Expert 0 gets no tokens, so one group is empty."""
    config = tiny(num_experts=4, disable_bias_linear=True, dtype="float32", swiglu=True, init_method_std=0.3)
    calls, plain = [], experts.Router.choose

    def choose(router, logits):
        experts = plain(router, logits)[0].clamp(min=1)
        return experts, experts.flatten().bincount(minlength=4), experts.flatten().argsort(stable=True)

    monkeypatch.setattr(experts.Router, "choose", choose)
    _, loop = microbatch(config)
    monkeypatch.setattr(experts, "has_grouped_kernel", lambda x, weights: calls.append(len(x)) or True)
    _, kernel = microbatch(config)
    assert len(calls) == 4 * config.num_layers                # twice forward, twice backward
    for one, other in zip(loop, kernel):
        torch.testing.assert_close(one.main_grad, other.main_grad, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_small_steps_of_the_expert_bias_add_up_and_decide(pool):
    """All scores are 0.5, so the biases decide alone. bfloat16 has no number between 1 and 1.0078."""
    config = tiny(2, num_experts=2, disable_bias_linear=True, moe_router_topk=1, moe_router_score_function="sigmoid",
                  moe_router_enable_expert_bias=True, moe_router_bias_update_rate=1e-3, dtype="bfloat16", lr=1e-9)
    weights, data = weights_and_data(config, 4, rigged=(("router.weight", 0.0), ("expert_bias", (1.005, 1.0))))
    tokens = config.global_batch_size * config.seq_length
    for outcome in pool.run(train_rank, config, weights, data, 4, world_size=2):
        assert [counts[:2] for counts in outcome.statistics] == [(tokens, 0)] * 3 + [(0, tokens)]
        biases = [bias for name, (bias, _) in outcome.weights.items() if name.endswith("expert_bias")]
        for bias in biases:
            torch.testing.assert_close(bias, torch.tensor([1.003, 1.002]))
        assert len(biases) == config.num_layers


def test_an_evaluation_computes_no_routing_losses(monkeypatch):
    config = tiny(num_experts=4, disable_bias_linear=True)
    monkeypatch.setattr(experts.Router, "loss", None)
    counts, _ = microbatch(config, training=False)
    assert not counts.any()


def test_the_rows_are_gathered_before_the_host_waits_for_their_numbers(monkeypatch):
    """Otherwise a GPU would have nothing to do until the host has launched the dispatch."""
    calls, config = [], tiny(num_experts=4, disable_bias_linear=True)
    rows = config.micro_batch_size * config.seq_length * config.moe_router_topk

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            calls.append((function._opname, getattr(result, "shape", None)))
            return result

    read = experts.Dispatch.read
    monkeypatch.setattr(experts.Dispatch, "read", lambda *given: calls.append("the host waits") or read(*given))
    with Calls():
        microbatch(config)
    assert ("index", (rows, config.hidden_size)) in calls[:calls.index("the host waits")]


@pytest.mark.parametrize("capability, found", [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_only_gpus_with_a_grouped_kernel_use_it(capability, found):
    """Elsewhere torch's grouped_mm makes the host wait for the GPU."""
    x, weights = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 16), (2, 8, 16)))
    with standing_for(StandIn("cuda", capability=capability)):
        assert experts.has_grouped_kernel(x, weights) == found


def test_the_experts_hide_the_sum_of_choices_of_ranks_that_share_samples():
    config, trace = tiny(2, num_experts=4, disable_bias_linear=True, context_parallel_size=2, num_layers=1), Trace()
    with fake_world(0, 2):
        mesh, _, optimizer, stage = build(config, trace=trace)
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
    kinds = [event.kind for event in trace.events if event.args.get("site") == "layers.0.mlp"
             and event.args.get("group") in (None, "cp")]
    launched = kinds.index("all_reduce")
    assert kinds[launched:kinds.index("wait", launched)].count("matmul") == 2


# ---- whole steps

PRE_SOFTMAX, ZEROS = dict(moe_router_pre_softmax=True), ("router.weight", 0.0)
NO_LOSSES = dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0, moe_router_enable_expert_bias=False)


@pytest.mark.parametrize("rigged, topk, options", [
    (("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 1, PRE_SOFTMAX),
    *((("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 2, dict(moe_router_score_function=name)) for name in SCORE_FUNCTIONS),
    (ZEROS, 1, NO_LOSSES | dict(moe_router_score_function="sigmoid")), (ZEROS, 2, NO_LOSSES),
    (ZEROS, 3, NO_LOSSES | PRE_SOFTMAX)],
    ids=["all tokens on one expert", *(f"one expert without tokens {name}" for name in SCORE_FUNCTIONS), "ties 1",
         "ties 2", "ties 3"])
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_however_the_tokens_choose_no_row_is_dropped(pool, rigged, topk, options, ep):
    """Also ranks without any row compute. Of equal scores the first counts: without losses of the router, the rows of
    experts that were never chosen stay 0, so ties remain in the second step."""
    config = tiny(4, **EXPERTS | options, data_parallel_size=4, expert_model_parallel_size=ep, num_layers=2, slices=2,
                  moe_router_topk=topk)
    first = check_against_reference(pool, config, 2, rigged=(rigged,))[0].gradients
    used = [bool(gradient.any()) for gradient in first["layers.0.mlp.experts.dense_h_to_4h"]]
    assert used == {"expert_bias": [False, topk > 1, topk > 1, True]}.get(rigged[0], [e < topk for e in range(4)])


@pytest.mark.parametrize("features, group, forward, backward", [
    (EXPERTS | dict(expert_model_parallel_size=2, moe_shared_expert_intermediate_size=16), "ep",
     dict(all_to_all=3), dict(all_to_all=2)),
    (dict(context_parallel_size=2), "cp", dict(all_gather=1), dict(reduce_scatter=1)),
    (dict(context_parallel_size=2, cp_comm_type="a2a"), "cp", dict(all_to_all=2), dict(all_to_all=2))])
def test_recomputation_repeats_no_dispatch(features, group, forward, backward):
    """Experts need three all-to-alls in forward (counts, dispatch, combine) and two in backward. Recomputation repeats
    none of them. It does repeat the collectives inside attention's core."""
    for granularity in GRANULARITIES:
        config = tiny(2, **features, slices=2, num_layers=2, micro_batch_size=12, recompute_granularity=granularity,
                      device="cpu")
        repeated = forward if group == "cp" and granularity != "none" else {}
        expected = Counter(forward) + Counter(backward) + Counter(repeated)
        found = Counter()
        for (name, kind), (calls, _) in dry_run(train, config).traffic.items():
            if name in (group, "ep_counts"):
                found[kind] += calls
        assert found == {kind: count * 2 * 2 * config.microbatches for kind, count in expected.items()}
