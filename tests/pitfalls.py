"""How a distributed training run goes silently wrong: each bug is put back here, measured, and found by a check.

Most of these bugs end no run and raise no error. The loss falls, a little less far or just as far, since AdamW divides
a gradient by its own size, and half a model learns too. So a curve is no test; what each bug does to the loss, the
norm and the gradients stands in docs/pitfalls.md.

    python tests/pitfalls.py 7               bug number 7: loss, norm and worst gradient of five steps, right and wrong
    python tests/pitfalls.py 7 --steps 60    more steps
    python tests/pitfalls.py --list          all of them
    python tests/pitfalls.py --write         measure all, and write docs/pitfalls.md

A bug is a function: its docstring is the lesson, and it returns what is to be replaced, as (object, name, replacement).
Workers of the pool replace it, run, and put it back (support/pitfall_runner.py). test_pitfalls.py holds that every
check is green without the bug and red with it.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
import tempfile
import textwrap
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import test_domino
import test_zero
import train
from nanodomino import domino, model, zero
from nanodomino.analysis import expected_memory, sizes
from nanodomino.checkpoint import load, save
from nanodomino.checkpoint.folders import newest_intact_checkpoint
from nanodomino.checkpoint.manifest import file_digests, manifest_text
from nanodomino.layers import attention, linear_pair, masks_and_positions
from nanodomino.optim import buckets, loss_scale
from nanodomino.overlap import embedding_and_head, flight, residual_norm, sequence_parallel, slice_ops
from nanodomino.overlap.flight import Flight
from nanodomino.schedules import actions, definitions
from support import ROOT, harness
from support.delayed_collectives import delayed_collectives
from support.harness import build, tiny, train_rank, train_steps
from support.pitfall_runner import (CHECKED, END, LONG, Pitfall, Side, TABLE, TOLERANCE, check, judge, measure, pitfall,
                                    worst)
from support.pool import Pool

DOCUMENT = ROOT / "docs" / "pitfalls.md"
MACHINE = "2 shared virtual cores, AMD EPYC, torch 2.13.0 CPU, 2026-11-21"

TP, PP = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)
EVEN = dict(micro_batch_size=4)                      # as many samples in one slice as in the other


# ---- conditions

def delayed(when):
    """Collectives that only start: carried out when somebody waits (late), or at once (early)."""
    return lambda config: delayed_collectives(when)


def one_bad_number(config):
    """In the first step, tensor-parallel rank 1's copy of a gradient has an infinity; rank 0's, which counts, has
    none."""
    finish, steps = zero.ZeroOptimizer.finalize_gradients, []

    def poisoned(optimizer):
        finish(optimizer)
        steps.append(1)
        if len(steps) == 1 and optimizer.mesh.tp_rank == config.tp - 1:
            next(bucket for bucket in optimizer.buckets if not bucket.kind.sharded).own_grad[0] = math.inf
    return [(zero.ZeroOptimizer, "finalize_gradients", poisoned)]


def a_bad_number_and_a_scale_that_moves(config):
    """The same, and the loss scale goes up and down as it does in fp16."""
    make = loss_scale.LossScale.__init__
    return [*one_bad_number(config),
            (loss_scale.LossScale, "__init__",
             lambda self, config: make(self, dataclasses.replace(config, dtype="float16")))]


# ---- runners

def stopped_and_gone_on(config, weights, data, steps):
    """train_rank, but after half of the steps all is saved, and a new model and optimizer go on from that."""
    half = (steps + 1) // 2
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else ExitStack() as folder:
        folder = Path(train.from_rank_0(folder))
        built = build(config, weights)
        before = train_steps(built, config, data, range(1, half + 1))
        saver = save.Saver(folder, built[0], keep_last=1)
        saver.save(half, built[1], built[2], config)
        saver.wait()
        assert saver.failure() is None
        built = build(config)
        load.restore(newest_intact_checkpoint(folder), built[1], built[2], built[0])
        after = train_steps(built, config, data, range(half + 1, steps + 1))
        dist.barrier()
    return dataclasses.replace(after, losses=before.losses + after.losses, norms=before.norms + after.norms,
                               gradients=before.gradients + after.gradients)


# ---- initial weights

@pitfall("Every tensor-parallel rank draws the same shard",
         "`nanodomino/model.py`, `GPT.initialize`: a weight is drawn whole, then cut", drawn=True, **TP)
def same_shards(config):
    """The ranks seed alike and each draws the shard that it holds, so the shards of a matrix are one shard, t times. In
    the layers their gradients are alike too, so they never part: a t-th of each matrix is all that is ever trained."""
    @torch.no_grad()
    def initialize(self):
        for name, weight in self.named_parameters():
            if weight.init_std is None:
                weight.fill_(weight.init_value)
            else:
                generator = masks_and_positions.seeded_generator("cpu", config.seed, name)
                weight.copy_(torch.empty(weight.shape).normal_(0.0, weight.init_std, generator=generator))
    return [(model.GPT, "initialize", initialize)]


@pitfall("Every rank seeds with its own number",
         "`nanodomino/model.py`, `GPT.initialize`: the seed is (seed, global name)", world_size=4, drawn=True, **TP)
def other_replicas(config):
    """Now shards differ, but so do the copies of what must be one: positions on the ranks of a tensor-parallel group,
    and everything on replicas. ZeRO-1 hides half of it: after the first step each part is that of its owner, so that
    the replicas agree, on weights that were put together from several models."""
    initialize = model.GPT.initialize

    def own_seed(self):
        self.config = dataclasses.replace(config, seed=config.seed + dist.get_rank())
        initialize(self)
        self.config = config
    return [(model.GPT, "initialize", own_seed)]


# ---- scaling

@pitfall("Gradients of microbatches are summed and never divided",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: one division, by the "
         "number of tokens in the global batch", **PP)
def not_divided(config):
    """The loss that is shown is a mean, the gradient is m times that of the mean (with replicas instead of
    microbatches: dp times). AdamW divides a gradient by its own size, and clipping makes one norm of both: no digit of
    the curve differs. The norm that is shown is m times too large, the clipping threshold m times too low, and a change
    of the
    batch size changes
    the training."""
    backward = domino.Domino.backward

    def too_large(self, pieces, gradient, *others):
        return backward(self, pieces, gradient * (config.microbatches if pieces[0].chunk.post_process else 1), *others)
    return [(domino.Domino, "backward", too_large)]


def mean_loss(config):
    def mean(loss_mask, losses):
        return (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1), torch.ones((), dtype=torch.float64)
    return [(train, "loss_func", mean)]


@pitfall("The mean of the microbatches' means",
         "`train.py`, `loss_func`: sums, and how many tokens count; the quotient comes once, in "
         "`nanodomino/zero.py`", world_size=1, micro_batch_size=6)
def mean_of_means(config):
    """Where microbatches count different numbers of tokens, their means must not be averaged: a token of a short
    document then counts more than one of a long document. The loss is off by a little, and plausible; one with no token
    at all
    drags it down."""
    return mean_loss(config)


@pitfall("Each replica divides by its own tokens",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: tokens are summed over the world "
         "before anything is divided", micro_batch_size=12)
def mean_of_replicas(config):
    """The same over replicas: each divides by the number of tokens that it has, and the mean of the gradients is taken.
    What data-parallel wrappers do unless one tells them otherwise. Without padding, and with all documents of one
    length, it
    is right."""
    return mean_loss(config)


@pitfall("The loss that is logged is one rank's", "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`")
def own_loss(config):
    """Training is right; the curve is that of one replica's samples. It is noisier by the square root of dp, and two
    layouts cannot be compared by it."""
    step = zero.ZeroOptimizer.step

    def own(self, learning_rate, totals, stop=False):
        result = step(self, learning_rate, totals, stop)
        return dataclasses.replace(result, loss=float(totals.loss_sum / totals.tokens))
    return [(zero.ZeroOptimizer, "step", own)]


# ---- tensor parallelism

@pitfall("A row-parallel bias is added before the sum",
         "`nanodomino/layers/masks_and_positions.py`, `add_residual`: the bias is added once the sum over ranks "
         "is there", **TP)
def bias_before_the_sum(config):
    """Every rank adds it to its part, and the sum has it t times. A fresh model has biases of zero, so nothing shows at
    first, and the optimizer soon learns biases that are t times too small. A checkpoint of it says something else on
    another
    layout."""
    close = residual_norm.add_residual
    return [(residual_norm, "add_residual", lambda x, y, bias, mask: close(x, y, bias * config.tp, mask))]


@pitfall("Fused q, k, v cut as one block each",
         "`nanodomino/sublayers.py`, `Attention.split`: rows run group by group, [g, (q's, k, v), d]", **TP)
def mixed_heads(config):
    """With rows in the order all q, all k, all v, a contiguous cut gives the first rank the queries and half of the
    keys. It takes them for its heads' q, k and v, shapes fit, and it trains: as another model than on one process. Here
    the rows of the right side are put into that order too, so that on one process nothing would differ but their
    names."""
    local, sizes = model.local_shard, (config.num_attention_heads, 3, config.kv_channels)
    qkv_rows = config.qkv_size

    def by_kind(whole, weight, mesh):
        if len(whole) == qkv_rows:
            whole = whole.view(*sizes, -1).transpose(0, 1).reshape(whole.shape)
        return local(whole, weight, mesh)

    def split(self, qkv):
        b, s, _ = qkv.shape
        return [one.unsqueeze(3) for one in qkv.view(b, s, 3, self.groups, self.head_dim).unbind(2)]

    def core_backward(self, gradient, kept):
        b, s, _ = gradient.shape
        gradients = kept[0].backward(gradient.view(b, s, -1, self.head_dim).transpose(1, 2))
        return torch.stack([one.transpose(1, 2) for one in gradients], dim=2).view(b, s, -1)
    return [(model, "local_shard", by_kind), (harness, "local_shard", by_kind), (attention.Attention, "split", split),
            (attention.Attention, "core_backward", core_backward)]


@pitfall("The backward of a sum, written as another sum",
         "`nanodomino/domino.py`, `Domino.backward_sublayer`: y's gradient needs no wires; "
         "the lesson in `nanodomino/parallel.py`", **TP)
def summed_twice(config):
    """The gradient of a sum is the gradient of each part: the mirror image of an all-reduce is nothing at all. With
    another all-reduce in its place each sublayer's branch counts t times, the skip path once: the last sublayer's
    gradients are t times too large, and those below point elsewhere."""
    backward = domino.Domino.backward_sublayer

    def again(self, slice, entry, grad_x, grad_y, ready):
        grad_y = grad_y.clone()
        dist.all_reduce(grad_y, group=self.mesh.tp_group)
        return (yield from backward(self, slice, entry, grad_x, grad_y, ready))
    return [(domino.Domino, "backward_sublayer", again)]


@pitfall("The sum over a copied input's gradients is left out",
         "`nanodomino/layers/linear_pair.py`, `LinearPair.backward`: launches the sum", **TP)
def not_summed(config):
    """The other half of the mirror: every rank has a copy of h, and knows a part of its gradient. Without the sum each
    goes on with its own part. The norms' weights, of which every rank has a copy, part at the first step, and from then
    on the
    ranks train different models."""
    inside, head = linear_pair.LinearPair.backward, embedding_and_head.EmbeddingAndHead.head_backward

    def inside_alone(self, ops, *arguments):
        with mock.patch.object(ops.stream, "reduce", Flight):
            return (yield from inside(self, ops, *arguments))

    def head_alone(self, *arguments):
        with mock.patch.object(self.ops.stream, "reduce", Flight):
            return head(self, *arguments)
    return [(linear_pair.LinearPair, "backward", inside_alone),
            (embedding_and_head.EmbeddingAndHead, "head_backward", head_alone)]


@pitfall("Cross entropy: the gradient forgets the sum over ranks",
         "`nanodomino/layers/cross_entropy.py`, `cross_entropy_gradient`: the sums that come "
         "from all ranks", **TP)
def own_softmax(config):
    """Each rank divides its exponentials by the sum over its own words. The loss is right; every word's probability is
    too large in the gradient, so that of a token's logits no longer sums to zero."""
    backward = embedding_and_head.cross_entropy_gradient

    def own(logits, labels, loss, maximum, sums, gradient, vocabulary, of_rows):
        part = sums.clone()
        if vocabulary.num_words:
            part[0] = (logits - maximum.unsqueeze(-1)).exp().sum(dim=-1)
        return backward(logits, labels, loss, maximum, part, gradient, vocabulary, of_rows)
    return [(embedding_and_head, "cross_entropy_gradient", own)]


@pitfall("Cross entropy: a label counts on ranks that do not have it",
         "`nanodomino/layers/cross_entropy.py`, `partial_loss_sums`: zero where the label lies "
         "elsewhere", **TP)
def labels_everywhere(config):
    """A rank that does not own the label looks up row 0 instead of nothing, and the sum has some other word's logit in
    it. The loss is wrong, and may fall below zero; here the gradient at the label is computed from the loss, and is
    wrong with it. Where it is not, the training is right and the curve is not."""
    parts = embedding_and_head.partial_loss_sums

    def everywhere(logits, labels, largest, sum_exp, maximum, vocabulary):
        sums = parts(logits, labels, largest, sum_exp, maximum, vocabulary)
        row, _ = vocabulary.local_rows(labels)
        sums[1] = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - maximum
        return sums
    return [(embedding_and_head, "partial_loss_sums", everywhere)]


@pitfall("Cross entropy: each rank subtracts its own maximum",
         "`nanodomino/overlap/embedding_and_head.py`, `EmbeddingAndHead.head`: the maximum over all ranks "
         "travels first", **TP)
def own_maximum(config):
    """Sums of exponentials that were scaled differently are added. Wherever both ranks' largest logits are near each
    other, as in a fresh model, it is nearly right."""
    reduce = slice_ops.SliceOps.all_reduce

    def no_maximum(self, piece, site, tensor, op=dist.ReduceOp.SUM):
        return reduce(self, piece, site, tensor, op) if op == dist.ReduceOp.SUM else iter(())
    return [(slice_ops.SliceOps, "all_reduce", no_maximum)]


@pitfall("Groups along the wrong axis of the grid",
         "`nanodomino/mesh.py`, `make_mesh`: one box, box[pp, dp, tp]; a test names every row", world_size=4, **TP)
def swapped_groups(config):
    """The group that should share a matrix is that of the replicas: parts of different samples are added. All sizes
    fit, since both axes have two ranks, and nothing complains."""
    make = harness.make_mesh

    def swapped(*arguments):
        mesh = make(*arguments)
        return dataclasses.replace(mesh, tp_group=mesh.dp_group, dp_group=mesh.tp_group)
    return [(harness, "make_mesh", swapped)]


# ---- dropout

@pitfall("Each tensor-parallel rank drops other numbers of the stream",
         "`nanodomino/layers/masks_and_positions.py`, `MasksAndPositions`: a mask is a function of (seed, "
         "sample, place in the model)", hidden_dropout=0.2, **TP)
def own_masks(config):
    """Between the sublayers the stream is one, of which each rank has a copy. With a mask of its own each has another
    stream from the first site on; their sums mix them, and the copies of norms and biases drift apart."""
    hidden = masks_and_positions.MasksAndPositions.hidden_dropout_mask
    return [(masks_and_positions.MasksAndPositions, "hidden_dropout_mask",
             lambda self, site, x: hidden(self, site + " elsewhere" * self.mesh.tp_rank, x))]


@pitfall("All ranks drop the same of their heads",
         "`nanodomino/layers/masks_and_positions.py`, `MasksAndPositions.attention_inputs`: drawn for all heads, then "
         "cut",
         attention_dropout=0.2, **TP)
def same_masks(config):
    """Inside a sublayer the ranks hold different heads, and one seed for all drops alike in head 0 and head n/t.
    Nothing diverges; the noise is only less independent than it should be, and another on each layout."""
    core = masks_and_positions.MasksAndPositions.attention_inputs

    def as_the_first(self, *arguments):
        first = SimpleNamespace(tp=self.mesh.tp, tp_rank=0)
        with mock.patch.object(self, "mesh", first):
            return core(self, *arguments)
    return [(masks_and_positions.MasksAndPositions, "attention_inputs", as_the_first)]


@pitfall("Dropout in evaluation",
         "`nanodomino/pipeline.py`, `run`: a schedule without backward does not train; no mode is kept anywhere",
         world_size=1, hidden_dropout=0.2, attention_dropout=0.2)
def dropped_in_evaluation(config):
    """A functional dropout asks no module for its mode, so evaluation drops too. Training is right; the validation loss
    is that of another, thinner model: mostly a worse one, here, after two steps, a better one."""
    forward = domino.Domino.forward
    return [(domino.Domino, "forward",
             lambda self, batch, hidden, training, chunk: forward(self, batch, hidden, True, chunk))]


# ---- overlap

@pitfall("A sum is waited for too late",
         "`nanodomino/domino.py`, `Domino.forward_sublayer` and `wait_for_sum`: who launches waits, in one "
         "function", conditions=delayed("late"), slices=2, **TP, **EVEN)
def waited_too_late(config):
    """Somebody reads a buffer before its sum has arrived. On quick wires it mostly has: a race, which looks like noise.
    Here the wires move nothing until somebody waits, and each wait is one launch late."""
    wait = slice_ops.SliceOps.wait

    def late(self, piece, site, flights):
        due, self.overdue = getattr(self, "overdue", []), flights
        if due:
            wait(self, piece, site, due)
        return flight.result_of(flights)
    return [(slice_ops.SliceOps, "wait", late)]


def every_window_is_filled(pool):
    test_domino.test_in_every_window_between_launch_and_wait_another_slice_computes(pool, 2)


@pitfall("A sum is waited for too early",
         "`nanodomino/domino.py`, `Domino.wait_for_sum`: the wait comes after the yield", check=every_window_is_filled,
         shown="Only a clock or a trace shows it: between launch and wait no other slice computes.", slices=2, **TP,
         **EVEN)
def waited_too_early(config):
    """In autograd's own order, or in a caller's that wants the result at once, the wait follows the launch. Every
    number is right, and nothing is hidden."""
    launch, wait = slice_ops.SliceOps.launch, slice_ops.SliceOps.wait

    def at_once(self, slice, site, launched):
        launch(self, slice, site, launched)
        wait(self, slice, site, [launched])
        return launched
    return [(slice_ops.SliceOps, "launch", at_once),
            (slice_ops.SliceOps, "wait", lambda self, piece, site, flights: flight.result_of(flights))]


class CopiedBack:
    """A sum in a shared buffer, which whoever waits takes from there."""

    def __init__(self, work, buffer, tensor):
        self.work, self.buffer, self.tensor = work, buffer, tensor

    def wait(self):
        self.work.wait()
        self.tensor.copy_(self.buffer)


@pitfall("A buffer on the wires is used again",
         "`nanodomino/overlap/slice_ops.py`, `SliceOps.launch`: every sum has a tensor of its own; "
         "`tests/gpu/test_hazards.py` watches them all", conditions=delayed("late"), slices=2, **TP, **EVEN)
def shared_buffer(config):
    """To save memory, one buffer of each size serves all sums. It is safe as long as one is under way at a time, that
    is without overlap: the second slice writes its part over the first one's."""
    buffers = {}

    def shared(tensor, group, op=dist.ReduceOp.SUM):
        if group.size() == 1:
            return Flight(tensor)
        buffer = buffers.setdefault((tensor.shape, op), torch.empty_like(tensor))

        def start():
            buffer.copy_(tensor)
            return CopiedBack(dist.all_reduce(buffer, op, group=group, async_op=True), buffer, tensor), None
        return Flight(tensor, "all_reduce", tensor, start)
    return [(owner, "all_reduce", shared) for owner in (sequence_parallel, slice_ops)]


@pitfall("One rank resumes its slices in another order",
         "`nanodomino/domino.py`, `interleave`: the order follows from the number of slices, "
         "and from nothing a rank has seen", slices=2, **TP, **EVEN)
def other_order(config):
    """A collective has no name: the n-th of one rank meets the n-th of the others. After one yield too many on one
    rank, slice 0 is added to slice 1. Shapes fit, so nobody hangs, and nobody says so."""
    sublayer = domino.Domino.forward_sublayer

    def hesitates(self, piece, step, *arguments):
        if self.mesh.tp_rank == 1 and piece.index == 0 and step.site == "layers.1.attention":
            yield
        return (yield from sublayer(self, piece, step, *arguments))
    return [(domino.Domino, "forward_sublayer", hesitates)]


# ---- the pipeline

@pitfall("The reduce over replicas starts with the first backward",
         "`nanodomino/zero.py`, `ZeroOptimizer.on_gradients_ready`: a bucket waits for each "
         "microbatch", conditions=delayed("early"))
def reduced_too_soon(config):
    """The gradients of a bucket are sent as soon as one microbatch has been there; what later ones add stays at home.
    The training sees a part of its batch: noisier, and just as plausible."""
    on_gradients_ready, told = zero.ZeroOptimizer.on_gradients_ready, set()

    def first_backward(self, modules):
        if (self.updates, modules) not in told:
            told.add((self.updates, modules))
            for _ in range(config.microbatches):
                on_gradients_ready(self, modules)
    return [(zero.ZeroOptimizer, "on_gradients_ready", first_backward)]


@pitfall("Layers that do not divide by the stages are lost",
         "`nanodomino/model.py`, `stage_layers`: the first stages hold one more", **PP)
def lost_layers(config):
    """Each stage takes layers // stages of them. Three layers on two stages make a model of two, which trains as such a
    model does; its number of parameters is a line of the log that nobody reads."""
    def even(num_layers, stage, stages):
        each = num_layers // stages
        return range(stage * each, (stage + 1) * each)
    return [(model, "stage_layers", even)]


@pitfall("A tied matrix on two stages, whose gradients are not added",
         "`nanodomino/zero.py`, `ZeroOptimizer.finalize_gradients`: over first and "
         "last stage, once the replicas have", **PP)
def not_tied(config):
    """The first stage looks words up in its copy, the last one multiplies by its own, and each adds up what it sees.
    They start as one matrix and are two from the first step on; the norm counts both, and a checkpoint keeps one of
    them."""
    return [(model.GPT, "tied_copy", None)]


# ---- the optimizer

def counts(rule):
    return [(zero.ZeroOptimizer, "counts_in_norm", lambda self, kind: rule(self, self.mesh, kind))]


@pitfall("The norm counts a tied matrix twice", "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **PP)
def tied_twice(config):
    """Both stages have the whole gradient of their copy, and both count it. The norm is too large, by at most the
    square root of two, so the clipping bites too early."""
    return counts(lambda self, mesh, kind: (kind.sharded or mesh.tp_rank == 0)
                  and (self.partitions > 1 or mesh.dp_rank == 0))


@pitfall("The norm counts copies once for each rank", "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **TP)
def copies_counted(config):
    """Norms, biases and positions lie on every tensor-parallel rank, and a plain sum of all squares has them t times.
    The more ranks, the larger the norm: clipping depends on the layout."""
    return counts(lambda self, mesh, kind: (self.partitions > 1 or mesh.dp_rank == 0)
                  and (not kind.tied or mesh.is_first_stage))


@pitfall("The norm leaves shards out", "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **TP)
def shards_dropped(config):
    """To count copies once, all ranks but the first are left out; and with them their shards, which nobody else has.
    The norm is too small, and the clipping too weak."""
    return counts(lambda self, mesh, kind: mesh.tp_rank == 0 and (self.partitions > 1 or mesh.dp_rank == 0)
                  and (not kind.tied or mesh.is_first_stage))


@pitfall("Each rank clips by its own norm",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: squares are summed over the world, each once", **TP)
def own_norm(config):
    """The norm of what a rank happens to hold, before anything is summed: shards are scaled by different factors, and
    so are the copies of norms and biases, which are copies no longer."""
    sums = zero.ZeroOptimizer.sum_over_world

    def own(self, *arguments):
        loss, tokens, _, stops = sums(self, *arguments)
        return [loss, tokens, float(sum(zero.sum_of_squares(bucket.own_grad) for bucket in self.buckets)), stops]
    return [(zero.ZeroOptimizer, "sum_over_world", own)]


@pitfall("Biases and norms decay",
         "`nanodomino/buckets.py`, `sort_into_buckets`: a bucket holds parameters of one kind", world_size=1)
def all_decay(config):
    """A flat buffer forgets whose numbers it holds, and one rate of decay serves all. Norm weights are drawn from 1
    towards 0, slowly; loss and gradients of the first step are right."""
    kind = buckets.ParameterKind
    return [(buckets, "ParameterKind", lambda decay, **others: kind(decay=True, **others))]


@pitfall("One rank skips a step, the others do not",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: what does not count must be finite "
         "too, so that all decide alike", runner=train_rank, conditions=one_bad_number, straight=True, **TP)
def skips_alone(config):
    """A gradient overflows on one rank. If that rank alone leaves the step out, its shards are a step behind, and its
    copies are others: with replicas the next collective hangs, without them nothing is ever noticed. The infinity lies
    in a
    copy here that the norm does not count."""
    sums = zero.ZeroOptimizer.sum_over_world

    def alone(self, *arguments):
        finite = all(bool(bucket.own_grad.isfinite().all()) for bucket in self.buckets)
        kept = [bucket.own_grad.clone() for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.own_grad.nan_to_num_(posinf=0.0, neginf=0.0)
        loss, tokens, squares, stops = sums(self, *arguments)
        for bucket, gradient in zip(self.buckets, kept):
            bucket.own_grad.copy_(gradient)
        return [loss, tokens, squares if finite else math.inf, stops]
    return [(zero.ZeroOptimizer, "sum_over_world", alone)]


def bfloat16_accumulates(pool):
    test_zero.test_bfloat16_gradients_accumulate_in_fp32(pool)


@pitfall("Gradients are added up in 16 bit", "`nanodomino/buckets.py`, `Bucket`: `main_grad` is fp32", world_size=1,
         micro_batch_size=1, check=bfloat16_accumulates,
         shown="It is plainest in 300 equal gradients, whose sum in bfloat16 is not 300 of them.")
def added_in_16_bit(config):
    """bfloat16 has 8 bits: of many microbatches, the later ones are each too small beside the sum to change it, and
    from 256 equal ones on it stands still. The more microbatches, the worse; with one, all is well."""
    weight_gradient, gradients = slice_ops.add_weight_gradient, residual_norm.add_gradients

    def rounded(main_grad):
        main_grad.copy_(main_grad.bfloat16())

    def one(main_grad, *arguments):
        weight_gradient(main_grad, *arguments)
        rounded(main_grad)

    def several(weights, *arguments):
        gradients(weights, *arguments)
        for weight in weights:
            if weight is not None:
                rounded(weight.main_grad)
    return [(slice_ops, "add_weight_gradient", one), (domino, "add_gradients", several),
            (residual_norm, "add_gradients", several)]


@pitfall("Padding of a flat buffer counts",
         "`nanodomino/buckets.py`, `Bucket`; `nanodomino/zero.py`, `ZeroOptimizer.zero_grad`: all of a "
         "buffer is zeroed, not only the views of it", hidden_size=17, num_attention_heads=1)
def padding_counts(config):
    """A flat buffer is rounded up to a length that can be cut. Left as the memory was found, the numbers between the
    parameters are gradients to the norm and to the optimizer; on a fresh machine they are zeros, and it works."""
    make = buckets.Bucket.__init__

    def as_found(self, *arguments):
        make(self, *arguments)
        self.main_grad.fill_(0.5)

    def views_alone(self):
        for bucket in self.buckets:
            for weight in bucket.parameters:
                weight.main_grad.zero_()
        self.reports_left = dict(self.reports_needed)
    return [(buckets.Bucket, "__init__", as_found), (zero.ZeroOptimizer, "zero_grad", views_alone)]


# ---- data and evaluation

@pitfall("All replicas read the same samples",
         "`train.py`, `get_batch`; `nanodomino/data.py`, `sample_ids_of`: a pure function of step and place")
def same_samples(config):
    """Each replica starts its reader anew and reads what the first one reads. Twice as many processes, and the batch is
    half as large: all agrees, and the curve is a good one."""
    get_batch = train.get_batch
    return [(train, "get_batch", lambda dataset, config, mesh, *others: get_batch(dataset, config,
                                                                                  dataclasses.replace(mesh, dp_rank=0),
                                                                                  *others))]


@pitfall("The ranks of a tensor-parallel group read different samples",
         "`train.py`, `get_batch`: asks with the replica's numbers, which are those "
         "of all its ranks", **TP)
def other_samples(config):
    """A sampler that is given the rank in the world deals out samples to all ranks, also to those that work on one
    sample together. Parts of different samples are added: one rank looks words up that the other has never seen."""
    get_batch = train.get_batch

    def own(dataset, config, mesh, step, shuffle, microbatch, chunk):
        return get_batch(dataset, config, mesh, step, shuffle, (microbatch + mesh.tp_rank) % config.microbatches, chunk)
    return [(train, "get_batch", own)]


@pitfall("Evaluation takes the mean of the ranks' means", "`train.py`, `evaluate`: sums over the world, one quotient")
def evaluation_of_means(config):
    """Ranks count different numbers of tokens, above all in the last batch. Training is right, and the validation loss
    another one on each layout."""
    def mean(stage, dataset, config, mesh, on_action=None):
        steps = range(min(config.eval_iters, math.ceil(dataset.windows / config.global_batch_size)))
        totals = [train.run_schedule(config.timetable.forwards, step, stage, dataset, config, mesh, shuffle=False)
                  for step in steps]
        means = sum(one.loss_sum for one in totals) / sum(one.tokens for one in totals)
        dist.all_reduce(means)
        return (means / dist.get_world_size()).item()
    return [(train, "evaluate", mean)]


@pitfall("Evaluation drops the last batch if it is not full",
         "`train.py`, `evaluate`: the number of batches is rounded up; "
         "`nanodomino/data.py`, `TokenDataset.batch` fills up with rows that do not count", world_size=1)
def last_batch_dropped(config):
    """A loader's drop_last, left on. How much text is evaluated then depends on the batch size, and a split that is
    smaller than a batch is not evaluated at all."""
    evaluate = train.evaluate

    def full_batches(stage, dataset, config, *others):
        full = dataset.windows // config.global_batch_size * config.global_batch_size
        return evaluate(stage, SimpleNamespace(windows=full, batch=dataset.batch), config, *others)
    return [(train, "evaluate", full_batches)]


# ---- going on

RESUMED = dict(runner=stopped_and_gone_on, straight=True)


def from_its_start(change):
    """Replaces what restore() leaves behind: change(first step) -> patches that hold from then on."""
    restore = load.restore

    def restored(folder, gpt, optimizer, mesh, weights_only=False):
        first = restore(folder, gpt, optimizer, mesh, weights_only)
        for owner, name, replacement in change(first):
            setattr(owner, name, replacement)
        return first
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in change(0)]
    return [(load, "restore", restored), *originals]        # replaced by themselves, so that they are put back


@pitfall("A run that goes on starts the data again",
         "`nanodomino/data.py`: the samples of a step follow from (seed, step)", **RESUMED)
def data_again(config):
    """The loader is new, and begins with the first sample: some text is seen twice, other text never, and each restart
    does it again. The loss falls below where it was, since this text is known."""
    run = train.run_schedule
    return from_its_start(lambda first: [(train, "run_schedule",
                                          lambda table, step, *others, **more: run(table, step - first, *others,
                                                                                   **more))])


@pitfall("A run that goes on starts the learning rate's schedule again",
         "`train.py`, `learning_rate`: a function of the step", **RESUMED)
def schedule_again(config):
    """The scheduler counts its own calls, and is not saved. The rate warms up once more and never comes down; a curve
    with a bump at each restart is easily taken for the data's."""
    rate = train.learning_rate
    return from_its_start(lambda first: [(train, "learning_rate", lambda step, config: rate(step - first, config))])


@pitfall("A run that goes on repeats the dropout of its beginning",
         "`nanodomino/layers/masks_and_positions.py`, `MasksAndPositions`: seeded by the sample's number in the run",
         hidden_dropout=0.2, **RESUMED)
def dropout_again(config):
    """The generator's state is not saved, and the new process seeds as the first one did. Nothing breaks; but a run
    that is stopped is another run, and no two runs can be compared any more."""
    draw = masks_and_positions.MasksAndPositions.draw_masks

    def shifted(first):
        def again(self, *arguments):
            old = self.sample_ids and [sample - first * config.global_batch_size for sample in self.sample_ids]
            with mock.patch.object(self, "sample_ids", old):
                return draw(self, *arguments)
        return [(masks_and_positions.MasksAndPositions, "draw_masks", again)]
    return from_its_start(shifted)


@pitfall("Adam's count is lost",
         "`nanodomino/zero.py`, `ZeroOptimizer.allocate_own_state`: sets each count from what the manifest says",
         **RESUMED)
def count_lost(config):
    """The moments are restored, the number of updates is not. Adam divides by 1 - beta^count, and takes moments that
    are whole for moments of a first step: with the betas here the first update after a restart is up to 2.2 times too
    large."""
    place = zero.ZeroOptimizer.allocate_own_state

    def uncounted(self, bucket, name):
        found = place(self, bucket, name)
        if name != "weight":
            self.optimizer.state[bucket.master]["step"].zero_()
        return found
    return [(zero.ZeroOptimizer, "allocate_own_state", uncounted)]


@pitfall("Adam's count is taken from the step's number",
         "`nanodomino/checkpoint/load.py`, `restore`: the manifest keeps `adam_steps` beside `step`",
         conditions=one_bad_number, **RESUMED, **TP)
def count_from_step(config):
    """They are the same until a step is skipped. After that, a run that goes on corrects for one update too many; the
    difference is small, and no longer the same bits."""
    read = load.read_manifest

    def as_step(folder):
        manifest = read(folder)
        return {**manifest, "adam_steps": manifest["step"]}
    return [(load, "read_manifest", as_step)]


def die_while_saving(folder):
    """A save in which the data cannot be written to the end."""
    config = tiny(1)
    mesh, gpt, optimizer, _ = build(config)
    saver = save.Saver(Path(folder), mesh, keep_last=1)
    saver.save(1, gpt, optimizer, config)
    saver.wait()
    return saver.failure()


def nothing_is_taken_for_whole(pool):
    with tempfile.TemporaryDirectory() as folder:
        (failure,) = pool.run(die_while_saving, folder, world_size=1)
        assert "the power is out" in failure
        found = newest_intact_checkpoint(Path(folder), report=lambda line: None)
        assert found is None, f"{found.name} is taken for whole"


def power_cut(config):
    def write_data(self, *arguments):
        raise OSError("the power is out")
    return [(save.dcp.FileSystemWriter, "write_data", write_data)]


@pitfall("A checkpoint that was being written is taken for whole",
         "`nanodomino/checkpoint/save.py`, `Saver.write` and `complete`: data, manifest, and the "
         "name last", world_size=1, check=nothing_is_taken_for_whole, conditions=power_cut,
         shown="No number of a training shows it, but the next start does: the newest checkpoint lacks its tensors.")
def named_too_early(config):
    """The folder has its name, and a word that says what is in it, before the data is. Whoever is killed in between
    leaves something that the next start takes for the newest checkpoint."""
    def write(self, step, tensors, manifest):
        final = self.run_dir / "checkpoints" / f"step-{step:08d}"
        final.mkdir(parents=True)
        (final / ".metadata").touch()
        files = file_digests([final / ".metadata"])
        (final / "manifest.json").write_text(manifest_text({**manifest, "files": files}))
        save.dcp.save(tensors, storage_writer=save.dcp.FileSystemWriter(final), process_group=self.group)
    return [(save.Saver, "write", write)]


# ---- what a plan says

def plans_know_every_schedule(pool):
    pool.run(plan_of_a_third_schedule, world_size=1)


def plan_of_a_third_schedule():
    """One microbatch at a time, forward and backward: one is alive."""
    def one_by_one(stage, stages, microbatches, chunks):
        return [kind(i) for i in range(microbatches) for kind in (actions.Forward, actions.Backward)]
    with mock.patch.dict(definitions.SCHEDULES, {"one by one": definitions.Schedule(one_by_one)}):
        config = dataclasses.replace(tiny(1), schedule="one by one")
        alive = expected_memory.microbatches_in_flight(config, sizes.mesh_at(config))
        assert alive == 1, f"the plan says that {alive} microbatches are alive, not 1"


@pitfall("A schedule's cost is asked by its name",
         "`nanodomino/schedules.py`, `peak_microbatches` and `simulate`: costs are read off the actions", world_size=1,
         check=plans_know_every_schedule, shown="It shows in a plan's memory, for a schedule that was added later.")
def cost_by_name(config):
    """GPipe holds all microbatches, and whatever is not GPipe is taken for 1F1B. It is right for both, and silently
    wrong for the third."""
    def alive(config, place):
        return min(config.pp, config.microbatches) if config.schedule == "1f1b" else config.microbatches
    return [(expected_memory, "microbatches_in_flight", alive)]


# ---- what is computed again

@pitfall("What is computed again drops something else",
         "`nanodomino/layers/masks_and_positions.py`, `MasksAndPositions`: a mask is a function of (seed, sample, "
         "place in the "
         "model), also when it is drawn again", world_size=1, hidden_dropout=0.2, attention_dropout=0.2,
         recompute_granularity="full")
def new_masks(config):
    """Backward runs a part of the forward again, and the generator has moved on meanwhile: it differentiates another
    function than the one whose loss it was given. Losses of a first step are right, gradients are those of nothing, and
    more noise is
    all that shows."""
    draw = masks_and_positions.MasksAndPositions.draw_masks

    def moved_on(self, site, *others):
        before = self.__dict__.setdefault("drawn", [])
        before.append(site)
        return draw(self, site + " again" * (before.count(site) > 1), *others)
    return [(masks_and_positions.MasksAndPositions, "draw_masks", moved_on)]


# ---- ZeRO-2

@pitfall("The owner keeps the last microbatch's gradients",
         "`nanodomino/zero.py`, `ZeroOptimizer.finish_reduces`: what has arrived is added to the own part",
         zero_stage=2, conditions=delayed("early"))
def kept_and_not_added(config):
    """Each microbatch's gradients are reduced to their owner, who takes the place of its part for the place where they
    arrive: what earlier ones brought is gone. With one microbatch a step it is right, and else the training sees a part
    of its
    batch."""
    finish = zero.ZeroOptimizer.finish_reduces

    def overwrites(self, left=0):
        while len(self.reduces_in_flight) > left:
            self.reduces_in_flight[0][0].own_grad.zero_()
            finish(self, len(self.reduces_in_flight) - 1)
    return [(zero.ZeroOptimizer, "finish_reduces", overwrites)]


# ---- the loss scale

@pitfall("Gradients are clipped before they are unscaled",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: the norm is divided by the scale first",
         world_size=1, loss_scale=1024.0)
def clipped_before_unscaled(config):
    """The threshold is for the gradients of the mean loss, and the norm that it is compared with is `scale` times as
    large. So every step is clipped, to a norm that changes whenever the scale does. AdamW divides a gradient by its own
    size, and only where it comes near to epsilon does anything show."""
    update = zero.ZeroOptimizer.update
    return [(zero.ZeroOptimizer, "update",
             lambda self, learning_rate, grad_norm, scale: update(self, learning_rate, grad_norm * config.loss_scale,
                                                                  scale))]


@pitfall("The loss scale falls on the rank that has overflowed, and on no other",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: what the world has found "
         "moves the scale", conditions=a_bad_number_and_a_scale_that_moves, straight=True, hysteresis=1, **TP)
def own_scale(config):
    """All skip the step, but each rank asks its own gradients whether the scale is to fall. From then on one rank's
    part of every sum is half as large, and its own shards' gradients are divided by half as much: each sublayer's
    gradient points elsewhere, and
    the copies part."""
    sums, update = zero.ZeroOptimizer.sum_over_world, loss_scale.LossScale.update

    def own(self, *arguments):
        self.loss_scale.own = not all(bool(bucket.own_grad.isfinite().all()) for bucket in self.buckets)
        return sums(self, *arguments)
    return [(zero.ZeroOptimizer, "sum_over_world", own),
            (loss_scale.LossScale, "update", lambda self, overflow: update(self, self.own))]


# ---- sequence parallelism

@pitfall("Gradients of what sees a part of the tokens are not summed over the tensor-parallel ranks",
         "`nanodomino/zero.py`, "
         "`ZeroOptimizer.finalize_gradients`: of all that is not cut, once a step, where it lies side by side",
         sequence_parallel=True, **TP)
def not_summed_over_the_cut(config):
    """Where the stream is cut along its tokens, norms, row-parallel biases and positions still lie whole on each rank,
    and work on its own tokens alone: what was the whole gradient is a part of it. Matrices are right. The norms learn
    from a half of the text, each rank's copy from another half, and they part at the first step."""
    return [(zero.ZeroOptimizer, "finalize_gradients", without_sums_over_parts)]


def without_sums_over_parts(self, finish=zero.ZeroOptimizer.finalize_gradients):
    kinds = [bucket.kind for bucket in self.buckets]
    for bucket in self.buckets:
        bucket.kind = dataclasses.replace(bucket.kind, partial_gradient=False)
    finish(self)
    for bucket, kind in zip(self.buckets, kinds):
        bucket.kind = kind


@pitfall("Masks are drawn for the tokens that a rank has",
         "`nanodomino/layers/masks_and_positions.py`, `MasksAndPositions.hidden_dropout_mask`: drawn for the whole "
         "sample, then cut as the "
         "stream is", hidden_dropout=0.2, sequence_parallel=True, **TP)
def masks_of_a_part(config):
    """A rank has s/t of a sample's tokens, and draws as many masks, from the seed that all share. The first token of
    each part then drops what the first token of every other part drops: t times the same noise, and another one on each
    layout. Nothing
    diverges."""
    hidden = masks_and_positions.MasksAndPositions.hidden_dropout_mask

    def alone(self, *arguments):
        with mock.patch.object(self, "stream", None):
            return hidden(self, *arguments)
    return [(masks_and_positions.MasksAndPositions, "hidden_dropout_mask", alone)]


# ---- the choices of a model

@pitfall("Gate and up of a SwiGLU are cut as one block",
         "`nanodomino/parallel.py`, `local_shard`: each of a matrix's runs is cut, so that a rank has its part of both",
         swiglu=True, **TP)
def one_block(config):
    """W1 has the gate's rows, then up's. A contiguous cut gives the first rank all gates and the second all of up. Each
    takes what it has for its half of both, shapes fit, and it trains: as another model than on one process."""
    def cut(whole, weight, mesh):
        return whole if weight.shard_dim is None else whole.chunk(mesh.tp, dim=weight.shard_dim)[mesh.tp_rank]
    return [(model, "local_shard", cut), (harness, "local_shard", cut)]


@pitfall("Norms of q and k learn from a rank's own heads",
         "`nanodomino/layers/attention.py`, `Attention`: their weights say that their gradients are "
         "`partial_gradient`, "
         "and are summed over the ranks", qk_layernorm=True, normalization="RMSNorm", **TP)
def norms_of_own_heads(config):
    """One weight [d] norms q in every head, and each rank has some heads: its gradient is a part of it, though the
    stream is whole and no other norm's is. Copies part at the first step, and each fits its rank's heads a little
    better than one for all would."""
    return [(zero.ZeroOptimizer, "finalize_gradients", without_sums_over_parts)]


@pitfall("Rope turns neighbours, not halves",
         "`nanodomino/layers/positions.py`, `rotate`: pairs are of the first half and the second, as in Llama's "
         "weights on "
         "Hugging Face", world_size=1, position_embedding_type="rope", kv_channels=4)
def neighbours(config):
    """RoFormer's paper turns each even number with the odd one behind it, and Meta's own files are for that; those on
    Hugging Face have their rows in another order, for halves. From scratch both learn alike. Weights made for one,
    loaded into the other, are a
    model that still talks, badly."""
    def rotate(x, turn):
        (cos, sin), (first, second) = turn, (x[..., 0::2], x[..., 1::2])
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return [(attention, "rotate", rotate)]


# ---- those that are not put back here, and the tests that guard them

GUARDED = [
    ("Positions that begin anew at every cached token",
     "A key that was turned for place 0 is right for the first token alone; so are those of a window that "
     "has slid.", "generate/test_generate.py",
     "test_every_family_writes_what_the_plain_model_does_within_documents_and_up_to_their_end"),
    ("A square matrix from elsewhere that should have been transposed",
     "It fits as it is. GPT-2's own files hold all matrices so.",
     "huggingface/test_conversion.py", "test_gradients_equal_those_of_transformers"),
    ("A token that looks into the document before its own",
     "Nothing breaks; the model learns from what has nothing to do with it, and is another one where each "
     "document stands alone.", "layers/test_positions.py", "test_a_packed_sample_is_its_documents_one_by_one"),
    ("Messages whose order only works while they are small",
     "A send returns at once as long as the transport takes the message into a "
     "buffer of its own; the first larger one waits for its receive, and two stages that both send wait for ever.",
     "test_pipeline.py", "test_messages_of_megabytes_do_not_deadlock"),
    ("Two stages that meet for the first time",
     "NCCL connects two ranks at their first message, on the host, until both have come. Two stages "
     "that first want something else of each other stand still, and no watchdog sees it.", "gpu/test_nccl.py",
     "test_without_its_precaution_a_pipeline_hangs"),
    ("A receive that is posted early",
     "On a GPU it occupies the device: what waits for the whole device waits for the message, which may wait "
     "for that. And a batch's messages go in order: a receive before a send holds the send up, and a circle of them "
     "never ends.", "gpu/test_nccl.py",
     "test_no_stage_waits_for_ever"),
    ("A message that is asked for only when it is needed",
     "Its sender is held up until then. Where stages send each other messages both ways, two of "
     "them hold each other up for ever; so the schedule says when to ask.", "gpu/test_nccl.py",
     "test_who_asks_only_when_a_message_is_needed_holds_up_its_sender_for_ever"),
    ("A weight that is called final with its input gradient",
     "With backward in two halves what comes later stays at home: a weight is final after its last "
     "weight gradient, which may be microbatches behind.", "docs/test_docstring_claims.py",
     "test_a_sublayers_gradients_are_complete_when_it_is_reported_ready"),
    ("Memory for gradients that is used again while they travel",
     "A bucket that hands it on before its reduce is done sums what another one adds, or zeros.",
     "gpu/test_hazards.py", "test_nothing_is_touched_in_flight"),
    ("More stages than microbatches",
     "The warm-up is longer than the work, and a stage waits for a microbatch that never comes.",
     "exactness/test_layouts.py", "test_training_equals_one_plain_process"),
    ("Shards of replicas that no longer agree",
     "One kernel here and another there: copies part in the last bit, which no loss shows.",
     "run/test_interrupted_runs.py", "test_a_copy_that_differs_in_one_bit_is_named_at_the_next_save"),
    ("Validation text in the training split", "Cut by tokens, a document lies on both sides; a copy of it does so too.",
     "data/test_data.py", "test_copies_never_reach_a_second_split"),
    ("Evaluation in another order, or around the end",
     "Windows that are shuffled or wrap around are counted twice, or never.", "data/test_data.py",
     "test_evaluation_stops_at_the_end_and_counts_no_token_twice"),
    ("A tensor of the logits' size too many",
     "A softmax in fp32 that the tape keeps, or a product that is rounded before it is added: memory, "
     "and nothing else.", "gpu/test_fake_cuda.py", "test_memory_of_gpt2"),
    ("A sum that is repeated with what is computed again",
     "A sublayer that runs again up to its end puts its sum on the wires again, and who adds it "
     "adds it twice.", "overlap/test_recompute.py", "test_no_collective_is_repeated"),
    ("Memory that is given up while a copy still reads it",
     "Copies to the host and back run beside training. A tensor is freed, its memory is given to "
     "another, and the copy takes what it finds; or somebody reads what has not come back yet.",
     "overlap/test_recompute.py", "test_what_was_on_the_host_comes_back_in_time_and_with_the_same_bits"),
    ("A new setting that refuses every older checkpoint", "What was not recorded is compared with today's default.",
     "config/test_settings.py", "test_a_run_of_an_older_version_goes_on"),
    ("A sign of a zero",
     "An optimizer that takes the sign of a gradient makes a full step of the rounding of a true zero, and the layouts "
     "part.",
     "optim/test_optimizers.py", "test_lion_agrees_on_every_layout_but_where_the_true_gradient_is_zero"),
    ("A saved record that runs a program",
     "A pickle is one; whoever can write a checkpoint could run it on every rank.", "checkpoint/test_damage.py",
     "test_no_program_in_a_checkpoint_is_run"),
]


# ---- those that come with what this code does not have: for whoever adds it

# ---- what a person sees

def applies(entry: Pitfall) -> str:
    """The layout of a bug, in a few words."""
    config = entry.config
    words = [f"{name} {size}" for name, size in (("tp", config.tp), ("pp", config.pp), ("dp", config.dp)) if size > 1]
    return ", ".join(words) or "one process"


def lines(entry: Pitfall, right: Side, found: Side) -> list[str]:
    """A table of all steps."""
    wide = max(len(name) for name in right.weights)
    rows = [f"{'':6}{'loss':^23}   {'gradient norm':^23}   largest relative error of a gradient",
            f"{'step':6}{'right':>11} {'wrong':>11}   {'right':>11} {'wrong':>11}"]
    for step, theirs in enumerate(right.gradients):
        error, name = worst(found.gradients[step], theirs)
        rows.append(f"{step + 1:4}  {right.losses[step]:11.6f} {found.losses[step]:11.6f}   {right.norms[step]:11.6f} "
                    f"{found.norms[step]:11.6f}   "
                    + (f"{error:9.1e}  {name:{wide}}" if error > TOLERANCE else "     none").rstrip())
    rows.append(f"evaluation: {right.evaluation:.6f} right, {found.evaluation:.6f} wrong")
    if found.apart:
        rows.append(f"differs between ranks that must agree: {', '.join(sorted(found.apart))}")
    return rows


def show(pool, entry: Pitfall, steps: int):
    print(f"{entry.number}. {entry.title} ({applies(entry)})\n\n   {entry.lesson}\n   Prevented by {entry.guard}.\n")
    print("\n".join(lines(entry, *measure(pool, entry, True, steps))))
    if entry.check:
        print(entry.shown)
        try:
            check(pool, entry, wrong=True)
        except Exception as error:
            print(f"The check: {last_words(error)}")


def last_words(error: Exception) -> str:
    """Of a check that failed: the AssertionError's, from whichever process it came."""
    return next((line for line in str(error).splitlines() if line.startswith("AssertionError")),
                str(error).splitlines()[0])


COLUMNS = ("", "what goes wrong", "on", "loss: right", "wrong", "norm: right", "wrong",
           "largest wrong gradient, or what else differs")


def row_of(entry: Pitfall, right: Side, found: Side, ends: tuple[float, float]) -> str:
    """A line of the document's table: of a run of CHECKED steps, and the losses at the end of the curves."""
    numbers = *ends, right.norms[-1], found.norms[-1]
    cells = [f"[{entry.number}](#{entry.number})", entry.title, applies(entry),
             *(f"{number:.5f}" for number in numbers), telling(right, found)]
    return f"| {' | '.join(cells)} |"


def telling(right: Side, found: Side) -> str:
    """The worst gradient of the last step; if they are right, what judge() says."""
    error, name = worst(found.gradients[-1], right.gradients[-1])
    if error > TOLERANCE:
        return f"`{name}`, missing" if error == math.inf else f"`{name}`, {percent(error)}"
    try:
        judge(right, found)
    except AssertionError as difference:
        return str(difference)
    return "nothing"


def percent(error: float) -> str:
    """Two digits that count."""
    return f"{100 * error:.{max(0, 1 - math.floor(math.log10(100 * error)))}f} %"


def measured_row(pool, entry: Pitfall) -> str:
    curves = measure(pool, entry, True, LONG)
    return row_of(entry, *measure(pool, entry, True, CHECKED), tuple(sum(side.losses[-END:]) / END for side in curves))


def section(entry: Pitfall) -> str:
    return (f"<a id=\"{entry.number}\"></a>\n### {entry.number}. "
            f"{entry.title}\n\n{wrapped(f'{entry.lesson} {entry.shown}')}\n\n"
            + wrapped(f"Prevented by {entry.guard}. See it: `python tests/pitfalls.py {entry.number}`"))


def wrapped(paragraph: str, **options) -> str:
    """To lines of 120; a command stays in one."""
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), paragraph.strip())
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False, **options).replace("\0", " ")


HEAD = f"""# How a training goes wrong without a word

Few bugs of a distributed training run end it. Most leave a curve that falls. AdamW divides each gradient by its own
size, so that a factor does not show; half of a model learns too; and nobody knows what the loss would have been. Here
{{count}} such bugs are put back into this code, one at a time, and measured beside the right numbers.
`tests/docs/test_pitfalls.py` holds, at every run of the tests, that each of them turns a check red, that without it
the check is green, and that this page says what was measured.

**Read the table by its columns.** Where the two losses are the same to the last digit, no curve will ever tell. Where
the norms differ, a log of norms would, if one knew the right one. What tells is each gradient beside that of one
plain process, in float64, or, where even those agree, the weights after a step, the evaluation, or what the entry
below names. In {{lower}} of {{count}} lines the wrong loss is the *lower* one: which of two curves of so small a
model ends lower is luck, and neither looks like a bug.

Each line is the training of a tiny model (3 layers of 16, 24 samples of 8 tokens a step, most of which follow from
the one before; AdamW; clipping at 0.1) on the smallest layout that shows the bug. Right is the plain model of
`tests/support/reference.py`; where a run stops and goes on, it is the run that did not stop, and where a number is
not finite, the run that skips the step. loss: the mean of steps {LONG - END + 1} to {LONG}. norm, gradient: of step
{CHECKED}, an error relative to the largest entry of that tensor; these the tests compare with what they find. Each
line is of `python tests/pitfalls.py NUMBER --steps {LONG}`, all are of `python tests/pitfalls.py --write`; {MACHINE}.
"""


def document(rows: list[str]) -> str:
    """docs/pitfalls.md around the rows of its table."""
    losses = [[float(cell) for cell in row.split("|")[4:6]] for row in rows]
    head = HEAD.format(count=len(TABLE), lower=sum(wrong < right for right, wrong in losses))
    guarded = [f"{title}.** {lesson} `{name}` in `tests/{path}`" for title, lesson, path, name in GUARDED]
    bullets = "\n".join(wrapped(f"- **{item}", subsequent_indent="  ") for item in guarded)
    return "\n\n".join([
        *map(wrapped, head.split("\n\n")),
        "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *rows]),
        "## One by one", *map(section, TABLE),
        "## Guarded elsewhere",
        wrapped("These hang, cost memory, or need a corpus or a device; each has a test of its own."), bullets]) + "\n"


def write(pool):
    rows = []
    for entry in TABLE:
        rows.append(measured_row(pool, entry))
        print(rows[-1], flush=True)
    DOCUMENT.write_text(document(rows))


def rows_of_document() -> dict[int, str]:
    return {int(number): line for line in DOCUMENT.read_text().splitlines()
            if (number := (re.match(r"\| \[(\d+)\]", line) or [0, 0])[1])}


def main(arguments: list[str]):
    parser = argparse.ArgumentParser("python tests/pitfalls.py",
                                     description="Put a bug back, and see what it does to a training.")
    parser.add_argument("number", nargs="?", type=int, choices=range(1, len(TABLE) + 1), metavar="NUMBER",
                        help=f"of a bug, 1 to {len(TABLE)}")
    parser.add_argument("--steps", type=lambda text: max(1, int(text)), default=5, help="how many (default 5)")
    parser.add_argument("--list", action="store_true", help="list all of them")
    parser.add_argument("--write", action="store_true", help=f"measure all, and write {DOCUMENT.relative_to(ROOT)}")
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
    # workers find functions by the module's name, and __main__ is not it
    import pitfalls
    pitfalls.main(sys.argv[1:])
