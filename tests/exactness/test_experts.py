"""Experts are dropless however tokens choose, and recomputation repeats no dispatch. test_layouts.py compares whole
training steps on every layout."""

from collections import Counter

import pytest
from support.harness import EXPERTS, check_against_reference, tiny

import train
from nanodomino.estimate.rank import dry_run
from nanodomino.options.recompute import GRANULARITIES
from nanodomino.options.router import SCORE_FUNCTIONS

STEPS = 2                # the second step sees the weights, moments and expert biases that the first step wrote
SIGMOID, PRE_SOFTMAX = dict(moe_router_score_function="sigmoid"), dict(moe_router_pre_softmax=True)
SHARED = dict(moe_shared_expert_intermediate_size=16)
ZEROS = ("router.weight", 0.0)
NO_LOSSES = dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0, moe_router_enable_expert_bias=False)


@pytest.mark.parametrize("rigged, topk, options", [
    (("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 1, PRE_SOFTMAX),
    *((("expert_bias", (-10.0, 0.0, 0.0, 10.0)), 2, dict(moe_router_score_function=name)) for name in SCORE_FUNCTIONS),
    (ZEROS, 1, NO_LOSSES | SIGMOID), (ZEROS, 2, NO_LOSSES), (ZEROS, 3, NO_LOSSES | PRE_SOFTMAX)],
    ids=["all tokens on one expert", *(f"one expert without tokens {name}" for name in SCORE_FUNCTIONS), "ties 1",
         "ties 2", "ties 3"])
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_however_the_tokens_choose_no_row_is_dropped(pool, rigged, topk, options, ep):
    """Also ranks without any row compute. Of equal scores the first counts: without losses of the router, the rows of
    experts that were never chosen stay 0, so ties remain in the second step."""
    config = tiny(4, **EXPERTS | options, data_parallel_size=4, expert_model_parallel_size=ep, num_layers=2, slices=2,
                  moe_router_topk=topk)
    first = check_against_reference(pool, config, STEPS, rigged=(rigged,))[0].gradients
    used = [bool(gradient.any()) for gradient in first["layers.0.mlp.experts.dense_h_to_4h"]]
    assert used == {"expert_bias": [False, topk > 1, topk > 1, True]}.get(rigged[0], [e < topk for e in range(4)])


@pytest.mark.parametrize("features, group, forward, backward", [
    (EXPERTS | SHARED | dict(expert_model_parallel_size=2), "ep", dict(all_to_all=3), dict(all_to_all=2)),
    (dict(context_parallel_size=2), "cp", dict(all_gather=1), dict(reduce_scatter=1)),
    (dict(context_parallel_size=2, cp_comm_type="a2a"), "cp", dict(all_to_all=2), dict(all_to_all=2))])
def test_recomputation_repeats_no_dispatch(features, group, forward, backward):
    """Experts need three all-to-alls in forward (counts, dispatch, combine) and two in backward. Recomputation repeats
    none of them. It does repeat the collectives inside attention's core."""
    for granularity in GRANULARITIES:
        config = tiny(2, **features, slices=2, num_layers=2, recompute_granularity=granularity, device="cpu")
        repeated = forward if group == "cp" and granularity != "none" else {}
        expected = Counter(forward) + Counter(backward) + Counter(repeated)
        found = Counter()
        for (name, kind), (calls, _) in dry_run(train, config).traffic.items():
            if name in (group, "ep_counts"):
                found[kind] += calls
        assert found == {kind: count * 2 * 2 * config.microbatches for kind, count in expected.items()}
