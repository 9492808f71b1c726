"""Every layout computes what one plain process computes: losses, every gradient, norms, weights, to 1e-9 in float64.

The other side is support/reference.py: torch.nn, nothing of nanodomino, written from the papers. It sees whole samples,
whole tensors and one autograd graph. There every expert computes every token, and each depth of multi-token prediction
sees only the places that have a label.

Biases are not zero, the loss mask is uneven, the clipping bites, layers do not divide by stages, samples not by slices,
words not by ranks.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from support.harness import (EXPERTS, FAMILIES, FixedData, build, check_against_reference, plain_evaluation, relative,
                             tiny)
from support.reference import random_weights

import train
from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.data import TokenDataset
from nanodomino.layers.sublayers import NORMALIZATIONS
from nanodomino.options.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

STEPS = 2                # the second step sees the weights, moments and expert biases that the first step wrote
DROPOUT, UNTIED = dict(hidden_dropout=0.2, attention_dropout=0.3), dict(untie_embeddings_and_output_weights=True)
DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)
SIGMOID = EXPERTS | dict(moe_router_score_function="sigmoid")
PRE_SOFTMAX = EXPERTS | dict(moe_router_pre_softmax=True)
TOP_1, SHARED = dict(moe_router_topk=1), EXPERTS | dict(moe_shared_expert_intermediate_size=16)
A2A, WINDOW = dict(cp_comm_type="a2a"), dict(window_size=2)
DEPTH, DEPTHS = (dict(mtp_num_layers=depths, mtp_loss_scaling_factor=0.7) for depths in (1, 2))


def case(tp, pp, dp, *options, cp=1, ep=1, exhaustive=False, **more):
    """Return a test case for a layout and its options, with a readable name. A step has two to eight microbatches."""
    options = dict(item for option in (*options, more) for item in option.items())
    samples = options.get("micro_batch_size", {8: 12, 4: 6}.get(tp, 3))
    name = f"tp{tp}-pp{pp}-dp{dp}-cp{cp}-ep{ep}-" + "-".join(f"{key}{value}" for key, value in options.items())
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                 expert_model_parallel_size=ep, global_batch_size=samples * dp * max(2, min(2 * pp, 8) // dp),
                 num_layers=2 * pp + 1, seq_length=4 * max(cp, 2), micro_batch_size=samples)
    groups = {"num_query_groups": 8} if tp == 8 else {}
    return pytest.param(tp * pp * dp * cp, sizes | options | groups, id=name,
                        marks=pytest.mark.exhaustive if exhaustive else [])


# ---- pairs of options

# what a run without experts, context parallelism and depths may combine
OPTIONS = dict(slices=(1, 2, 3), columns=(1, 2), zero_stage=(0, 1, 2), schedule=tuple(SCHEDULES),
               tied=("tied", "untied"), normalization=tuple(NORMALIZATIONS), recompute_granularity=tuple(GRANULARITIES),
               loss_scale=(None, 2.0**12), sequence_parallel=(False, True), family=tuple(FAMILIES),
               documents=("one document", "documents"))
# everything, for the exhaustive cases
EXPERT_KINDS = {"no experts": {}, "shared expert": SHARED, "sigmoid, the best": SIGMOID | TOP_1,
                "pre-softmax, every second layer": PRE_SOFTMAX | dict(moe_layer_freq=2),
                "the best 3, scaled": EXPERTS | dict(moe_router_topk=3, moe_router_topk_scaling_factor=2.5)}
AXES = dict(tp=(1, 2, 4, 8), pp=(1, 2, 4, 8), dp=(1, 2, 4, 8), cp=(1, 2, 4))
EVERYTHING = OPTIONS | AXES | dict(experts=tuple(EXPERT_KINDS), ep=(1, 2, 4), depths=(0, 1, 2),
                            dropout=("no dropout", "dropout"), cp_comm_type=("all_gather", "a2a"),
                            bucket_size=(1, 2000, 10_000_000), virtual_stages=(None, 3))
CHOICES = dict(tied={"tied": {}, "untied": UNTIED}, family=FAMILIES, experts=EXPERT_KINDS,
               documents={"one document": {}, "documents": DOCUMENTS}, dropout={"no dropout": {}, "dropout": DROPOUT},
               depths={0: {}, 1: DEPTH, 2: DEPTHS})


def ranks(row: dict) -> int:
    return math.prod(row.get(axis, 1) for axis in AXES)


def pairs_of(row: dict) -> set:
    return set(itertools.combinations(row.items(), 2))


def in_all_pairs(options: dict):
    """Yield rows with a value of each option, such that any two values of two options meet in some row. A bug that
    needs two options at once then shows in some row. Greedy: each row is the best of 200 random rows. No row has more
    than eight ranks."""
    draw = random.Random("layouts")
    left = {((name, value), (other, its_value)) for name, other in itertools.combinations(options, 2)
            for value in options[name] for its_value in options[other] if ranks({name: value, other: its_value}) <= 8}
    while left:
        rows = ({name: draw.choice(values) for name, values in options.items()} for _ in itertools.count())
        best = max(itertools.islice((row for row in rows if ranks(row) <= 8), 200),
                   key=lambda row: len(left & pairs_of(row)))
        left -= pairs_of(best)
        yield best


def case_of(row: dict, tp, pp, dp, cp=1, ep=1, **more):
    """Return the case of a row of options."""
    settings = {name: value for name, value in row.items() if name not in CHOICES}
    chosen = [CHOICES[name][value] for name, value in row.items() if name in CHOICES]
    return case(tp, pp, dp, *chosen, settings, cp=cp, ep=ep, **more)


def all_pairs() -> list:
    """Return the exhaustive cases: all pairs of all options, the sizes of the layout among them. Where a layout rules
    an option out, the option has its default. Raises AssertionError unless the cases hold all 20 sizes of tensor,
    pipeline and data parallelism."""
    cases, layouts = [], set(SMALL)
    for row in in_all_pairs(EVERYTHING):
        tp, pp, dp, cp, ep = (row.pop(axis) for axis in (*AXES, "ep"))
        layouts.add((tp, pp, dp))
        ep = ep if row["experts"] != "no experts" and cp * dp % ep == 0 else 1
        if FAMILIES[row["family"]].get("num_query_groups", 8) < cp * tp:
            row["cp_comm_type"] = "all_gather"
        if row["schedule"] != "interleaved":
            row["virtual_stages"] = None
        chunks = row["virtual_stages"] or SCHEDULES[row["schedule"]].chunks[0]
        cases.append(case_of(row, tp, pp, dp, cp, ep, exhaustive=True, num_layers=chunks * pp + 1))
    assert len(layouts | {(1, 1, 1)}) == 20
    return cases


# ---- the cases

# By default nine rows of the table of pairs, which hold each value of each option, one on each layout of two to four
# ranks, then each schedule, corners, and the features.
SMALL = [layout for layout in itertools.product((1, 2, 4), repeat=3) if 1 < math.prod(layout) <= 4]
CASES = [case_of(row, *layout) for layout, row in zip(SMALL, in_all_pairs(OPTIONS))]
CASES += [case(1, 4, 1, schedule=name, num_layers=4 * SCHEDULES[name].chunks[0] + 1) for name in SCHEDULES]
CASES += [
    case(1, 1, 1, slices=3, micro_batch_size=6),
    case(2, 2, 2, slices=2),                                    # train.py's own choice for eight processes
    case(2, 1, 1, slices=2, columns=3, micro_batch_size=8),       # 16 features in 3 columns
    *(case(1, 4, 1, micro_batch_size=24, global_batch_size=24, schedule=name, exhaustive=name != "zb-v")
      for name in SCHEDULES),                                   # 1 microbatch, 4 stages
    # 3 microbatches: a round of 1
    case(1, 2, 2, schedule="interleaved", virtual_stages=3, micro_batch_size=4, num_layers=7, global_batch_size=24),
    # chunks share buckets, which microbatches of both then fill in turn
    case(1, 2, 2, slices=2, zero_stage=2, schedule="zb-v", bucket_size=1),
    case(2, 1, 2, slices=2, bucket_size=1, clip_grad=0.0),      # every parameter in a bucket of its own; no clipping
    # half of the ranks own only padding
    case(4, 2, 1, slices=2, make_vocab_size_divisible_by=64, exhaustive=True),
    # dropout: three samples in two slices, so that a rank's rows of a sharded stream begin in the middle of one
    case(4, 1, 1, DROPOUT, slices=2, columns=3, sequence_parallel=True, recompute_granularity="full",
         micro_batch_size=3),
    case(2, 2, 1, DROPOUT, schedule="zb-v", slices=2, columns=3, sequence_parallel=True,
         recompute_granularity="selective", seed=77),
    # experts
    case(1, 1, 1, SHARED, moe_router_topk=3, slices=3),
    case(1, 1, 2, PRE_SOFTMAX, DROPOUT, zero_stage=0, moe_layer_freq=2),
    case(1, 1, 2, SIGMOID, TOP_1, ep=2, recompute_granularity="selective", swiglu=True),
    case(1, 1, 4, SIGMOID, SHARED, ep=2, zero_stage=2, slices=2, moe_router_topk_scaling_factor=2.5,
         loss_scale=2.0**12),
    case(1, 1, 4, EXPERTS, FAMILIES["qwen3"], ep=4, zero_stage=0, slices=2),
    case(2, 1, 1, SHARED, PRE_SOFTMAX, slices=2, columns=2),
    case(2, 1, 2, SHARED, DROPOUT, ep=2, slices=2, sequence_parallel=True, recompute_granularity="full", swiglu=True),
    case(1, 2, 2, EXPERTS, DOCUMENTS, ep=2, schedule="zb-v", slices=2, moe_layer_freq=2),
    case(1, 2, 2, SHARED, ep=2, schedule="paired", recompute_granularity="selective", zero_stage=2),
    case(1, 2, 2, EXPERTS, ep=2, schedule="interleaved", num_layers=4, micro_batch_size=1, global_batch_size=6),
    # context parallelism
    case(1, 1, 1, cp=2, slices=1, zero_stage=0),
    case(1, 1, 1, A2A, FAMILIES["qwen3"], cp=2, slices=3, recompute_granularity="selective"),
    case(1, 1, 1, FAMILIES["llama"], DOCUMENTS, cp=4, slices=2, recompute_granularity="full"),
    case(1, 1, 2, A2A, DROPOUT, cp=2, zero_stage=2),
    case(2, 1, 1, DROPOUT, FAMILIES["qwen2"], cp=2, slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(2, 1, 1, A2A, DROPOUT, FAMILIES["llama"], DOCUMENTS, cp=2, slices=2, columns=2, sequence_parallel=True),
    case(1, 2, 1, FAMILIES["qwen3"], cp=2, schedule="paired", zero_stage=2, recompute_granularity="selective"),
    case(1, 1, 2, EXPERTS, cp=2, ep=4, slices=2),
    case(1, 1, 1, A2A, FAMILIES["mixed"], cp=4, slices=3, loss_scale=2.0**12),
    # multi-token prediction
    case(1, 1, 2, DEPTHS, UNTIED, DOCUMENTS, slices=3, zero_stage=2, bucket_size=1),
    case(2, 1, 1, DEPTH, FAMILIES["llama"], DROPOUT, slices=2, sequence_parallel=True, recompute_granularity="full"),
    case(1, 2, 2, DEPTHS, UNTIED, DROPOUT, schedule="zb-h1", slices=2, recompute_granularity="selective"),
    case(2, 2, 1, DEPTHS, schedule="zb-v", slices=2, zero_stage=0, loss_scale=2.0**12, num_layers=4),
    case(1, 2, 1, DEPTHS, DOCUMENTS, DROPOUT, cp=2, slices=2), case(2, 1, 2, DEPTH, EXPERTS, ep=2, slices=2),
    case(1, 2, 2, DEPTH, UNTIED, schedule="paired", zero_stage=2, slices=2),
    # a sliding window
    case(1, 1, 1, WINDOW, DROPOUT, DEPTHS, DOCUMENTS),
    case(2, 1, 1, WINDOW, DROPOUT, FAMILIES["llama"], sequence_parallel=True, recompute_granularity="full", columns=2),
    case(1, 1, 1, WINDOW, FAMILIES["llama"], cp=2, full_attention_layers=2),
    case(1, 1, 1, WINDOW, A2A, DOCUMENTS, DROPOUT, DEPTHS, cp=2),
    case(1, 1, 1, WINDOW, FAMILIES["llama"], DOCUMENTS, DROPOUT, cp=2, slices=3, recompute_granularity="selective"),
    case(2, 2, 1, WINDOW, FAMILIES["llama"], schedule="zb-v", full_attention_layers=1, slices=2),
    case(1, 2, 1, WINDOW, A2A, DEPTHS, DOCUMENTS, cp=2, schedule="zb-v"),
    case(1, 1, 1, WINDOW, EXPERTS, DOCUMENTS, cp=4),
]


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run, so that collecting the tests stays quick."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (all_pairs() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    """Compare whole training steps, so that a wrong shard, sum, division or mask anywhere shows."""
    check_against_reference(pool, tiny(world_size, **options), STEPS)


def evaluate_rank(config, weights, corpora):
    """Return the loss, tokens and windows of several corpora's validations, over one global batch and over all."""
    mesh, _, _, stage = build(config, weights)
    validation_sets = [TokenDataset(corpus, "valid", config.seq_length, 0, mesh.device) for corpus in corpora]
    return [value for data in validation_sets for whole in (False, True)
            for value in train.evaluate(stage, data, config, mesh, whole)]


@pytest.mark.parametrize("world_size, options", [
    (1, {}), (4, dict(pipeline_model_parallel_size=2)), (4, dict(tensor_model_parallel_size=2))],
    ids=["one", "pp2-dp2", "tp2-dp2"])
def test_validation_is_the_mean_over_the_first_windows_as_they_are_stored(pool, tmp_path, world_size, options):
    """Every token counts once: of 5 windows, which do not fill a global batch of 12, and of 20, which leave the second
    batch incomplete."""
    config = tiny(world_size, global_batch_size=12, **options)
    weights = random_weights(config, seed=3)
    generator, corpora, expected = np.random.default_rng(0), [], []
    for windows in (5, 20):
        row = generator.integers(0, config.vocab_size, windows * config.seq_length + 3).astype("<u2")
        (tmp_path / str(windows)).mkdir()
        row.tofile(tmp_path / str(windows) / "valid.bin")
        corpora.append(Corpus(tmp_path / str(windows), "byte", config.vocab_size, 0, row.dtype, {"valid": len(row)}, {},
                              0.0, 0.0, {}))
        stored = torch.from_numpy(row.astype("int64"))
        for used in (min(windows, config.global_batch_size), windows):
            tokens, labels = (stored[first:first + used * config.seq_length].view(used, -1) for first in (0, 1))
            data = FixedData(tokens[None], labels[None], torch.ones(1, *labels.shape))
            expected += plain_evaluation(config, weights, data, 1), labels.numel(), used
    for found in pool.run(evaluate_rank, config, weights, corpora, world_size=world_size):
        assert relative(found, expected) < 1e-9
