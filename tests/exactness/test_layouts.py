"""Every layout computes what one plain process computes: losses, every gradient, norms, weights, to 1e-9 in float64.

The other side is support/reference.py: torch.nn, nothing of nanodomino. Biases are not zero, the loss mask is uneven,
the clipping bites, layers do not divide by stages, samples not by slices, words not by ranks.
"""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from support.harness import FAMILIES, build, check_against_reference, relative, sizes_of, tiny
from support.reference import ReferenceGPT, masked_loss, random_weights

import train
from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES

TOLERANCE = 1e-9
STEPS = 2                # the second step sees the weights and moments that the first step wrote
LAYOUTS = [(tp, pp, dp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for dp in (1, 2, 4, 8) if tp * pp * dp <= 8]
SMALL = [layout for layout in LAYOUTS if math.prod(layout) <= 4]
OPTIONS = dict(slices=(1, 2, 3), columns=(1, 2), zero=(0, 1, 2), schedule=tuple(SCHEDULES), untied=(False, True),
               normalization=tuple(NORMALIZATIONS), recompute_granularity=tuple(GRANULARITIES),
               loss_scale=(None, 2.0**12), sequence_parallel=(False, True), family=tuple(FAMILIES),
               documents=(False, True))


def case(tp, pp, dp, slices=1, columns=1, zero=1, schedule="1f1b", untied=False, exhaustive=False, family="gpt2",
         documents=False, **more):
    """Return a test case for a layout and its options, with a readable name."""
    name = f"tp{tp}-pp{pp}-dp{dp}-slices{slices}-columns{columns}-zero{zero}-{schedule}"
    name += f"-{'untied' if untied else 'tied'}-{family}{'-documents' * documents}"
    name += "".join(f"-{key}{value}" for key, value in more.items())
    groups = {"num_query_groups": 8} if tp == 8 else {}
    resets = dict(reset_position_ids=documents, reset_attention_mask=documents)
    options = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, slices=slices, columns=columns,
                   zero_stage=zero, schedule=schedule, untie_embeddings_and_output_weights=untied,
                   **{"num_layers": 2 * pp + 1} | FAMILIES[family] | groups | resets | more)
    return pytest.param(tp * pp * dp, options, id=name, marks=pytest.mark.exhaustive if exhaustive else [])


def pairs_of(row: dict) -> set:
    return set(itertools.combinations(row.items(), 2))


def in_all_pairs(options: dict):
    """Yield rows with a value of each option, such that any two values of two options meet in some row.

    A bug that needs two options at once then shows in some row. Greedy: each row is the best of 200 random rows.
    """
    draw = random.Random("layouts")
    left = {((name, value), (other, its_value)) for name, other in itertools.combinations(options, 2)
            for value in options[name] for its_value in options[other]}
    while left:
        best = max(({name: draw.choice(values) for name, values in options.items()} for _ in range(200)),
                   key=lambda row: len(left & pairs_of(row)))
        left -= pairs_of(best)
        yield best


def dealt(rows: list[dict], layouts, **more) -> list:
    """Return a case for each row of options. The layouts take turns. A step has two to eight microbatches."""
    return [case(*layout, **row, **more, micro_batch_size={8: 12, 4: 6}.get(layout[0], 3),
                 global_batch_size=12 if max(layout[1:]) <= 2 and layout[0] * layout[2] <= 4 else 24)
            for row, layout in zip(rows, itertools.cycle(layouts))]


# By default 10 rows of the table of pairs, which hold each value of each option and each small layout at least once,
# then each schedule and corners of their own.
TEN_ROWS = list(itertools.islice(in_all_pairs(OPTIONS), 10))
CASES = dealt(TEN_ROWS, [layout for layout in SMALL if layout != (1, 1, 1)])
CASES += [case(1, 4, 1, schedule=name, num_layers=4 * SCHEDULES[name].chunks[0] + 1) for name in SCHEDULES]
CASES += [
    case(1, 1, 1, slices=3, micro_batch_size=6),
    case(2, 2, 2, slices=2, zero=1, global_batch_size=12),      # train.py's own choice for eight processes
    case(2, 1, 1, slices=2, columns=3, micro_batch_size=8),     # 8 samples in 2 slices, 16 features in 3 columns
    *(case(1, 4, 1, micro_batch_size=24, schedule=name, exhaustive=name != "zb-v")
      for name in SCHEDULES),                                   # 1 microbatch, 4 stages
    # 3 microbatches: a round of 1
    case(1, 2, 2, schedule="interleaved", virtual_stages=3, micro_batch_size=4, num_layers=7),
    # chunks share buckets, which microbatches of both then fill in turn
    case(1, 2, 2, slices=2, zero=2, schedule="interleaved", exhaustive=True),
    case(1, 2, 2, slices=2, zero=2, schedule="zb-v", bucket_size=1, global_batch_size=12),
    case(2, 1, 2, slices=2, bucket_size=10_000_000, exhaustive=True),       # everything in one bucket of each kind
    case(2, 1, 2, slices=2, bucket_size=1, global_batch_size=12),           # every parameter in a bucket of its own
    case(2, 2, 1, slices=2, clip_grad=0.0, global_batch_size=12),           # no clipping
]
CASES += [
    case(2, 2, 2, slices=3, columns=2, zero=0, untied=True, exhaustive=True),
    case(1, 4, 2, micro_batch_size=6, exhaustive=True),                          # 2 microbatches, 4 stages
    # half of the ranks own only padding
    case(4, 2, 1, slices=2, micro_batch_size=12, make_vocab_size_divisible_by=64, exhaustive=True),
]


def all_pairs() -> list:
    """Return the exhaustive cases: all pairs of options, with the layout as one more option."""
    cases = dealt(TEN_ROWS, [layout for layout in LAYOUTS if layout[1] == 1], exhaustive=True)
    for row in in_all_pairs(OPTIONS | {"layout": tuple(layout for layout in LAYOUTS if layout[1] > 1)}):
        layout = row.pop("layout")
        cases += dealt([row], [layout], exhaustive=True)
    return cases


def pytest_generate_tests(metafunc):
    """Compute the exhaustive cases only if they will run, so that collecting the tests stays quick."""
    if metafunc.function is test_training_equals_one_plain_process:
        metafunc.parametrize("world_size, options", CASES + (all_pairs() if metafunc.config.exhaustive else []))


def test_training_equals_one_plain_process(pool, world_size, options):
    """Compare whole training steps, so that a wrong shard, sum, division or mask anywhere shows."""
    check_against_reference(pool, tiny(world_size, **options), STEPS, tolerance=TOLERANCE)


def evaluate_rank(config, weights, corpora):
    """Return the validation losses of several corpora, each over one global batch and over all of it."""
    mesh, _, _, stage = build(config, weights)
    validation_sets = [train.dataset_builder(config, corpus, mesh.device)["valid"] for corpus in corpora]
    return [train.evaluate(stage, data, dataclasses.replace(config, eval_iters=count), mesh)
            for data in validation_sets for count in (1, 9)]


@pytest.mark.parametrize("world_size, options", [
    (1, {}), (4, dict(pipeline_model_parallel_size=2)), (4, dict(tensor_model_parallel_size=2))],
    ids=["one", "pp2-dp2", "tp2-dp2"])
def test_validation_is_the_mean_over_the_first_windows_as_they_are_stored(pool, tmp_path, world_size, options):
    """Every token counts once: of 5 windows, which do not fill a global batch of 12, and of 20, which leave the second
    batch incomplete."""
    config = tiny(world_size, global_batch_size=12, **options)
    weights = random_weights(sizes_of(config), seed=3)
    model, generator = ReferenceGPT(sizes_of(config)).double().load_full(weights), np.random.default_rng(0)
    corpora, expected = [], []
    for windows in (5, 20):
        folder = tmp_path / str(windows)
        folder.mkdir()
        rows = {split: generator.integers(0, config.vocab_size, windows * config.seq_length + 3).astype("<u2")
                for split in ("train", "valid")}
        for split, row in rows.items():
            row.tofile(folder / f"{split}.bin")
        sizes = {split: len(row) for split, row in rows.items()} | {"test": 0}
        corpora.append(Corpus(folder, "byte", config.vocab_size, 0, np.dtype("<u2"), sizes, {}, 0.0, 0.0, {}))
        stored = torch.from_numpy(rows["valid"].astype("int64"))
        for used in (min(windows, config.global_batch_size), windows):
            tokens, labels = (stored[first:first + used * config.seq_length].view(used, -1) for first in (0, 1))
            with torch.no_grad():
                logits = model(tokens, torch.arange(config.seq_length))
            expected.append(float(masked_loss(logits, labels, torch.ones_like(labels).double())))
    for found in pool.run(evaluate_rank, config, weights, corpora, world_size=world_size):
        assert relative(found, expected) < TOLERANCE
