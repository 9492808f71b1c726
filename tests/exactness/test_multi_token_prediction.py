"""Training with multi-token prediction equals one plain process on every layout.

The other side is support/reference.py, written from the paper: whole tensors, one autograd graph, and each depth sees
only the places that have a label.
"""

import itertools
import random

import pytest
import torch
from support.harness import END_OF_TEXT, FAMILIES, check_against_reference, count_depth_masks, tiny

from nanodomino.data import Batch, EndOfText
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

STEPS = 2                # the second step sees the weights and moments that the first step wrote
UNTIED, DROPOUT = dict(untie_embeddings_and_output_weights=True), dict(hidden_dropout=0.2, attention_dropout=0.3)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.3,
               moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05)


def case(tp, pp, dp, depths, *options, exhaustive=False, **more):
    options = dict(item for option in (*options, more) for item in option.items())
    name = f"tp{tp}-pp{pp}-dp{dp}-depths{depths}-" + "-".join(f"{key}{value}" for key, value in options.items())
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, mtp_num_layers=depths,
                 mtp_loss_scaling_factor=0.7, global_batch_size=12 if dp <= 2 else 24, num_layers=2 * pp)
    world_size = tp * pp * dp * options.get("context_parallel_size", 1)
    return pytest.param(world_size, sizes | options, id=name, marks=pytest.mark.exhaustive if exhaustive else [])


CASES = [
    case(1, 1, 1, 1),
    case(1, 1, 2, 2, UNTIED, DOCUMENTS, slices=3, zero_stage=2, bucket_size=1),
    case(2, 1, 2, 1, FAMILIES["llama"], DROPOUT, slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(1, 2, 2, 2, UNTIED, DROPOUT, schedule="zb-h1", slices=2, recompute_granularity="selective"),
    case(2, 2, 1, 2, schedule="zb-v", slices=2, zero_stage=0, loss_scale=2.0**12),
    case(1, 2, 1, 2, DOCUMENTS, DROPOUT, context_parallel_size=2, slices=2),
    case(2, 1, 2, 1, EXPERTS, expert_model_parallel_size=2, slices=2),
    case(1, 2, 2, 1, UNTIED, schedule="paired", zero_stage=2, slices=2),
]


def crossing():
    """Return exhaustive cases: every layout with every schedule. The other options are drawn for each case."""
    options = dict(slices=(1, 2, 3), columns=(1, 2), zero_stage=(0, 1, 2), recompute_granularity=tuple(GRANULARITIES),
                   loss_scale=(None, 2.0**12), sequence_parallel=(False, True), bucket_size=(1, 10_000_000),
                   num_layers=(4, 8, 11), virtual_stages=(None, 3), mtp_num_layers=(1, 2),
                   cp_comm_type=("all_gather", "a2a"))
    groups = [({}, UNTIED), ({}, DROPOUT), ({}, DOCUMENTS, dict(reset_position_ids=True)),
              (*FAMILIES.values(), EXPERTS, EXPERTS | dict(moe_layer_freq=3))]
    draw, cases = random.Random("depths"), []
    for tp, pp, dp in itertools.product((1, 2, 4), repeat=3):
        if tp * pp * dp <= 8:
            for schedule in SCHEDULES:
                drawn = {name: draw.choice(values) for name, values in options.items()}
                cp = draw.choice([cp for cp in (1, 2) if tp * pp * dp * cp <= 8])
                drawn["sequence_parallel"] &= tp > 1
                if tp * cp > 4:                                # more ranks than some families have query groups
                    drawn["cp_comm_type"] = "all_gather"
                if schedule != "interleaved" or 3 * pp > drawn["num_layers"]:
                    del drawn["virtual_stages"]
                drawn["num_layers"] = max(drawn["num_layers"], 2 * pp)
                cases.append(case(tp, pp, dp, 1, drawn, *map(draw.choice, groups), exhaustive=True, schedule=schedule,
                                  context_parallel_size=cp, global_batch_size=24))
    return cases


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (crossing() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    check_against_reference(pool, tiny(world_size, **options), STEPS)


@pytest.mark.parametrize("flags", [(), (True, False), (False, True)], ids=["", "positions", "attention"])
@pytest.mark.parametrize("mask_loss", [False, True])
def test_each_depth_reads_the_batch_one_token_further(flags, mask_loss):
    """Depth d predicts the token d places after the next one: not beyond the last token, and not across the end of a
    document if that has effects. The loss mask belongs to the predicted token. The counts are by hand, in a loop."""
    rows = torch.randint(0, 6, (5, 13), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_rows(rows, list(range(5)), 4, EndOfText(END_OF_TEXT, mask_loss, *flags), depths=3)
    masks = count_depth_masks(rows, batch.loss_mask, 3, any(flags))
    halves = batch.split(2)
    for depth, mask in enumerate(masks, 1):
        batch, previous, halves = batch.ahead, batch, [half.ahead for half in halves]
        assert torch.equal(batch.tokens, previous.labels)
        assert torch.equal(batch.labels[:, :12 - depth], rows[:, depth + 1:])
        assert torch.equal(batch.loss_mask, mask) and 0 < mask.sum() < mask.numel()
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(batch, name))
    assert batch.ahead is None and halves[0].ahead is None
