"""Training with experts, context parallelism and multi-token prediction equals one plain process on every layout.

The other side is support/reference.py, written from the papers: whole samples, whole tensors and one autograd graph.
There every expert computes every token, and each depth sees only the places that have a label.
"""

import itertools
import random

import pytest
from support.harness import EXPERTS, FAMILIES, check_against_reference, tiny

from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

STEPS = 2                # the second step sees the weights, moments and expert biases that the first step wrote
DROPOUT, UNTIED = dict(hidden_dropout=0.2, attention_dropout=0.3), dict(untie_embeddings_and_output_weights=True)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
SIGMOID = EXPERTS | dict(moe_router_score_function="sigmoid")
PRE_SOFTMAX = EXPERTS | dict(moe_router_pre_softmax=True)
TOP_1, SHARED = dict(moe_router_topk=1), EXPERTS | dict(moe_shared_expert_intermediate_size=16)
A2A = dict(cp_comm_type="a2a")
DEPTH, DEPTHS = (dict(mtp_num_layers=depths, mtp_loss_scaling_factor=0.7) for depths in (1, 2))


def case(tp, pp, dp, *options, cp=1, ep=1, exhaustive=False, **more):
    """Return a test case for a layout and its options, with a readable name."""
    options = dict(item for option in (*options, more) for item in option.items())
    name = f"tp{tp}-pp{pp}-dp{dp}-cp{cp}-ep{ep}-" + "-".join(f"{key}{value}" for key, value in options.items())
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                 expert_model_parallel_size=ep, global_batch_size=12 if dp <= 2 else 24, num_layers=max(2, 2 * pp - 1),
                 seq_length=4 * max(cp, 2))
    return pytest.param(tp * pp * dp * cp, sizes | options, id=name, marks=pytest.mark.exhaustive if exhaustive else [])


CASES = [
    # experts
    case(1, 1, 1, SHARED, moe_router_topk=3, slices=3),
    case(1, 1, 2, PRE_SOFTMAX, DROPOUT, zero_stage=0, moe_layer_freq=2),
    case(1, 1, 2, SIGMOID, TOP_1, ep=2, recompute_granularity="selective", swiglu=True),
    case(1, 1, 4, SIGMOID, SHARED, ep=2, zero_stage=2, slices=2, moe_router_topk_scaling_factor=2.5),
    case(1, 1, 4, EXPERTS, FAMILIES["qwen3"], ep=4, zero_stage=0, slices=3),
    case(2, 1, 1, SHARED, PRE_SOFTMAX, slices=2, columns=2),
    case(2, 1, 2, SHARED, DROPOUT, ep=2, slices=2, sequence_parallel=True, recompute_granularity="full", swiglu=True),
    case(4, 1, 2, SIGMOID, ep=2, slices=2, micro_batch_size=6, loss_scale=2.0**12),
    case(1, 2, 2, EXPERTS, DOCUMENTS, ep=2, schedule="zb-v", slices=2, moe_layer_freq=2, num_layers=5),
    case(1, 2, 2, SHARED, ep=2, schedule="paired", recompute_granularity="selective", zero_stage=2),
    case(2, 2, 2, SIGMOID, DROPOUT, ep=2, schedule="zb-h1", slices=2, sequence_parallel=True, loss_scale=2.0**12),
    case(1, 4, 2, EXPERTS, ep=2, schedule="interleaved", num_layers=8, micro_batch_size=1, slices=1),
    # context parallelism
    case(1, 1, 1, cp=2, slices=1, zero_stage=0),
    case(1, 1, 1, A2A, FAMILIES["qwen3"], cp=2, slices=3, recompute_granularity="selective"),
    case(1, 1, 1, FAMILIES["llama"], DOCUMENTS, cp=4, slices=2, recompute_granularity="full"),
    case(1, 1, 2, A2A, DROPOUT, cp=2, zero_stage=2),
    case(2, 1, 1, DROPOUT, FAMILIES["qwen2"], cp=2, slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(2, 1, 1, A2A, FAMILIES["llama"], DOCUMENTS, cp=2, slices=2, columns=2, sequence_parallel=True),
    case(1, 2, 1, FAMILIES["qwen3"], cp=2, schedule="paired", zero_stage=2, recompute_granularity="selective"),
    case(1, 2, 2, FAMILIES["llama"], cp=2, schedule="zb-v", slices=2, num_layers=5),
    case(1, 1, 2, EXPERTS, cp=2, ep=4, slices=2),
    case(1, 2, 1, EXPERTS, cp=2, slices=2),
    case(1, 2, 1, A2A, FAMILIES["mixed"], cp=4, schedule="zb-h1", slices=3, loss_scale=2.0**12),
    # multi-token prediction
    case(1, 1, 1, DEPTH),
    case(1, 1, 2, DEPTHS, UNTIED, DOCUMENTS, slices=3, zero_stage=2, bucket_size=1),
    case(2, 1, 2, DEPTH, FAMILIES["llama"], DROPOUT, slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(1, 2, 2, DEPTHS, UNTIED, DROPOUT, schedule="zb-h1", slices=2, recompute_granularity="selective"),
    case(2, 2, 1, DEPTHS, schedule="zb-v", slices=2, zero_stage=0, loss_scale=2.0**12, num_layers=4),
    case(1, 2, 1, DEPTHS, DOCUMENTS, DROPOUT, cp=2, slices=2),
    case(2, 1, 2, DEPTH, EXPERTS, ep=2, slices=2),
    case(1, 2, 2, DEPTH, UNTIED, schedule="paired", zero_stage=2, slices=2),
]


def crossing():
    """Return exhaustive cases: every layout, with every schedule if it has a pipeline, else with two; half of them with
    experts. The other options are drawn for each case."""
    options = dict(slices=(1, 2, 3), columns=(1, 2), zero_stage=(0, 1, 2), recompute_granularity=tuple(GRANULARITIES),
                   loss_scale=(None, 2.0**12), sequence_parallel=(False, True), bucket_size=(1, 2000, 10_000_000),
                   virtual_stages=(None, 3), cp_comm_type=("all_gather", "a2a"))
    groups = [tuple(FAMILIES.values()), ({}, DROPOUT), ({}, DOCUMENTS, dict(reset_position_ids=True)), ({}, UNTIED),
              ({}, DEPTH, DEPTHS)]
    experts = [tuple(dict(moe_router_topk=topk, moe_layer_freq=frequency)
                     for topk, frequency in itertools.product((2, 3), (1, 2, 3))), (EXPERTS, SHARED),
               ({}, SIGMOID, SIGMOID | TOP_1, PRE_SOFTMAX, PRE_SOFTMAX | TOP_1),
               ({}, dict(moe_router_topk_scaling_factor=2.5))]
    draw, cases = random.Random("features"), []
    for tp, pp, dp, cp in itertools.product((1, 2, 4), repeat=4):
        if tp * pp * dp * cp > 8:
            continue
        for schedule in SCHEDULES if pp > 1 else draw.sample(list(SCHEDULES), 2):
            drawn = {name: draw.choice(values) for name, values in options.items()}
            more, ep = list(map(draw.choice, groups)), 1
            if draw.random() < 0.5:
                more += map(draw.choice, experts)
                ep = draw.choice([ep for ep in (1, 2, 4) if ep <= cp * dp])
            drawn["sequence_parallel"] &= tp > 1
            if more[0].get("num_query_groups", 8) < cp * tp:
                drawn["cp_comm_type"] = "all_gather"
            num_layers = 2 * pp + draw.choice((0, 1, 3))
            if schedule != "interleaved" or 3 * pp > num_layers:
                del drawn["virtual_stages"]
            cases.append(case(tp, pp, dp, drawn, *more, cp=cp, ep=ep, exhaustive=True, schedule=schedule,
                              num_layers=num_layers, global_batch_size=24))
    return cases


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (crossing() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    check_against_reference(pool, tiny(world_size, **options), STEPS)
