"""The loss scale of fp16 adapts and survives a stop, and 16-bit training deviates by its rounding alone."""

import dataclasses
import math

import pytest
import torch
from support.fake_world import fake_world
from support.runs import make_corpus, metric_points, train_in_pool
from support.harness import (build, difference, full_tensors, random_data, relative, tiny, train_rank,
                             weights_and_data)

import train
from nanodomino.layers.cross_entropy import max_and_sum_exp_of_rows, scaled_exp_of_rows
from nanodomino.layers.sublayers import NORMALIZATIONS
from nanodomino.optim.optimizers import LossScale


# ---- how the scale adapts

def fp16_scale(**settings) -> LossScale:
    return LossScale(tiny(1, **dict(dtype="float16") | settings))


def scales_of(pattern: str, stops=False, **settings) -> list[float]:
    """Return the scale of each step, and after the last one, for steps that overflow (x) or do not (.). With `stops`,
    each step is a run of its own, which restores what the previous one saved."""
    scale = fp16_scale(**settings)
    values = [scale.value]
    for step in pattern:
        scale.update(overflow=step == "x")
        if stops:
            state, scale = scale.state(), fp16_scale(**settings)
            scale.restore(state)
        values.append(scale.value)
    return values


@pytest.mark.parametrize("hysteresis, pattern, expected", [
    (2, "x.x.x", [8, 8, 8, 4, 4, 2]), (2, "xx...xx", [8, 8, 4, 4, 4, 8, 8, 4]), (2, "x...xx", [8, 8, 8, 8, 16, 16, 8]),
    (3, "xxxx", [8, 8, 8, 4, 2]), (1, "xxxxxx", [8, 4, 2, 1, 0.5, 0.5, 0.5]),
    (1, "...x..x......", [8, 8, 8, 16, 8, 8, 8, 4, 4, 4, 8, 8, 8, 16])])
@pytest.mark.parametrize("stops", [False, True])
def test_the_first_overflows_are_tolerated_and_a_doubling_restores_the_patience(hysteresis, pattern, expected, stops):
    """As in Megatron-LM: overflows need not be consecutive, and once patience is used up, each halves the scale. A
    resumed run has the same scale, patience and count of good steps."""
    assert scales_of(pattern, stops, hysteresis=hysteresis, loss_scale_window=3, initial_loss_scale=8.0,
                     min_loss_scale=0.5) == expected


@pytest.mark.parametrize("settings, value", [
    (dict(dtype="float32"), 1.0), (dict(dtype="bfloat16", initial_loss_scale=8.0), 1.0),
    (dict(dtype="float16", loss_scale=64.0), 64.0)])
def test_a_fixed_scale_never_changes(settings, value):
    assert set(scales_of(10 * "x" + 3000 * ".", **settings)) == {value}
    scale = fp16_scale(**settings)
    scale.restore(dict(value=32.0, good_steps=2, patience=2))
    assert scale.value == value and scale.state() is None


def test_it_never_leaves_fp32():
    """If all gradients are zero, no step overflows until the scale is infinite: 0 x infinity is NaN."""
    assert max(scales_of(3000 * ".", loss_scale_window=1)) == 2.0**127


def test_settings_override_the_scale_of_a_checkpoint():
    """A checkpoint of a run in another type has no scale."""
    scale = fp16_scale(initial_loss_scale=128.0, min_loss_scale=64.0, hysteresis=1)
    scale.restore(None)
    assert scale.value == 128.0
    scale.restore(dict(value=32.0, good_steps=2, patience=2))
    assert scale.state() == dict(value=64.0, good_steps=2, patience=1)


# ---- skipped steps

@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_the_number_of_skipped_steps_that_do_not_count_as_failures(hysteresis):
    """hysteresis - 1 + log2(scale / smallest scale)."""
    scale = fp16_scale(hysteresis=hysteresis, initial_loss_scale=2.0**32)
    excused = [scale.update(overflow=True) for _ in range(60)]
    assert excused.index(False) == sum(excused) == hysteresis - 1 + 32 and scale.value == 1.0


@pytest.mark.parametrize("settings, advice", [
    (dict(initial_loss_scale=2.0**40, min_loss_scale=2.0**40), "try a smaller --min-loss-scale than 1.09951e+12, or "),
    (dict(loss_scale=2.0**40), "try a smaller --loss-scale than 1.09951e+12, or "),
    ({}, ""), (dict(loss_scale=1.0), "")])
def test_a_scale_that_is_too_large_and_cannot_shrink_is_named(settings, advice):
    assert fp16_scale(**settings).advice() == advice


def test_a_loss_that_is_not_finite_counts_as_a_failure():
    """The loss is never scaled, so the scale stays."""
    config, bad, counts = tiny(1, dtype="float16", hysteresis=1, initial_loss_scale=64), (2, 4, 5), []
    data = random_data(config, 6)
    for step in bad:
        data.loss_mask[step - 1] = math.nan
    with fake_world(0, 1):
        mesh, _, optimizer, stage = build(config)
        for step in range(1, 7):
            result = train.train_step(step, stage, optimizer, data, config, mesh)
            assert (result.loss_scale, result.skipped) == (64.0, step in bad)
            counts.append(optimizer.skipped_in_a_row)
    assert counts == [0, 1, 0, 1, 2, 0]


def test_a_run_in_three_launches_finds_its_scale_and_skips_on_the_way_do_not_end_it(pool, tmp_path):
    """It starts at 2^40 and skips many more steps than --max-skipped-steps; metrics and output show each of them."""
    make_corpus(tmp_path)
    for _ in range(3):
        ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--fp16", "--tp", 2, "--train-iters", 36,
                              "--num-layers", 1, "--micro-batch-size", 16, "--max-skipped-steps", 3, "--log-interval",
                              1, "--initial-loss-scale", 2.0**40, "--loss-scale-window", 3, "--exit-interval", 12,
                              world_size=2)
        assert ended.code == 0, ended.output
        assert ("| skipped, because the " in ended.output) and "| loss scale " in ended.output
    scales, skipped = ([value for _, value in metric_points(tmp_path / "run", name)]
                       for name in ("loss_scale", "skipped"))
    pattern = "".join("x" if step else "." for step in skipped)
    assert pattern.startswith(20 * "x") and "..." in pattern and len(pattern) == 36
    assert scales == scales_of(pattern, initial_loss_scale=2.0**40, loss_scale_window=3)[:-1]


# ---- the numbers

RMS_NORM = dict(normalization="RMSNorm", fp16_lm_cross_entropy=True)           # the latter is for float16 alone
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
CUT = dict(tensor_model_parallel_size=2, slices=2, sequence_parallel=True, micro_batch_size=12)
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}        # of one operation, of its result


@pytest.mark.parametrize("world_size, layout, options", [
    (1, dict(micro_batch_size=12), RMS_NORM), (2, CUT, DROPOUT),
    pytest.param(8, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, micro_batch_size=6),
                 RMS_NORM, marks=pytest.mark.exhaustive)])
def test_16_bit_training_deviates_from_float64_in_proportion_to_its_rounding(pool, world_size, layout, options):
    """Small errors add up linearly. fp16 rounds 2^13 times as coarsely as fp32 (bfloat16: 2^16), so it deviates from
    float64 2^13 times as far as the measured fp32. Errors are random, so three times that is allowed."""
    weights, data = weights_and_data(tiny(1, normalization=options.get("normalization", "LayerNorm")), 4)
    sides = {}
    for dtype in ("float64", *ROUNDING):
        config = tiny(world_size, **layout, **options, dtype=dtype, lr=1e-3, loss_scale=2.0**10)
        outcomes = pool.run(train_rank, config, weights, data, 4, world_size=world_size)
        gradients = full_tensors(outcomes, lambda outcome: outcome.gradients[0])
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        sides[dtype] = outcomes[0].losses, outcomes[0].norms, gradients
    off = {dtype: [distance(one, exact) / ROUNDING[dtype]
                   for distance, one, exact in zip((relative, relative, difference), sides[dtype], sides["float64"])]
           for dtype in ROUNDING}
    for dtype in ("bfloat16", "float16"):
        for ours, theirs in zip(off[dtype], off["float32"]):
            assert 0 < ours < 3 * theirs


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_sums_over_tokens_may_exceed_the_range_of_fp16(pool, normalization):
    """One token's gradient fits. Here all tokens are the same, so that their gradients add up."""
    config = tiny(1, dtype="float16", micro_batch_size=24, loss_scale=2.0**13, normalization=normalization)
    weights, data = weights_and_data(config, 1)
    data = dataclasses.replace(data, tokens=data.tokens[:, :1].expand_as(data.tokens),
                               labels=data.labels[:, :1].expand_as(data.labels),
                               loss_mask=torch.ones_like(data.loss_mask))
    (outcome,) = pool.run(train_rank, config, weights, data, 1, world_size=1)
    assert math.isfinite(outcome.norms[0])
    sums = [gradient * data.loss_mask.sum() * 2.0**13 for gradient, _ in outcome.gradients[0].values()]
    assert sum(float(one.abs().max()) > 65504 for one in sums) >= len(sums) - 2, "or this shows nothing"


@pytest.mark.parametrize("narrow", [False, True])
def test_a_narrow_cross_entropy_rounds_each_exponential_but_no_sum(narrow):
    """fp16 rounds exp(-9) by 2e-4 of its value. A sum in fp16 would stay at 1."""
    logits, exponential, factor = torch.full((1, 60001), -9.0).half(), torch.tensor(-9.0), torch.tensor(8.01)
    logits[0, 0] = 0.0
    exponential = (exponential.half() if narrow else exponential).exp()
    largest, sum_exp = max_and_sum_exp_of_rows(logits, narrow)
    torch.testing.assert_close(sum_exp, 1.0 + 60000 * exponential.float()[None], rtol=1e-5, atol=0)
    scaled_exp_of_rows(logits, largest, factor[None], narrow)
    assert logits[0, 1] == (exponential * factor.to(exponential.dtype)).half()
