"""Training with context parallelism equals one plain process on every layout.

The other side is support/reference.py, which computes every sample whole.
"""

import itertools
import random

import pytest
from support.harness import FAMILIES, check_against_reference, tiny

from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

STEPS = 2                # the second step sees the weights and moments that the first step wrote
A2A, DROPOUT = dict(cp_comm_type="a2a"), dict(hidden_dropout=0.2, attention_dropout=0.3)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.3,
               moe_z_loss_coeff=0.01, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05,
               moe_router_topk=2)


def case(cp, tp, pp, dp, *options, exhaustive=False, **more):
    options = dict(item for option in (*options, more) for item in option.items())
    name = f"cp{cp}-tp{tp}-pp{pp}-dp{dp}-" + "-".join(f"{key}{value}" for key, value in options.items())
    sizes = dict(context_parallel_size=cp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                 global_batch_size=12 if dp <= 2 else 24, num_layers=max(2, 2 * pp - 1), seq_length=16)
    return pytest.param(cp * tp * pp * dp, sizes | options, id=name,
                        marks=pytest.mark.exhaustive if exhaustive else [])


CASES = [
    case(2, 1, 1, 1, slices=1, zero_stage=0),
    case(2, 1, 1, 1, A2A, FAMILIES["qwen3"], slices=3, recompute_granularity="selective"),
    case(4, 1, 1, 1, FAMILIES["llama"], DOCUMENTS, slices=2, recompute_granularity="full"),
    case(2, 1, 1, 2, A2A, DROPOUT, zero_stage=2),
    case(2, 2, 1, 1, DROPOUT, FAMILIES["qwen2"], slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(2, 2, 1, 1, A2A, FAMILIES["llama"], DOCUMENTS, slices=2, columns=2, sequence_parallel=True),
    case(2, 1, 2, 1, FAMILIES["qwen3"], schedule="paired", zero_stage=2, recompute_granularity="selective"),
    case(2, 1, 2, 2, FAMILIES["llama"], schedule="zb-v", slices=2, num_layers=5),
    case(2, 1, 1, 2, EXPERTS, expert_model_parallel_size=4, slices=2),
    case(4, 1, 2, 1, A2A, FAMILIES["mixed"], schedule="zb-h1", slices=3, loss_scale=2.0**12),
]


def crossing():
    """Return exhaustive cases: every layout with every schedule. The other options are drawn for each case."""
    options = dict(slices=(1, 2, 3), columns=(1, 2), zero_stage=(0, 1, 2), recompute_granularity=tuple(GRANULARITIES),
                   loss_scale=(None, 2.0**12), sequence_parallel=(False, True), cp_comm_type=("all_gather", "a2a"))
    groups = [[*FAMILIES.values(), EXPERTS], ({}, DROPOUT), ({}, DOCUMENTS)]
    draw, cases = random.Random("context"), []
    for cp, tp, pp, dp in itertools.product((2, 4), (1, 2, 4), (1, 2, 4), (1, 2)):
        if cp * tp * pp * dp <= 8:
            for schedule in SCHEDULES:
                drawn = {name: draw.choice(values) for name, values in options.items()}
                drawn["sequence_parallel"] &= tp > 1
                family, *more = map(draw.choice, groups)
                if family.get("num_query_groups", 8) < cp * tp:
                    drawn["cp_comm_type"] = "all_gather"
                if family is EXPERTS:
                    drawn["expert_model_parallel_size"] = draw.choice([ep for ep in (1, 2, 4) if ep <= cp * dp])
                cases.append(case(cp, tp, pp, dp, drawn, family, *more, exhaustive=True, schedule=schedule,
                                  num_layers=2 * pp + 1, global_batch_size=24))
    return cases


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (crossing() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    check_against_reference(pool, tiny(world_size, **options), STEPS)
