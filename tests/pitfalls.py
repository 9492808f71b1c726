"""Bugs that make distributed training go wrong without an error. Each can be put back here, measured, and found.

docs/pitfalls.md has the lesson of each bug and the code that prevents it.

    python tests/pitfalls.py 7               train five steps with and without bug 7, and compare
    python tests/pitfalls.py 7 --steps 60    train longer
    python tests/pitfalls.py --list          list all bugs
    python tests/pitfalls.py --write         measure all bugs and write the table in docs/pitfalls.md

Most bugs are a function that takes the place of a right one:

    @pitfall("Title", owner, "name", options of the tiny model)     owner.name is the right function
    def wrong(right, config, *arguments):                           the right function's arguments follow

A bug that needs several patches is a function bug(config) instead, and returns them as (object, name, replacement). The
pool's workers apply the patches, train, and undo them (support/pitfall_runner.py). tests/docs/test_pitfalls.py checks
that each bug is found, and that the code without the bug passes.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import test_domino
import test_zero
import train
from nanodomino import domino, model
from nanodomino.checkpoint import format as checkpoint_format, load, save
from nanodomino.domino import Domino
from nanodomino.layers import attention, dropout_and_positions
from nanodomino.layers.dropout_and_positions import MasksAndPositions, seeded_generator
from nanodomino.optim import buckets
from nanodomino.optim.buckets import Bucket
from nanodomino.optim.optimizers import LossScale
from nanodomino.options import context_parallel, experts, fp8
from nanodomino.options.multi_token_prediction import MultiTokenPrediction, PredictionDepths
from nanodomino.options.router import SCORE_FUNCTIONS, Router
from nanodomino.overlap import compute, slices
from nanodomino.overlap.slices import Flight, SliceOps, result_of
from nanodomino.comm.world import from_rank_0
from nanodomino.zero import ZeroOptimizer, sum_of_squares
from options.test_fp8 import check_matmuls, check_near_fp32, check_new_weights
from support import ROOT, harness
from support.checkpoints import save_steps, train_from
from support.harness import TOLERANCE, Outcome, judge, tiny, worst
from support.pitfall_runner import (CHECKED, END, LONG, TABLE, Pitfall, delayed_collectives, instead, measure, pitfall,
                                    pool_with_bug)
from support.pool import Pool

DOCUMENT = ROOT / "docs" / "pitfalls.md"
DEPTH = dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.5)
# Two microbatches a step instead of eight: most of these bugs show as well, in a third of the time.
TP, PP = (dict({f"{axis}_model_parallel_size": 2}, micro_batch_size=12) for axis in ("tensor", "pipeline"))
MORE = dict(micro_batch_size=3)                      # eight microbatches, whose two slices are uneven
EVEN = dict(micro_batch_size=4)                      # both slices get the same number of samples


# ---- conditions

LATE, EARLY = (partial(delayed_collectives, when) for when in ("late", "early"))


def one_bad_number(config):
    """In the first step, put an infinity into the last tensor-parallel rank's copy of a replicated gradient. The norm
    counts rank 0's copy, which is finite."""
    steps = []

    def poisoned(finish, config, optimizer):
        finish(optimizer)
        steps.append(1)
        if len(steps) == 1 and optimizer.mesh.tp_rank == config.tp - 1:
            next(bucket for bucket in optimizer.buckets if not bucket.kind.shards).own_grad[0] = math.inf
    return [instead(ZeroOptimizer, "finalize_gradients", poisoned, config)]


def one_bad_number_and_a_dynamic_scale(config):
    """Put in the same infinity, and use a dynamic loss scale, as in fp16."""
    def dynamic(make, _, self, config):
        make(self, dataclasses.replace(config, dtype="float16"))
    return [*one_bad_number(config), instead(LossScale, "__init__", dynamic, config)]


# ---- runners

def stopped_and_resumed(config, weights, data, steps):
    """Do what train_rank does, but save a checkpoint after half of the steps, and resume it."""
    half = (steps + 1) // 2
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else ExitStack() as folder:
        folder = from_rank_0(folder)
        before = train_from(config, weights, data, 0, half, save_to=folder)
        after = train_from(config, None, data, half, steps, load=load.newest_intact_checkpoint(Path(folder)))
        dist.barrier()
    return dataclasses.replace(after, **{name: getattr(before, name) + getattr(after, name)
                                         for name in ("losses", "norms", "gradients", "statistics")})


# ---- initial weights

@pitfall("Every tensor-parallel rank draws the same shard", model.GPT, "initialize", drawn=True, **TP)
@torch.no_grad()
def same_shards(right, config, self):
    for name, weight in self.named_parameters():
        if weight.spec.std is None:
            weight.fill_(weight.spec.value)
        else:
            generator = seeded_generator("cpu", config.seed, name)
            weight.copy_(torch.empty(weight.shape).normal_(0.0, weight.spec.std, generator=generator))


@pitfall("Every rank uses its own seed", model.GPT, "initialize", world_size=4, drawn=True, **TP)
def other_replicas(right, config, self):
    self.config = dataclasses.replace(config, seed=config.seed + dist.get_rank())
    right(self)
    self.config = config


# ---- scaling

@pitfall("Gradients of microbatches are summed but never divided", Domino, "backward", **PP | MORE)
def not_divided(right, config, self, slices, gradient, *others):
    return right(self, slices, gradient * (config.microbatches if slices[0].chunk.post_process else 1), *others)


@pitfall("Each replica divides by its own tokens", train, "loss_func", micro_batch_size=12)
@pitfall("The loss is the mean of the microbatches' means", train, "loss_func", world_size=1, micro_batch_size=6)
def mean_of_means(right, config, loss_mask, losses):
    return (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1), torch.ones((), dtype=torch.float64)


@pitfall("The logged loss comes from one rank only", ZeroOptimizer, "step")
def own_loss(right, config, self, learning_rate, totals, stop=False):
    result = right(self, learning_rate, totals, stop)
    return dataclasses.replace(result, loss=float(totals.loss_sum / totals.tokens))


# ---- tensor parallelism

@pitfall("A row-parallel bias is added before the all-reduce", compute, "add_residual", **TP)
def bias_before_the_sum(right, config, x, y, bias, mask):
    return right(x, y, bias * config.tp, mask)


@pitfall("Fused q, k, v are sharded as three blocks", **TP)
def mixed_heads(config):
    def by_kind(right, config, whole, weight):
        if len(whole) != config.qkv_size:
            return right(whole, weight)
        blocks = whole.view(-1, 3, config.kv_channels, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
        shard = right(blocks, weight)
        return shard.view(3, -1, config.kv_channels, *shard.shape[1:]).transpose(0, 1).reshape(shard.shape)
    return [instead(owner, "local_shard", by_kind, config) for owner in (model, harness)]


@pitfall("The backward of an all-reduce is another all-reduce", Domino, "backward_sublayer", **TP)
def summed_twice(right, config, self, slice, entry, grad_x, grad_y, ready):
    grad_y = grad_y.clone()
    dist.all_reduce(grad_y, group=self.mesh.tp_group)
    return (yield from right(self, slice, entry, grad_x, grad_y, ready))


@pitfall("The gradient of a replicated input is not all-reduced", Domino, "backward", **TP)
def not_summed(right, config, self, *arguments):
    with mock.patch.object(self.ops.stream, "reduce", Flight):
        return (yield from right(self, *arguments))


@pitfall("Cross entropy: in the gradient each rank uses its own sum of exponentials",
         compute, "cross_entropy_gradient", **TP)
def own_softmax(right, config, logits, labels, loss, maximum, sums, gradient, vocabulary, of_rows):
    part = sums.clone()
    if vocabulary.num_words:
        part[0] = (logits - maximum.unsqueeze(-1)).exp().sum(dim=-1)
    return right(logits, labels, loss, maximum, part, gradient, vocabulary, of_rows)


@pitfall("Cross entropy: a label counts on ranks that do not own it", compute, "partial_loss_sums", **TP)
def labels_everywhere(right, config, logits, labels, largest, sum_exp, maximum, vocabulary):
    sums = right(logits, labels, largest, sum_exp, maximum, vocabulary)
    row, _ = vocabulary.local_rows(labels)
    sums[1] = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - maximum
    return sums


@pitfall("Cross entropy: each rank subtracts its own maximum", SliceOps, "all_reduce", **TP)
def own_maximum(right, config, self, slice, site, tensor, op=dist.ReduceOp.SUM):
    return right(self, slice, site, tensor, op) if op == dist.ReduceOp.SUM else iter(())


@pitfall("Process groups along the wrong axis of the grid", harness, "make_mesh", world_size=4, **TP)
def swapped_groups(right, config, *arguments, **others):
    mesh = right(*arguments, **others)
    return dataclasses.replace(mesh, groups=mesh.groups | dict(tp=mesh.dp_group, dp=mesh.tp_group))


# ---- dropout

@pitfall("Tensor-parallel ranks drop different elements of the residual stream",
         MasksAndPositions, "hidden_dropout_mask", hidden_dropout=0.2, **TP)
def own_masks(right, config, self, site, x):
    return right(self, site + " elsewhere" * self.mesh.tp_rank, x)


@pitfall("All ranks drop the same elements of their heads",
         MasksAndPositions, "attention_inputs", attention_dropout=0.2, **TP)
def same_masks(right, config, self, *arguments):
    with mock.patch.object(self, "mesh", SimpleNamespace(tp=self.mesh.tp, tp_rank=0)):
        return right(self, *arguments)


@pitfall("Dropout stays on in evaluation", Domino, "forward", world_size=1, hidden_dropout=0.2, attention_dropout=0.2)
def dropped_in_evaluation(right, config, self, batch, hidden, training, chunk):
    return right(self, batch, hidden, True, chunk)


# ---- overlap

@pitfall("The wait for an all-reduce comes too late", SliceOps, "wait", conditions=LATE, slices=2, **TP | EVEN)
def waited_too_late(right, config, self, slice, site, flights):
    due, self.overdue = getattr(self, "overdue", []), flights
    if due:
        right(self, slice, site, due)
    return result_of(flights)


@pitfall("The wait for an all-reduce comes too early", slices=2, **TP | EVEN, check=lambda pool:
         test_domino.test_in_every_window_between_launch_and_wait_another_slice_computes(pool, 2))
def waited_too_early(config):
    launch, wait = SliceOps.launch, SliceOps.wait

    def at_once(self, slice, site, launched):
        launch(self, slice, site, launched)
        wait(self, slice, site, [launched])
        return launched
    return [(SliceOps, "launch", at_once), (SliceOps, "wait", lambda self, slice, site, flights: result_of(flights))]


@pitfall("A buffer in flight is reused", conditions=LATE, slices=2, **TP | EVEN)
def shared_buffer(config):
    buffers = {}

    def shared(tensor, group, op=dist.ReduceOp.SUM):
        if group.size() == 1:
            return Flight(tensor)
        buffer = buffers.setdefault((tensor.shape, op), torch.empty_like(tensor))

        def start():
            buffer.copy_(tensor)
            work = dist.all_reduce(buffer, op, group=group, async_op=True)
            return SimpleNamespace(wait=lambda: (work.wait(), tensor.copy_(buffer))), None
        return Flight(tensor, "all_reduce", tensor, start)
    return [(slices, "prepare_all_reduce", shared)]


@pitfall("One rank resumes its slices in another order", Domino, "forward_sublayer", slices=2, **TP | EVEN)
def other_order(right, config, self, slice, step, *arguments):
    if self.mesh.tp_rank == 1 and slice.index == 0 and step.site == "layers.1.attention":
        yield
    return (yield from right(self, slice, step, *arguments))


# ---- the pipeline

@pitfall("The gradient reduction starts after the first microbatch", ZeroOptimizer, "on_gradients_ready",
         conditions=EARLY)
def reduced_too_soon(right, config, self, modules):
    told = self.__dict__.setdefault("told", set())
    if (self.updates, modules) not in told:
        told.add((self.updates, modules))
        for _ in range(config.microbatches):
            right(self, modules)


@pitfall("Layers are lost when the stages do not divide them", model, "stage_layers", **PP)
def lost_layers(right, config, num_layers, stage, stages, depths):
    each = num_layers // stages
    return range(stage * each, (stage + 1) * each)


@pitfall("The gradients of a tied matrix are not added over its two stages", buckets, "ParameterKind", **PP)
def not_tied(right, config, update, shards, replicas, addends):
    return right(update, shards, replicas, tuple(set(addends) - {"embedding"}))


# ---- the optimizer

@pitfall("The gradient norm counts a tied matrix twice", ZeroOptimizer, "counts_in_norm", **PP)
def tied_twice(right, config, self, bucket):
    return (("tp" in bucket.kind.shards or self.mesh.tp_rank == 0)
            and (bucket.partitions > 1 or self.mesh.dp_rank == 0))


@pitfall("The gradient norm counts replicated parameters once per rank", ZeroOptimizer, "counts_in_norm", **TP)
def copies_counted(right, config, self, bucket):
    return ((bucket.partitions > 1 or self.mesh.dp_rank == 0)
            and ("embedding" not in bucket.kind.addends or self.mesh.pp_rank == 0))


@pitfall("The gradient norm leaves shards out", ZeroOptimizer, "counts_in_norm", **TP)
def shards_dropped(right, config, self, bucket):
    return right(self, bucket) and self.mesh.tp_rank == 0


@pitfall("Each rank clips by its own norm", ZeroOptimizer, "sum_over_world", **TP)
def own_norm(right, config, self, *arguments):
    loss, tokens, _, stops = right(self, *arguments)
    return [loss, tokens, float(sum(sum_of_squares(bucket.own_grad) for bucket in self.buckets)), stops]


@pitfall("Biases and norms decay", buckets, "ParameterKind", world_size=1)
def all_decay(right, config, update, *others):
    return right("decay", *others)


def all_finite(optimizer):
    return all(bool(bucket.own_grad.isfinite().all()) for bucket in optimizer.buckets)


@pitfall("One rank skips a step, the others do not", ZeroOptimizer, "sum_over_world", conditions=one_bad_number,
         straight=True, **TP)
def skips_alone(right, config, self, *arguments):
    found = [bucket.own_grad.clone() for bucket in self.buckets]
    for bucket in self.buckets:
        bucket.own_grad.nan_to_num_(posinf=0.0, neginf=0.0)
    loss, tokens, squares, stops = right(self, *arguments)
    for bucket, gradient in zip(self.buckets, found):
        bucket.own_grad.copy_(gradient)
    return [loss, tokens, squares if all_finite(self) else math.inf, stops]


@pitfall("Gradients are accumulated in 16 bits", world_size=1, micro_batch_size=1,
         check=lambda pool: test_zero.test_bfloat16_gradients_accumulate_in_fp32(pool))
def added_in_16_bit(config):
    def rounded(right, config, target, *arguments):
        right(target, *arguments)
        weights = [] if isinstance(target, torch.Tensor) else [weight for weight in target if weight is not None]
        for main_grad in [weight.main_grad for weight in weights] or [target]:
            main_grad.copy_(main_grad.bfloat16())
    return [instead(owner, name, rounded, config) for owner, name in (
        (slices, "add_weight_gradient"), (domino, "add_gradients"), (compute, "add_gradients"))]


@pitfall("Padding of a flat buffer counts", hidden_size=17, num_attention_heads=1)
def padding_counts(config):
    def as_found(right, config, self, *arguments, **others):
        right(self, *arguments, **others)
        self.main_grad.fill_(0.5)

    def views_alone(self):
        for bucket in self.buckets:
            for weight in bucket.parameters:
                weight.main_grad.zero_()
        self.reports_left = dict(self.reports_needed)
    return [instead(Bucket, "__init__", as_found, config), (ZeroOptimizer, "zero_grad", views_alone)]


# ---- data and evaluation

@pitfall("All replicas read the same samples", train, "get_batch")
def same_samples(right, _, dataset, config, mesh, *others):
    return right(dataset, config, dataclasses.replace(mesh, coordinates=mesh.coordinates | dict(dp=0)), *others)


@pitfall("The ranks of a tensor-parallel group read different samples", train, "get_batch", **TP | MORE)
def other_samples(right, _, dataset, config, mesh, first_sample, shuffle, microbatch, chunk):
    return right(dataset, config, mesh, first_sample, shuffle, (microbatch + mesh.tp_rank) % config.microbatches, chunk)


@pitfall("Evaluation averages the ranks' means", train, "evaluate")
def evaluation_of_means(right, _, stage, dataset, config, mesh):
    firsts = range(0, dataset.windows, config.global_batch_size)[:config.eval_iters]
    totals = [train.run_schedule(config.timetable.forwards, first, stage, dataset, config, mesh, shuffle=False)
              for first in firsts]
    means = sum(one.loss_sum for one in totals) / sum(one.tokens for one in totals)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).item(), None, None


@pitfall("Evaluation drops the last, incomplete batch", train, "evaluate", world_size=1)
def last_batch_dropped(right, _, stage, dataset, config, *others):
    full = dataset.windows // config.global_batch_size * config.global_batch_size
    return right(stage, SimpleNamespace(windows=full, batch=dataset.batch), config, *others)


# ---- resuming

RESUMED = dict(runner=stopped_and_resumed, straight=True)


def after_restore(owner, name, wrong):
    """Return patches that replace a function as soon as restore() has loaded the checkpoint of a step `first`: then
    wrong(right, first, *arguments) runs."""
    right = getattr(owner, name)

    def restored(restore, _, *arguments):
        first = restore(*arguments)
        setattr(owner, name, lambda *given, **more: wrong(right, first, *given, **more))
        return first
    return [instead(load, "restore", restored, None), (owner, name, right)]      # by itself, so that it comes back


@pitfall("A resumed run starts the data again", **RESUMED)
def data_again(config):
    return after_restore(train, "run_schedule", lambda right, first, table, sample, *others, **more:
                         right(table, sample - first * config.global_batch_size, *others, **more))


@pitfall("A resumed run restarts the learning-rate schedule", **RESUMED)
def schedule_again(config):
    return after_restore(train, "learning_rate", lambda right, first, step, config: right(step - first, config))


@pitfall("A resumed run repeats the dropout of its first steps", hidden_dropout=0.2, **RESUMED)
def dropout_again(config):
    def again(right, first, self, *arguments):
        old = self.sample_ids and [sample - first * config.global_batch_size for sample in self.sample_ids]
        with mock.patch.object(self, "sample_ids", old):
            return right(self, *arguments)
    return after_restore(MasksAndPositions, "draw_masks", again)


@pitfall("Adam's step count is lost", ZeroOptimizer, "allocate_own_state", **RESUMED)
def count_lost(right, config, self, bucket, name):
    found = right(self, bucket, name)
    if name != "weight":
        self.optimizer_state(bucket)["step"].zero_()
    return found


@pitfall("Adam's step count is taken from the training step", checkpoint_format, "read_manifest",
         conditions=one_bad_number, **RESUMED, **TP)
def count_from_step(right, config, folder):
    manifest = right(folder)
    return {**manifest, "adam_steps": manifest["step"]}


def unfinished_checkpoint_is_not_used(pool):
    with tempfile.TemporaryDirectory() as folder:
        assert "the power is out" in pool.run(save_steps, tiny(1), folder, world_size=1)[0][0]
        found = load.newest_intact_checkpoint(Path(folder), report=lambda line: None)
        assert found is None, f"{found.name} is taken for complete"


def power_cut(config):
    def write_boxes(path, boxes):
        raise OSError("the power is out")
    return [(save, "write_boxes", write_boxes)]


@pitfall("An unfinished checkpoint is taken for a complete one", save.Saver, "write", world_size=1,
         check=unfinished_checkpoint_is_not_used, conditions=power_cut)
def named_too_early(right, config, self, step, boxes, manifest):
    final = self.run_dir / "checkpoints" / f"step-{step:08d}"
    final.mkdir(parents=True)
    (final / "manifest.json").write_text(checkpoint_format.manifest_text({**manifest, "config": {}, "files": {}}))
    self.error = "the power is out"


# ---- recomputation, ZeRO-2 and the loss scale

@pitfall("Recomputation draws new dropout masks", MasksAndPositions, "draw_masks", world_size=1, hidden_dropout=0.2,
         attention_dropout=0.2, recompute_granularity="full")
def new_masks(right, config, self, site, *others):
    before = self.__dict__.setdefault("drawn", [])
    before.append(site)
    return right(self, site + " again" * (before.count(site) > 1), *others)


@pitfall("The owner keeps only the last microbatch's gradients", ZeroOptimizer, "finish_reduces", zero_stage=2,
         conditions=EARLY)
def kept_and_not_added(right, config, self, left=0):
    while len(self.reduces_in_flight) > left:
        self.reduces_in_flight[0][0].own_grad.zero_()
        right(self, len(self.reduces_in_flight) - 1)


@pitfall("Gradients are clipped before they are unscaled", ZeroOptimizer, "update", world_size=1, loss_scale=1024.0)
def clipped_before_unscaled(right, config, self, learning_rate, grad_norm, scale):
    right(self, learning_rate, grad_norm * config.loss_scale, scale)


@pitfall("The loss scale falls only on the rank that overflowed", conditions=one_bad_number_and_a_dynamic_scale,
         straight=True, hysteresis=1, **TP)
def own_scale(config):
    def noted(right, config, self, *arguments):
        self.loss_scale.own = not all_finite(self)
        return right(self, *arguments)
    return [instead(ZeroOptimizer, "sum_over_world", noted, config),
            instead(LossScale, "update", lambda right, config, self, overflow: right(self, self.own), config)]


# ---- sequence parallelism

@pitfall("Sequence parallelism: partial gradients are not summed over the tensor-parallel ranks",
         ZeroOptimizer, "finalize_gradients", sequence_parallel=True, **TP | MORE)
def not_summed_over_the_cut(right, config, self):
    kinds = [bucket.kind for bucket in self.buckets]
    for bucket, kind in zip(self.buckets, kinds):
        bucket.kind = dataclasses.replace(kind, addends=tuple(name for name in kind.addends if name != "tp"))
    right(self)
    for bucket, kind in zip(self.buckets, kinds):
        bucket.kind = kind


@pitfall("Sequence parallelism: masks are drawn for the rank's own tokens", MasksAndPositions, "hidden_dropout_mask",
         hidden_dropout=0.2, sequence_parallel=True, **TP | MORE)
def masks_of_a_part(right, config, self, *arguments):
    with mock.patch.object(self, "stream", None):
        return right(self, *arguments)


# ---- model families

@pitfall("Gate and up of a SwiGLU are sharded as one block", swiglu=True, **TP)
def one_block(config):
    def cut(right, config, whole, weight):
        gate_and_up = len(weight.spec.shape) > weight.dim()
        if not gate_and_up:
            return right(whole, weight)
        rows = whole.flatten(0, whole.dim() - weight.dim())
        return rows[:len(weight)] if weight.spec.offset[1] == 0 else rows[-len(weight):]
    return [instead(owner, "local_shard", cut, config) for owner in (model, harness)]


pitfall("Norms of q and k learn from one rank's heads", ZeroOptimizer, "finalize_gradients", qk_layernorm=True,
        normalization="RMSNorm", **TP)(not_summed_over_the_cut)


@pitfall("RoPE rotates neighbours instead of halves", attention, "rotate", world_size=1,
         position_embedding_type="rope", kv_channels=4)
def neighbours(right, config, x, turn):
    (cos, sin), (first, second) = turn, (x[..., 0::2], x[..., 1::2])
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


# ---- experts

MOE = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, num_layers=2)
EXPERT_BIAS = MOE | dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
                         moe_router_bias_update_rate=0.05)
REPLICAS = dict(micro_batch_size=12, zero_stage=0)


@pitfall("The weights of the chosen experts do not sum to 1", Router, "weights", world_size=1, **MOE,
         moe_router_score_function="sigmoid")
def weights_not_divided(right, config, self, logits, experts):
    return self.scores(logits).gather(-1, experts)


@pitfall("The router gets no gradient from the loss of the model", Router, "backward", world_size=1, **MOE,
         moe_aux_loss_coeff=0.01)
def weights_detached(right, config, self, routing, grad_weights, *others):
    return right(self, routing, torch.zeros_like(grad_weights), *others)


@pitfall("The auxiliary loss has a gradient through the counts", Router, "loss", world_size=1, **MOE,
         moe_aux_loss_coeff=0.1)
def soft_counts(right, config, self, logits, choices):
    (_, s, count), probabilities = logits.shape, self.scores(logits)
    chosen = torch.zeros_like(probabilities).scatter(-1, self.choose(logits.detach())[0], 1.0)
    shares = (chosen * probabilities).sum(dim=1) / (s * self.topk)
    return config.moe_aux_loss_coeff * s * count * (shares * probabilities.mean(dim=1)).sum()


@pitfall("The auxiliary loss is computed for a microbatch", Router, "loss", world_size=1, **MOE | MORE,
         moe_aux_loss_coeff=0.1, slices=2)
def balance_of_a_slice(right, config, self, logits, choices):
    return right(self, logits.flatten(0, 1)[None], choices.sum(dim=0, keepdim=True))


@pitfall("Every tensor-parallel rank adds the auxiliary loss", Router, "__init__", **TP, **MOE, moe_aux_loss_coeff=0.1,
         moe_z_loss_coeff=0.01)
def auxiliary_loss_on_all_ranks(right, config, self, *arguments):
    right(self, *arguments)
    self.counts_here = True


@pitfall("The gradients of experts are summed over all replicas", buckets, "ParameterKind", **REPLICAS, **MOE,
         expert_model_parallel_size=2)
def summed_over_other_experts(right, config, update, shards, replicas, addends):
    return right(update, shards, "dp", addends)


@pitfall("The results of experts go to other tokens", experts.Dispatch, "sort_rows", world_size=1, **MOE)
def sorted_order(right, config, self):
    right(self)
    self.inverse_permutation = self.permutation


@pitfall("The expert bias is part of the weights", Router, "weights", world_size=1, **EXPERT_BIAS)
def biased_weights(right, config, self, *arguments):
    biased = lambda logits: SCORE_FUNCTIONS["sigmoid"](logits) + self.expert_bias         # noqa: E731
    with mock.patch.object(self, "scores", biased):
        return right(self, *arguments)


@pitfall("The expert bias follows the counts of one replica", ZeroOptimizer, "reduce", **REPLICAS, **EXPERT_BIAS)
def own_counts(right, config, self, bucket):
    if bucket.kind.update != "sign":
        right(self, bucket)


# ---- multi-token prediction

@pitfall("The final norm is reported complete after the head of a depth", conditions=EARLY, bucket_size=1,
         untie_embeddings_and_output_weights=True, **REPLICAS, **DEPTH)
def complete_too_early(config):
    def only_once(self, *modules):
        self.remaining[modules] = self.remaining.get(modules, self.slices) - 1
        if self.on_gradients_ready and self.remaining[modules] == 0:
            self.on_gradients_ready(modules)

    class WithoutHead(dict):
        def values(self):
            return [part for site, part in self.items() if site != "head"]

    def without_head(right, config, self, model):
        return [dataclasses.replace(chunk, parts=WithoutHead(chunk.parts)) for chunk in right(self, model)]
    return [instead(MultiTokenPrediction, "chunks", without_head, config),
            (domino.GradientsReady, "__call__", only_once)]


@pitfall("The labels of a depth wrap around the end of the sample", MultiTokenPrediction, "prepare",
         world_size=1, **DEPTH)
def labels_wrap_around(right, config, self, *arguments):
    first = last = right(self, *arguments)
    while "ahead" in last.extras:
        ahead = last.extras["ahead"]
        ahead.labels, ahead.loss_mask = (tensor.roll(-1, dims=1) for tensor in (last.labels, last.loss_mask))
        last = ahead
    return first


@pitfall("A depth's gradient ends at the depth", PredictionDepths, "backward", world_size=1, **DEPTH)
def depth_detached(right, config, self, slice, ready):
    yield from right(self, slice, ready)             # and return None instead of the gradient


pitfall("The gradients of an untied word embedding's copies are not summed", buckets, "ParameterKind",
        untie_embeddings_and_output_weights=True, **PP, **DEPTH)(not_tied)


# ---- fp8

FP8 = dict(world_size=1, dtype="float32", fp8_format="hybrid", straight=True)


@pitfall("Converted weights outlive the update", Bucket, "__init__", **FP8,
         check=lambda pool: pool.run(check_new_weights, world_size=1))
def stale_weights(right, config, self, *arguments, **options):
    right(self, *arguments, **options)
    self.derived = type("Kept", (dict,), dict(clear=lambda self: None))()


@pitfall("Gradients are converted with the weight's scale", fp8.Fp8Weight, "convert", **FP8,
         check=lambda pool: check_near_fp32(pool, {}, "hybrid", "tensorwise"))
def weights_scale(right, config, self, x):
    if not self.transposed or isinstance(x, fp8.Fp8Tensor):
        return right(self, x)
    scale = self.in_8_bits().scale
    return fp8.Fp8Tensor((x / scale).clamp(-448, 448).to(fp8.E4M3), scale)


@pitfall("A transposed weight keeps the scales of its rows", fp8.Fp8Recipe, "convert", **FP8, fp8_recipe="rowwise",
         check=lambda pool: pool.run(check_matmuls, "hybrid", "rowwise", torch.float32, 1e-6, (32, 32), world_size=1))
def scales_of_rows(right, config, self, x, to_8_bits, transposed=False):
    if not transposed or isinstance(x, fp8.Fp8Tensor) or x.dim() > 2 or x.size(0) != x.size(1):
        return right(self, x, to_8_bits, transposed)
    rows = right(self, x, to_8_bits)
    return fp8.Fp8Tensor(rows.values.t().contiguous(), rows.scale)


# ---- context parallelism

SHARED = dict(context_parallel_size=2, micro_batch_size=12)


@pitfall("Context parallelism: RoPE rotates by a token's index on its rank", dropout_and_positions, "rotation",
         **SHARED, position_embedding_type="rope", kv_channels=4)
def rotated_by_own_index(right, _, config, positions, s, device):
    return right(config, None, s, device)


@pitfall("Context parallelism: each rank keeps the gradients of its own keys", context_parallel,
         "prepare_reduce_scatter", **SHARED)
def keys_of_own_queries(right, config, addend, shape, group, name):
    return Flight(addend.view(-1).chunk(group.size())[group.rank()].view(shape))


@pitfall("Context parallelism: gathered keys stay in the order of the ranks", context_parallel, "gathered_places",
         **SHARED)
def order_of_the_ranks(right, config, b, s, ranks):
    return torch.cat(list(torch.arange(b * s).view(ranks, b, -1)), dim=1)


# ---- the command and the document

def applies(entry: Pitfall) -> str:
    """Return the layout that shows a bug, such as "tp 2, dp 2"."""
    sizes = {name: getattr(entry.config, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


def section(entry: Pitfall) -> str:
    """Return the text about a bug in docs/pitfalls.md: title, lesson, and what prevents the bug."""
    return re.search(rf'<a id="{entry.number}"></a>(.*?)\n\n', DOCUMENT.read_text(), re.DOTALL)[1]


def show(pool, entry: Pitfall, steps: int):
    """Print a bug's lesson and a table of all steps, right and wrong."""
    right, found = measure(pool, entry, True, steps)
    print(f"{section(entry)}\n\nOn {applies(entry)}:\n\n"
          f"{'':6}{'loss':^23}   {'gradient norm':^23}   largest relative error of a gradient\n"
          f"{'step':6}{'right':>11} {'wrong':>11}   {'right':>11} {'wrong':>11}")
    for step, theirs in enumerate(right.gradients):
        error, name = worst(found.gradients[step], theirs)
        print(f"{step + 1:4}  {right.losses[step]:11.6f} {found.losses[step]:11.6f}   {right.norms[step]:11.6f} "
              f"{found.norms[step]:11.6f}   " + (f"{error:9.1e}  {name}" if error > TOLERANCE else "     none"))
    print(f"evaluation: {right.evaluation:.6f} right, {found.evaluation:.6f} wrong")
    if found.apart:
        print(f"differs between ranks that must agree: {', '.join(sorted(found.apart))}")
    if entry.check:
        try:
            entry.check(pool_with_bug(pool, entry, wrong=True))
        except Exception as error:
            print(f"The check: {re.search('^AssertionError.*|$', str(error), re.MULTILINE)[0] or error}")


def row_of(entry: Pitfall, right: Outcome, found: Outcome, ends: tuple[float, float]) -> str:
    """Return a row of the document's table: a run of CHECKED steps, and the mean losses `ends` of the long runs."""
    numbers = *ends, right.norms[-1], found.norms[-1]
    cells = [f"[{entry.number}](#{entry.number})", entry.title, applies(entry),
             *(f"{number:.5f}" for number in numbers), largest_difference(right, found)]
    return f"| {' | '.join(cells)} |"


def largest_difference(right: Outcome, found: Outcome) -> str:
    """Return the worst gradient of the last step, with two significant digits; if all gradients are right, judge()'s
    message."""
    error, name = worst(found.gradients[-1], right.gradients[-1])
    if error > TOLERANCE:
        digits = max(0, 1 - math.floor(math.log10(100 * error))) if error < math.inf else 0
        return f"`{name}`, {100 * error:.{digits}f} %".replace("inf %", "missing")
    try:
        judge(right, found)
    except AssertionError as difference:
        return str(difference).splitlines()[0]               # under pytest, the values follow
    return "nothing"


def write(pool):
    """Measure all bugs and replace the rows of the document's table."""
    rows = ""
    for entry in TABLE:
        curves = measure(pool, entry, True, LONG)
        ends = tuple(sum(side.losses[-END:]) / END for side in curves)
        rows += row_of(entry, *measure(pool, entry, True, CHECKED), ends) + "\n"
        print(rows.splitlines()[-1], flush=True)
    DOCUMENT.write_text(re.sub(r"(\| \[\d+\].*\n)+", lambda _: rows, DOCUMENT.read_text(), count=1))


def rows_of_document() -> dict[int, str]:
    return {int(number): row for row, number in re.findall(r"^(\| \[(\d+)\].*)", DOCUMENT.read_text(), re.MULTILINE)}


def main(arguments: list[str]):
    parser = argparse.ArgumentParser("python tests/pitfalls.py",
                                     description="Put a bug back and compare the training with the right numbers.")
    parser.add_argument("number", nargs="?", type=int, choices=range(1, len(TABLE) + 1), metavar="NUMBER",
                        help=f"the bug's number, 1 to {len(TABLE)}")
    parser.add_argument("--steps", type=lambda text: max(1, int(text)), default=5, help="training steps (default 5)")
    parser.add_argument("--list", action="store_true", help="list all bugs")
    parser.add_argument("--write", action="store_true",
                        help=f"measure all bugs and write the table in {DOCUMENT.relative_to(ROOT)}")
    flags = parser.parse_args(arguments)
    if not flags.write and (flags.list or flags.number is None):
        print("\n".join(f"{entry.number:3}  {entry.title} ({applies(entry)})" for entry in TABLE))
        return
    pool = Pool()
    try:
        write(pool) if flags.write else show(pool, TABLE[flags.number - 1], flags.steps)
    finally:
        pool.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pitfalls             # the pool's workers find functions by module name, which is not __main__
    pitfalls.main(sys.argv[1:])
