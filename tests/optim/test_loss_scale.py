"""Loss scaling in fp16: it adapts as torch's GradScaler does, changes no bit, and survives a stop."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from support.jobs import make_corpus
from support.harness import (build, difference, full_tensors, random_data, relative, sizes_of, tiny, train_rank,
                             weights_and_data)
from support.reference import random_weights
from support.train_in_pool import metric_points, train_in_pool
from torch.utils._python_dispatch import TorchDispatchMode

import train
from nanodomino.checkpoint.find_checkpoints import checkpoints_of
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.layers.cross_entropy import max_and_sum_exp_of_rows, scaled_exp_of_rows
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.optim.loss_scale import LossScale, is_valid_state

BOX = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, micro_batch_size=12)


def scales_of(pattern: str, **settings) -> list[float]:
    """Return the scale of each step, and after the last one, for steps that overflow (x) or do not (.)."""
    scale = LossScale(tiny(1, **dict(dtype="float16") | settings))
    values = [scale.value]
    for step in pattern:
        scale.update(overflow=step == "x")
        values.append(scale.value)
    return values


# ---- how the scale adapts

def scales_of_torch(pattern: str, window: int) -> list[float]:
    """The same for torch.amp.GradScaler, which has neither hysteresis nor a smallest scale."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=window)
    values = []
    for step in pattern:
        scaler.scale(weight.sum()).backward()
        values.append(scaler.get_scale())
        weight.grad.fill_(math.inf if step == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [*values, scaler.get_scale()]


PATTERNS = ["...........", "xxxxx", ".x..x...x....x", "..x..x..x", "xx......xx......", ".........x.........xx"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_with_a_hysteresis_of_one_it_adapts_as_torchs(pattern, window):
    assert scales_of(pattern, hysteresis=1, loss_scale_window=window) == scales_of_torch(pattern, window)


@pytest.mark.parametrize("hysteresis, pattern, expected", [
    (2, "x.x.x", [8, 8, 8, 4, 4, 2]), (2, "xx...xx", [8, 8, 4, 4, 4, 8, 8, 4]), (2, "x...xx", [8, 8, 8, 8, 16, 16, 8]),
    (3, "xxxx", [8, 8, 8, 4, 2]), (1, "xxxxxx", [8, 4, 2, 1, 0.5, 0.5, 0.5])])
def test_the_first_overflows_are_tolerated_and_a_doubling_restores_the_patience(hysteresis, pattern, expected):
    """As in Megatron-LM: overflows need not be consecutive, and once patience is used up, each halves the scale."""
    assert scales_of(pattern, hysteresis=hysteresis, loss_scale_window=3, initial_loss_scale=8.0,
                     min_loss_scale=0.5) == expected


@pytest.mark.parametrize("settings, value", [
    (dict(dtype="float32"), 1.0), (dict(dtype="bfloat16", initial_loss_scale=8.0), 1.0),
    (dict(dtype="float16", loss_scale=64.0), 64.0)])
def test_a_fixed_scale_never_changes(settings, value):
    assert set(scales_of(10 * "x" + 3000 * ".", **settings)) == {value}
    assert LossScale(tiny(1, **settings)).state() is None


def test_it_never_leaves_fp32():
    """If all gradients are zero, no step overflows until the scale is infinite: 0 x infinity is NaN."""
    assert max(scales_of(3000 * ".", loss_scale_window=1)) == 2.0**127


@pytest.mark.parametrize("hysteresis", [1, 2, 5])
def test_the_number_of_skipped_steps_that_do_not_count_as_failures(hysteresis):
    """hysteresis - 1 + log2(scale / smallest scale)."""
    scale = LossScale(tiny(1, dtype="float16", hysteresis=hysteresis, initial_loss_scale=2.0**32))
    excused = [scale.update(overflow=True) for _ in range(60)]
    assert excused.index(False) == sum(excused) == hysteresis - 1 + 32 and scale.value == 1.0


# ---- in a training

def scales_rank(config, weights, data, bad):
    """Return (scale, skipped) of each step, and whether weights changed between each two steps. For each (step, rank)
    in `bad`, one of the rank's gradients is infinite."""
    mesh, model, optimizer, stage = build(config, weights)
    rank, reduce, now, found, held = torch.distributed.get_rank(), optimizer.reduce, 0, [], []

    def poisoned(bucket):
        if (now, rank) in bad:
            bucket.view(bucket.parameters[0], bucket.main_grad).view(-1)[0] = math.inf
        reduce(bucket)

    optimizer.reduce = poisoned
    for now in range(1, data.tokens.size(0) + 1):
        result = train.train_step(now, stage, optimizer, data, config, mesh)
        found.append((result.loss_scale, result.skipped))
        held.append([(bucket.weights.clone(), bucket.master.clone()) for bucket in optimizer.buckets])
    changed = [any(not torch.equal(*pair) for tensors in zip(before, after) for pair in zip(*tensors))
               for before, after in pairwise(held)]
    return found, changed


def test_in_training_it_adapts_as_torchs(pool):
    pattern = "..x...x.."
    config = tiny(1, dtype="float16", hysteresis=1, loss_scale_window=2, initial_loss_scale=2.0**12, train_iters=20,
                  micro_batch_size=12)
    weights = random_weights(sizes_of(config), seed=3)
    bad = [(step, 0) for step, letter in enumerate(pattern, start=1) if letter == "x"]
    ((found, _),) = pool.run(scales_rank, config, weights, random_data(config, len(pattern)), bad, world_size=1)
    assert [skipped for _, skipped in found] == [letter == "x" for letter in pattern]
    assert [8 * scale for scale, _ in found] == scales_of_torch(pattern, window=2)[:-1]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("layout", [
    pytest.param(dict(tensor_model_parallel_size=4, micro_batch_size=6), marks=pytest.mark.exhaustive),
    pytest.param(dict(pipeline_model_parallel_size=4), marks=pytest.mark.exhaustive), dict(data_parallel_size=4),
    dict(data_parallel_size=4, zero_stage=0), BOX],
    ids=["tp", "pp", "dp", "dp-zero0", "tp-pp"])
def test_if_one_rank_overflows_all_ranks_skip_the_step_and_halve_the_scale(pool, layout, rank):
    """No weight or master weight of any rank changes in that step."""
    config = tiny(4, dtype="float16", hysteresis=1, initial_loss_scale=2.0**10, num_layers=4, **layout)
    weights = random_weights(sizes_of(config), seed=3)
    outcomes = pool.run(scales_rank, config, weights, random_data(config, 4), [(2, rank)], world_size=4)
    for found, changed in outcomes:
        assert found == [(1024.0, False), (1024.0, True), (512.0, False), (512.0, False)]
        assert changed == [False, True, True]


@pytest.mark.parametrize("dtype, world_size, layout", [
    ("bfloat16", 1, dict(micro_batch_size=12)), ("float32", 4, BOX), *[
    pytest.param(*one, marks=pytest.mark.exhaustive)
    for one in (("float32", 1, {}), ("bfloat16", 4, BOX), ("float64", 4, BOX))]])
def test_a_power_of_two_changes_no_bit(pool, dtype, world_size, layout):
    """As long as nothing over- or underflows. A scale of 3 rounds differently; otherwise this would show nothing."""
    weights, data = weights_and_data(tiny(1), 2)
    runs = {scale: pool.run(train_rank, tiny(world_size, dtype=dtype, loss_scale=scale, **layout), weights, data, 2,
                            world_size=world_size)
            for scale in (None, 2.0**12, 3.0)}
    for scale, same in ((2.0**12, True), (3.0, False)):
        for ours, theirs in zip(runs[scale], runs[None]):
            assert (ours.norms == theirs.norms) is same
            assert ours.losses == theirs.losses or not same
            assert all(torch.equal(ours.weights[name][0], theirs.weights[name][0]) for name in ours.weights) is same


EIGHT, DROPPING = BOX | dict(data_parallel_size=2, micro_batch_size=6), dict(hidden_dropout=0.1, attention_dropout=0.1)
NARROW = dict(normalization="RMSNorm", fp16_lm_cross_entropy=True)
CUT = dict(tensor_model_parallel_size=2, slices=2, sequence_parallel=True, micro_batch_size=12)
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}        # of one operation, of its result


@pytest.mark.parametrize("world_size, layout, options", [
    (1, dict(micro_batch_size=12), NARROW), (2, CUT, DROPPING),
    *[pytest.param(*one, marks=pytest.mark.exhaustive)
      for one in ((1, {}, DROPPING), (8, EIGHT, DROPPING), (8, EIGHT, NARROW))]])
def test_16_bit_training_deviates_from_float64_in_proportion_to_its_rounding(pool, world_size, layout, options):
    """Small errors add up linearly. fp16 rounds 2^13 times as coarsely as fp32 (bfloat16: 2^16), so it deviates from
    float64 2^13 times as far as the measured fp32. Errors are random, so three times that is allowed; sums in 16 bit
    would be far beyond."""
    weights, data = weights_and_data(tiny(1), 4)
    names = [name for name in weights if "RMSNorm" not in options.values() or not name.endswith("norm.bias")]
    sides = {}
    for dtype in ("float64", *ROUNDING):
        narrow = dtype == "float16" and "fp16_lm_cross_entropy" in options
        config = tiny(world_size, **layout, **options | dict(fp16_lm_cross_entropy=narrow), dtype=dtype, lr=1e-3,
                      loss_scale=2.0**10)
        outcomes = pool.run(train_rank, config, {name: weights[name] for name in names}, data, 4, world_size=world_size)
        gradients = full_tensors(outcomes, lambda outcome: outcome.gradients[0])
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        sides[dtype] = outcomes[0].losses, outcomes[0].norms, gradients
    off = {dtype: [distance(one, exact) / ROUNDING[dtype]
                   for distance, one, exact in zip((relative, relative, difference), sides[dtype], sides["float64"])]
           for dtype in ROUNDING}
    for dtype in ("bfloat16", "float16"):
        for ours, theirs in zip(off[dtype], off["float32"]):
            assert 0 < ours < 3 * theirs


# ---- what fp16 can hold

def gradients_rank(config, weights, data):
    """Run one step; return whether it was skipped, and the accumulated gradients by name."""
    mesh, model, optimizer, stage = build(config, weights)
    seen, sum_over_world = {}, optimizer.sum_over_world

    def look(*arguments):
        seen.update({name: weight.main_grad.clone() for name, weight in model.named_parameters()})
        return sum_over_world(*arguments)

    optimizer.sum_over_world = look
    return train.train_step(1, stage, optimizer, data, config, mesh).skipped, seen


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_sums_over_tokens_may_exceed_the_range_of_fp16(pool, normalization):
    """In the gradients of words, positions, norms, biases and matrices. One token's gradient fits; here all tokens are
    the same, so that their gradients add up."""
    config = tiny(1, dtype="float16", micro_batch_size=24, loss_scale=2.0**13, normalization=normalization)
    weights, data = weights_and_data(tiny(1), 1)
    data = dataclasses.replace(data, tokens=data.tokens[:, :1].expand_as(data.tokens),
                               labels=data.labels[:, :1].expand_as(data.labels),
                               loss_mask=torch.ones_like(data.loss_mask))
    names = [name for name in weights if normalization == "LayerNorm" or not name.endswith("norm.bias")]
    ((skipped, found),) = pool.run(gradients_rank, config, {name: weights[name] for name in names}, data, world_size=1)
    assert not skipped
    assert sum(float(gradient.abs().max()) > 65504
               for gradient in found.values()) >= len(found) - 2, "or this shows nothing"


def test_each_exponential_of_a_narrow_cross_entropy_is_rounded_and_no_sum_is():
    """Rounding is u = 2^-11. The distance d to the largest logit is rounded, which changes exp(-d) by d u of its value;
    rounding the exponential adds u. The product with the factor, which is rounded too, adds 2 u."""
    logits = (6 * torch.randn(16, 3000, generator=torch.Generator().manual_seed(1))).half()
    exact, rounding, least = logits.double(), 2.0**-11, 2.0**-25              # least: half of the smallest fp16 number
    distance = exact.amax(dim=-1, keepdim=True) - exact
    terms = torch.exp(-distance)
    allowed = 1.01 * ((distance + 1) * rounding * terms + least).sum(dim=-1)
    off = {}
    for narrow in (False, True):
        largest, sums = max_and_sum_exp_of_rows(logits, narrow)
        assert largest.dtype == sums.dtype == torch.float32 and torch.equal(largest.double(), exact.amax(dim=-1))
        rounded = (logits - largest.to(logits.dtype if narrow else largest.dtype).unsqueeze(-1)).exp().double()
        torch.testing.assert_close(sums.double(), rounded.sum(dim=-1), rtol=1e-6, atol=0)      # fp32's rounding alone
        off[narrow] = (sums.double() - terms.sum(dim=-1)).abs()
        factor, gradient = torch.full_like(sums, 1000.0) / sums, logits.clone()
        scaled_exp_of_rows(gradient, largest, factor, narrow)
        bound = ((distance + 1) * narrow
                 + 2) * rounding * terms * factor.unsqueeze(-1) * 1.01 + least * (1 + factor.unsqueeze(-1))
        assert ((gradient.double() - terms * factor.double().unsqueeze(-1)).abs() <= bound).all()
    assert (off[True] <= allowed).all() and (off[False] <= 1e-6 * terms.sum(dim=-1)).all()
    assert off[True].mean() > 10 * off[False].mean()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest fp32 tensor that an operation returns."""
    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **options or {})
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("narrow", [False, True])
def test_a_narrow_cross_entropy_has_no_wide_temporary(narrow):
    logits = torch.randn(16, 300).half()
    with Largest() as largest:
        maximum, sums = max_and_sum_exp_of_rows(logits, narrow)
        scaled_exp_of_rows(logits, maximum, 1.0 / sums, narrow)
    assert largest.elements == (16 if narrow else 16 * 300)


# ---- a run

def test_a_run_finds_its_scale_and_steps_skipped_on_the_way_do_not_end_it(pool, tmp_path):
    """It starts at 2^40 and skips many more steps than --max-skipped-steps; metrics and output show each of them.
    With seed 2 no later gradient is so much larger than the first that fits that it overflows."""
    make_corpus(tmp_path)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--fp16", "--tp", 2, "--micro-batch-size", 16,
                          "--train-iters", 30, "--seed", 2, "--max-skipped-steps", 3, "--initial-loss-scale", 2.0**40,
                  "--log-interval", 1, "--sample-tokens", 3, world_size=2)
    assert ended.code == 0, ended.error
    scales = metric_points(tmp_path / "run", "loss_scale")
    skipped = [skipped for _, skipped in metric_points(tmp_path / "run", "skipped")]
    first = skipped.index(False)
    assert 20 < first < 30 and skipped == first * [True] + (30 - first) * [False]
    assert [scale for _, scale in scales] == [2.0**40] + [2.0**(40 - step)
                                                          for step in range(first)] + [2.0**(41 - first)] * (29 - first)
    assert "step     1 | skipped: loss" in ended.output and "| loss scale 1.09951e+12\n" in ended.output
    assert f"| loss scale {scales[-1][1]:g}\n" in ended.output


@pytest.mark.parametrize("flags, fix", [(("--initial-loss-scale", 2.0**40, "--min-loss-scale", 2.0**40),
                                         "min-loss-scale"), (("--loss-scale", 2.0**40), "loss-scale")])
def test_a_run_whose_scale_cannot_shrink_ends_after_too_many_skipped_steps(pool, tmp_path, flags, fix):
    make_corpus(tmp_path)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--fp16", "--train-iters", 40,
                          "--max-skipped-steps", 3, *flags)
    assert ended.code is None and ended.error.startswith(
        "3 steps in a row, up to step 3, had a loss or gradient that is not finite; "
        f"try a smaller --{fix} than 1.09951e+12, or start from")
    assert ended.error.endswith("smaller --lr than 0.004")


def test_a_step_with_a_loss_that_is_not_finite_counts_as_a_failure(pool, tmp_path):
    """The loss is never scaled, so the scale stays."""
    make_corpus(tmp_path)
    ended = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--fp16", "--hysteresis", 1,
                          "--train-iters", 9, "--max-skipped-steps", 2, "--initial-loss-scale", 64,
                          bad_steps=[2, 4, 5, 6])
    assert ended.code is None and "2 steps in a row, up to step 5, had a loss" in ended.error
    assert {scale for _, scale in metric_points(tmp_path / "run", "loss_scale")} == {64.0}


@pytest.mark.parametrize("at_once", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 1))])
def test_a_stopped_run_resumes_with_the_same_scale_and_patience(pool, tmp_path, at_once):
    """Wherever it stops, the same steps are skipped, with the same scales, losses and norms."""
    make_corpus(tmp_path)
    flags = ("--fp16", "--train-iters", 14, "--initial-loss-scale", 2.0**19, "--loss-scale-window", 3, "--tp", 2,
             "--micro-batch-size", 16)
    straight = train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "straight", *flags, world_size=2)
    assert straight.code == 0
    for _ in range(math.ceil(14 / at_once)):
        assert train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "stopped", *flags, "--exit-interval", at_once,
                     world_size=2).code == 0
    for name in ("loss_scale", "skipped", "loss", "grad_norm"):
        assert metric_points(tmp_path / "stopped", name) == metric_points(tmp_path / "straight", name)
    scales, skipped = ([value for _, value in metric_points(tmp_path / "straight", name)]
                       for name in ("loss_scale", "skipped"))
    assert any(old > new for old, new in pairwise(scales)) and any(old < new for old, new in pairwise(scales))
    assert not all(skipped)


def test_a_bf16_run_resumed_in_fp16_starts_with_the_initial_scale(pool, tmp_path):
    """Its checkpoints have no scale, like those of older versions. --fp16 overrides the --dtype stored in the run."""
    make_corpus(tmp_path)
    run = tmp_path / "run"
    train_in_pool(pool, tmp_path, "--run-dir", run, "--bf16", "--train-iters", 2)
    assert read_manifest(checkpoints_of(run)[0])["loss_scale"] is None
    ended = train_in_pool(pool, tmp_path, "--run-dir", run, "--fp16", "--train-iters", 4, "--initial-loss-scale", 32)
    assert ended.code == 0 and metric_points(run, "loss_scale") == [(1, 1.0), (2, 1.0), (3, 32.0), (4, 32.0)]
    assert read_manifest(checkpoints_of(run)[0])["loss_scale"] == dict(value=32.0, good_steps=2, patience=2)
    ended = train_in_pool(pool, tmp_path, "--run-dir", run, "--train-iters", 5, "--min-loss-scale", 64,
                          "--initial-loss-scale",
                  64, "--hysteresis", 1)
    assert ended.code == 0 and metric_points(run, "loss_scale")[-1] == (5,
                                                                64.0), "flags override the checkpoint"
    assert is_valid_state(read_manifest(checkpoints_of(run)[0])["loss_scale"])
