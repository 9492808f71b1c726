"""Bugs that make distributed training go wrong without an error. Each can be put back here, measured, and found.

With most of these bugs no error is raised and the run goes on. The loss still falls, a little less or just as far:
AdamW divides a gradient by its own magnitude, and even half a model learns. So a loss curve is no test.
docs/pitfalls.md shows what each bug does to the loss, the gradient norm and the gradients.

    python tests/pitfalls.py 7               train five steps with and without bug 7, and compare
    python tests/pitfalls.py 7 --steps 60    train longer
    python tests/pitfalls.py --list          list all bugs
    python tests/pitfalls.py --write         measure all bugs and write docs/pitfalls.md

A bug is a function. Its docstring is the lesson, and it returns patches (object, name, replacement). The pool's workers
apply the patches, train, and undo them (support/pitfall_runner.py). tests/docs/test_pitfalls.py checks that each bug is
found, and that the code without the bug passes.
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
from functools import cache
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
from nanodomino.checkpoint import load, save
from nanodomino.checkpoint.find_checkpoints import newest_intact_checkpoint
from nanodomino.checkpoint.manifest import file_digests, manifest_text
from nanodomino.config.config import Config
from nanodomino.data import Batch
from nanodomino.layers import attention, context_parallel, dropout_and_positions, fp8, moe, router, sublayer_inside
from nanodomino.layers.positions import rotation
from nanodomino.optim import buckets, loss_scale, parameters
from nanodomino.overlap import (embedding_and_head, flight, multi_token_prediction, residual_norm, sequence_parallel,
                                slice_ops)
from nanodomino.overlap.flight import Flight
from support import ROOT, harness
from support.delayed_collectives import delayed_collectives
from support.fp8_checks import check_matmuls, check_near_fp32, check_new_weights
from support.harness import build, tiny, train_rank, train_steps
from support.pitfall_runner import (CHECKED, END, LONG, Pitfall, Side, TABLE, TOLERANCE, check, judge, measure, pitfall,
                                    worst)
from support.pool import Pool

DOCUMENT = ROOT / "docs" / "pitfalls.md"
MACHINE = ("2 shared virtual cores with torch 2.13.0 CPU: AMD EPYC, 2026-11-21; the rows about experts, multi-token "
           "prediction, fp8 and context parallelism on Intel Xeon, 2026-11-23")

DEPTH = dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.5)
# Two microbatches a step instead of eight: most of these bugs show as well, in a third of the time.
TP, PP = (dict({f"{axis}_model_parallel_size": 2}, micro_batch_size=12) for axis in ("tensor", "pipeline"))
MORE = dict(micro_batch_size=3)                      # eight microbatches, whose two slices are uneven
EVEN = dict(micro_batch_size=4)                      # both slices get the same number of samples


# ---- conditions

@cache
def delayed(when):
    """Carry out asynchronous collectives at wait() ("late") or at the launch ("early")."""
    return lambda config: delayed_collectives(when)


def one_bad_number(config):
    """In the first step, put an infinity into the last tensor-parallel rank's copy of a replicated gradient. The norm
    counts rank 0's copy, which is finite."""
    finish, steps = zero.ZeroOptimizer.finalize_gradients, []

    def poisoned(optimizer):
        finish(optimizer)
        steps.append(1)
        if len(steps) == 1 and optimizer.mesh.tp_rank == config.tp - 1:
            next(bucket for bucket in optimizer.buckets if not bucket.kind.shards).own_grad[0] = math.inf
    return [(zero.ZeroOptimizer, "finalize_gradients", poisoned)]


def one_bad_number_and_a_dynamic_scale(config):
    """Put in the same infinity, and use a dynamic loss scale, as in fp16."""
    make = loss_scale.LossScale.__init__
    return [*one_bad_number(config),
            (loss_scale.LossScale, "__init__",
             lambda self, config: make(self, dataclasses.replace(config, dtype="float16")))]


# ---- runners

def stopped_and_resumed(config, weights, data, steps):
    """train_rank, but save a checkpoint after half of the steps and resume it with a new model and optimizer."""
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
         "`nanodomino/model.py`, `GPT.initialize`: draws each weight whole, then takes the rank's shard",
         drawn=True, **TP)
def same_shards(config):
    """All ranks use one seed, and each draws only its own shard. So the t shards of a matrix start equal. In the layers
    their gradients are equal too, so the shards stay equal forever, and only 1/t of each matrix is really trained."""
    @torch.no_grad()
    def initialize(self):
        for name, weight in self.named_parameters():
            if weight.spec.std is None:
                weight.fill_(weight.spec.value)
            else:
                generator = dropout_and_positions.seeded_generator("cpu", config.seed, name)
                weight.copy_(torch.empty(weight.shape).normal_(0.0, weight.spec.std, generator=generator))
    return [(model.GPT, "initialize", initialize)]


@pitfall("Every rank uses its own seed",
         "`nanodomino/model.py`, `GPT.initialize`: seeds with (seed, global parameter name)",
         world_size=4, drawn=True, **TP)
def other_replicas(config):
    """Now the shards differ, but so do copies that must be equal: the position embeddings within a tensor-parallel
    group, and all weights across replicas. ZeRO-1 hides half of the bug. After the first step all replicas take each
    partition from its owner. So they agree, but on weights that mix several models."""
    initialize = model.GPT.initialize

    def own_seed(self):
        self.config = dataclasses.replace(config, seed=config.seed + dist.get_rank())
        initialize(self)
        self.config = config
    return [(model.GPT, "initialize", own_seed)]


# ---- scaling

@pitfall("Gradients of microbatches are summed but never divided",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: divides once, by the number of tokens in the global batch",
         **PP | MORE)
def not_divided(config):
    """The logged loss is a mean, but with m microbatches the gradient is m times the gradient of the mean. (With dp
    replicas it is dp times as large.) AdamW divides a gradient by its own magnitude, and clipping scales it to the same
    norm, so no digit of the loss curve differs. But the logged norm is m times too large, the clipping threshold is in
    effect m times too low, and the number of microbatches changes the training."""
    backward = domino.Domino.backward

    def too_large(self, pieces, gradient, *others):
        return backward(self, pieces, gradient * (config.microbatches if pieces[0].chunk.post_process else 1), *others)
    return [(domino.Domino, "backward", too_large)]


def mean_loss(config):
    def mean(loss_mask, losses):
        return (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1), torch.ones((), dtype=torch.float64)
    return [(train, "loss_func", mean)]


@pitfall("The loss is the mean of the microbatches' means",
         "`train.py`, `loss_func`: returns a sum and a token count; `nanodomino/zero.py` divides once",
         world_size=1, micro_batch_size=6)
def mean_of_means(config):
    """Microbatches may have different numbers of tokens that count. If their means are averaged, a token in a short
    document weighs more than a token in a long one. The loss is slightly wrong but plausible. A microbatch in which no
    token counts pulls the loss down."""
    return mean_loss(config)


@pitfall("Each replica divides by its own tokens",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: sums the tokens over the world before anything is "
         "divided", micro_batch_size=12)
def mean_of_replicas(config):
    """The same bug across replicas: each replica divides by its own number of tokens, and the gradients are averaged.
    Data-parallel wrappers do so by default. It is correct only if all replicas count equally many tokens."""
    return mean_loss(config)


@pitfall("The logged loss comes from one rank only",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`")
def own_loss(config):
    """Training is correct, but the curve shows the samples of one replica. Its noise is larger by a factor of
    the square root of dp, and losses of two layouts cannot be compared."""
    step = zero.ZeroOptimizer.step

    def own(self, learning_rate, totals, stop=False):
        result = step(self, learning_rate, totals, stop)
        return dataclasses.replace(result, loss=float(totals.loss_sum / totals.tokens))
    return [(zero.ZeroOptimizer, "step", own)]


# ---- tensor parallelism

@pitfall("A row-parallel bias is added before the all-reduce",
         "`nanodomino/layers/dropout_and_positions.py`, `add_residual`: adds the bias after the sum over ranks", **TP)
def bias_before_the_sum(config):
    """Every rank adds the bias to its partial result, so the sum contains it t times. A fresh model has zero biases, so
    nothing shows at first; then the optimizer learns biases that are t times too small. A checkpoint of such a run
    gives different outputs on another layout."""
    close = residual_norm.add_residual
    return [(residual_norm, "add_residual", lambda x, y, bias, mask: close(x, y, bias * config.tp, mask))]


@pitfall("Fused q, k, v are sharded as three blocks",
         "`nanodomino/layers/attention.py`, `Attention.split`: rows are ordered by group, [g, (q's, k, v), d]", **TP)
def mixed_heads(config):
    """If the rows are ordered all q, all k, all v, a contiguous shard gives the first rank the queries and half of the
    keys. The rank uses them as the q, k and v of its own heads. Shapes fit and the model trains, but it is a different
    model than on one process. The right numbers here come from a model whose rows have that order too, so on one
    process the two models would be equal."""
    local, sizes = model.local_shard, (config.num_attention_heads, 3, config.kv_channels)
    qkv_rows = config.qkv_size

    def by_kind(whole, weight):
        if len(whole) == qkv_rows:
            whole = whole.view(*sizes, -1).transpose(0, 1).reshape(whole.shape)
        return local(whole, weight)

    def split(self, qkv):
        b, s, _ = qkv.shape
        return [one.unsqueeze(3) for one in qkv.view(b, s, 3, self.groups, self.head_dim).unbind(2)]

    def core_backward(self, kernel, gradient, kept):
        b, s, _ = gradient.shape
        gradients = kept[0].backward(gradient.view(b, s, -1, self.head_dim).transpose(1, 2))
        return torch.stack([one.transpose(1, 2) for one in gradients], dim=2).view(b, s, -1)
    return [(model, "local_shard", by_kind), (harness, "local_shard", by_kind), (attention.Attention, "split", split),
            (attention.Attention, "core_backward", core_backward)]


@pitfall("The backward of an all-reduce is another all-reduce",
         "`nanodomino/domino.py`, `Domino.backward_sublayer`: y's gradient needs no communication; "
         "`nanodomino/parallel.py` explains why", **TP)
def summed_twice(config):
    """The gradient of a sum is the gradient of each term, so the backward of this all-reduce is the identity. With
    another all-reduce in its place, each sublayer's branch counts t times and the skip path once. The last sublayer's
    gradients are t times too large, and the gradients below it have a different direction."""
    backward = domino.Domino.backward_sublayer

    def again(self, slice, entry, grad_x, grad_y, ready):
        grad_y = grad_y.clone()
        dist.all_reduce(grad_y, group=self.mesh.tp_group)
        return (yield from backward(self, slice, entry, grad_x, grad_y, ready))
    return [(domino.Domino, "backward_sublayer", again)]


@pitfall("The gradient of a replicated input is not all-reduced",
         "`nanodomino/layers/sublayer_inside.py`, `LinearPair.backward`: launches the all-reduce", **TP)
def not_summed(config):
    """The opposite bug: every rank has a copy of h and computes only a part of its gradient. Without the all-reduce
    each rank continues with its own part. The norms' weights, which are replicated, diverge in the first step, and from
    then on the ranks train different models."""
    inside, head = sublayer_inside.LinearPair.backward, embedding_and_head.EmbeddingAndHead.head_backward

    def inside_alone(self, ops, *arguments):
        with mock.patch.object(ops.stream, "reduce", Flight):
            return (yield from inside(self, ops, *arguments))

    def head_alone(self, *arguments):
        with mock.patch.object(self.ops.stream, "reduce", Flight):
            return head(self, *arguments)
    return [(sublayer_inside.LinearPair, "backward", inside_alone),
            (embedding_and_head.EmbeddingAndHead, "head_backward", head_alone)]


@pitfall("Cross entropy: in the gradient each rank uses its own sum of exponentials",
         "`nanodomino/layers/cross_entropy.py`, `cross_entropy_gradient`: takes the sums over all ranks", **TP)
def own_softmax(config):
    """Each rank divides its exponentials by the sum over its own vocabulary shard. The loss is right. In the gradient
    every word's probability is too large, so the gradients of a token's logits no longer sum to zero."""
    backward = embedding_and_head.cross_entropy_gradient

    def own(logits, labels, loss, maximum, sums, gradient, vocabulary, of_rows):
        part = sums.clone()
        if vocabulary.num_words:
            part[0] = (logits - maximum.unsqueeze(-1)).exp().sum(dim=-1)
        return backward(logits, labels, loss, maximum, part, gradient, vocabulary, of_rows)
    return [(embedding_and_head, "cross_entropy_gradient", own)]


@pitfall("Cross entropy: a label counts on ranks that do not own it",
         "`nanodomino/layers/cross_entropy.py`, `partial_loss_sums`: zero if another rank owns the label", **TP)
def labels_everywhere(config):
    """A rank that does not own the label should add 0 to the sum, but adds the logit of its row 0. The loss is wrong
    and may become negative. Here the gradient at the label is computed from the loss, so it is wrong too. In code that
    computes this gradient in another way, training is right and only the curve is wrong."""
    parts = embedding_and_head.partial_loss_sums

    def everywhere(logits, labels, largest, sum_exp, maximum, vocabulary):
        sums = parts(logits, labels, largest, sum_exp, maximum, vocabulary)
        row, _ = vocabulary.local_rows(labels)
        sums[1] = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - maximum
        return sums
    return [(embedding_and_head, "partial_loss_sums", everywhere)]


@pitfall("Cross entropy: each rank subtracts its own maximum",
         "`nanodomino/overlap/embedding_and_head.py`, `EmbeddingAndHead.head`: all-reduces the maximum first", **TP)
def own_maximum(config):
    """The all-reduce adds exponentials that were scaled differently. If the ranks' largest logits are close, as in a
    fresh model, the result is nearly right."""
    reduce = slice_ops.SliceOps.all_reduce

    def no_maximum(self, piece, site, tensor, op=dist.ReduceOp.SUM):
        return reduce(self, piece, site, tensor, op) if op == dist.ReduceOp.SUM else iter(())
    return [(slice_ops.SliceOps, "all_reduce", no_maximum)]


@pitfall("Process groups along the wrong axis of the grid",
         "`nanodomino/mesh.py`, `make_mesh`: one grid [pp, dp, tp]; a test lists every group", world_size=4, **TP)
def swapped_groups(config):
    """The tensor-parallel group consists of replicas, so partial results of different samples are added. All sizes fit,
    because both axes have two ranks, and there is no error."""
    make = harness.make_mesh

    def swapped(*arguments, **others):
        mesh = make(*arguments, **others)
        return dataclasses.replace(mesh, tp_group=mesh.dp_group, dp_group=mesh.tp_group)
    return [(harness, "make_mesh", swapped)]


# ---- dropout

@pitfall("Tensor-parallel ranks drop different elements of the residual stream",
         "`nanodomino/layers/dropout_and_positions.py`, `MasksAndPositions`: a mask is a function of (seed, sample, "
         "place in the model)", hidden_dropout=0.2, **TP)
def own_masks(config):
    """Between sublayers every rank holds a copy of the residual stream. With its own dropout mask each rank has a
    different stream from the first dropout on. The all-reduces mix these streams, and the copies of norms and biases
    drift apart."""
    hidden = dropout_and_positions.MasksAndPositions.hidden_dropout_mask
    return [(dropout_and_positions.MasksAndPositions, "hidden_dropout_mask",
             lambda self, site, x: hidden(self, site + " elsewhere" * self.mesh.tp_rank, x))]


@pitfall("All ranks drop the same elements of their heads",
         "`nanodomino/layers/dropout_and_positions.py`, `MasksAndPositions.attention_inputs`: draws for all heads, "
         "then takes the rank's part", attention_dropout=0.2, **TP)
def same_masks(config):
    """Inside attention the ranks hold different heads. If all use one seed, head 0 and head n/t drop the same elements.
    No copies diverge. But the noise in different heads is not independent, and it depends on the layout."""
    core = dropout_and_positions.MasksAndPositions.attention_inputs

    def as_the_first(self, *arguments):
        first = SimpleNamespace(tp=self.mesh.tp, tp_rank=0)
        with mock.patch.object(self, "mesh", first):
            return core(self, *arguments)
    return [(dropout_and_positions.MasksAndPositions, "attention_inputs", as_the_first)]


@pitfall("Dropout stays on in evaluation",
         "`nanodomino/pipeline.py`, `run`: a schedule without a backward runs without dropout; no mode is stored",
         world_size=1, hidden_dropout=0.2, attention_dropout=0.2)
def dropped_in_evaluation(config):
    """A functional dropout does not read the module's mode, so evaluation drops too. Training is right, but the
    validation loss is that of a model without some of its activations. Usually that is worse; here, after two steps, it
    is better."""
    forward = domino.Domino.forward
    return [(domino.Domino, "forward",
             lambda self, batch, hidden, training, chunk: forward(self, batch, hidden, True, chunk))]


# ---- overlap

@pitfall("The wait for an all-reduce comes too late",
         "`nanodomino/domino.py`, `Domino.forward_sublayer` and `wait_for_sum`: launch and wait stand in one function",
         conditions=delayed("late"), slices=2, **TP | EVEN)
def waited_too_late(config):
    """A buffer is read before its all-reduce has finished. On a fast network the all-reduce has mostly finished, so
    this race looks like noise. Here the collectives move no data until wait(), and each wait comes one launch late."""
    wait = slice_ops.SliceOps.wait

    def late(self, piece, site, flights):
        due, self.overdue = getattr(self, "overdue", []), flights
        if due:
            wait(self, piece, site, due)
        return flight.result_of(flights)
    return [(slice_ops.SliceOps, "wait", late)]


def every_window_is_filled(pool):
    test_domino.test_in_every_window_between_launch_and_wait_another_slice_computes(pool, 2)


@pitfall("The wait for an all-reduce comes too early",
         "`nanodomino/domino.py`, `Domino.wait_for_sum`: waits after the yield",
         shown="Only a clock or a trace shows it: no other slice computes between launch and wait.",
         check=every_window_is_filled, slices=2, **TP | EVEN)
def waited_too_early(config):
    """In autograd's own order, or if a caller wants the result at once, the wait directly follows the launch. Every
    number is right, but no communication is hidden."""
    launch, wait = slice_ops.SliceOps.launch, slice_ops.SliceOps.wait

    def at_once(self, slice, site, launched):
        launch(self, slice, site, launched)
        wait(self, slice, site, [launched])
        return launched
    return [(slice_ops.SliceOps, "launch", at_once),
            (slice_ops.SliceOps, "wait", lambda self, piece, site, flights: flight.result_of(flights))]


class CopiedBack:
    """The handle of an all-reduce in a shared buffer; wait() copies the result out."""

    def __init__(self, work, buffer, tensor):
        self.work, self.buffer, self.tensor = work, buffer, tensor

    def wait(self):
        self.work.wait()
        self.tensor.copy_(self.buffer)


@pitfall("A buffer in flight is reused",
         "`nanodomino/overlap/slice_ops.py`, `SliceOps.launch`: every all-reduce has its own tensor; "
         "`tests/simulated_gpu/test_hazards.py` checks them all", conditions=delayed("late"), slices=2, **TP | EVEN)
def shared_buffer(config):
    """To save memory, one buffer of each size serves all all-reduces. That is safe while only one is in flight, that
    is, without overlap. With overlap the second slice overwrites the first slice's partial result."""
    buffers = {}

    def shared(tensor, group, op=dist.ReduceOp.SUM):
        if group.size() == 1:
            return Flight(tensor)
        buffer = buffers.setdefault((tensor.shape, op), torch.empty_like(tensor))

        def start():
            buffer.copy_(tensor)
            return CopiedBack(dist.all_reduce(buffer, op, group=group, async_op=True), buffer, tensor), None
        return Flight(tensor, "all_reduce", tensor, start)
    return [(owner, "prepare_all_reduce", shared) for owner in (sequence_parallel, slice_ops)]


@pitfall("One rank resumes its slices in another order",
         "`nanodomino/domino.py`, `interleave`: the order depends only on the number of slices, the same on all ranks",
         slices=2, **TP | EVEN)
def other_order(config):
    """Collectives are matched by order: the n-th call on one rank meets the n-th call on the others. After one extra
    yield on one rank, slice 0 is added to slice 1. Shapes fit, so nothing hangs and no error is raised."""
    sublayer = domino.Domino.forward_sublayer

    def hesitates(self, piece, step, *arguments):
        if self.mesh.tp_rank == 1 and piece.index == 0 and step.site == "layers.1.attention":
            yield
        return (yield from sublayer(self, piece, step, *arguments))
    return [(domino.Domino, "forward_sublayer", hesitates)]


# ---- the pipeline

@pitfall("The gradient reduction starts after the first microbatch",
         "`nanodomino/zero.py`, `ZeroOptimizer.on_gradients_ready`: a bucket waits for every microbatch",
         conditions=delayed("early"))
def reduced_too_soon(config):
    """A bucket is reduced as soon as one microbatch has reported its gradients; what later microbatches add stays on
    the rank. So training uses only a part of its batch: the curve is noisier, but as plausible."""
    on_gradients_ready, told = zero.ZeroOptimizer.on_gradients_ready, set()

    def first_backward(self, modules):
        if (self.updates, modules) not in told:
            told.add((self.updates, modules))
            for _ in range(config.microbatches):
                on_gradients_ready(self, modules)
    return [(zero.ZeroOptimizer, "on_gradients_ready", first_backward)]


@pitfall("Layers are lost when the stages do not divide them",
         "`nanodomino/model.py`, `stage_layers`: the first stages hold one layer more", **PP)
def lost_layers(config):
    """Each stage takes layers // stages layers. Three layers on two stages make a model of two, which trains like a
    model of two layers. Its parameter count is a line in the log that is easily overlooked."""
    def even(num_layers, stage, stages, depths):
        each = num_layers // stages
        return range(stage * each, (stage + 1) * each)
    return [(model, "stage_layers", even)]


@pitfall("The gradients of a tied matrix are not added over its two stages",
         "`nanodomino/zero.py`, `ZeroOptimizer.finalize_gradients`: adds them over first and last stage after the "
         "reduction over replicas", **PP)
def not_tied(config):
    """The first stage looks words up in its copy, and the last stage multiplies by its own copy. Each accumulates only
    its own gradient. The copies start equal and differ after the first step. The norm counts both, and a checkpoint
    keeps one of them."""
    kind = parameters.ParameterKind
    return [(parameters, "ParameterKind", lambda *first: kind(*first[:3], tuple(set(first[3]) - {"embedding"})))]


# ---- the optimizer

def counts(rule):
    return [(zero.ZeroOptimizer, "counts_in_norm", lambda self, bucket: rule(bucket, self.mesh, bucket.kind))]


@pitfall("The gradient norm counts a tied matrix twice",
         "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **PP)
def tied_twice(config):
    """Both stages hold the full gradient of their copy, and both count it. The norm is too large, by at most a factor
    of the square root of two, so clipping acts too early."""
    return counts(lambda bucket, mesh, kind: ("tp" in kind.shards or mesh.tp_rank == 0)
                  and (bucket.partitions > 1 or mesh.dp_rank == 0))


@pitfall("The gradient norm counts replicated parameters once per rank",
         "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **TP)
def copies_counted(config):
    """Norms, biases and positions are replicated on every tensor-parallel rank, and a plain sum of all squares counts
    them t times. The norm grows with the number of ranks, so clipping depends on the layout."""
    return counts(lambda bucket, mesh, kind: (bucket.partitions > 1 or mesh.dp_rank == 0)
                  and ("embedding" not in kind.addends or mesh.is_first_stage))


@pitfall("The gradient norm leaves shards out",
         "`nanodomino/zero.py`, `ZeroOptimizer.counts_in_norm`", **TP)
def shards_dropped(config):
    """To count replicated parameters once, all ranks but the first are left out, and with them their shards, which no
    other rank holds. The norm is too small and clipping too weak."""
    return counts(lambda bucket, mesh, kind: mesh.tp_rank == 0 and (bucket.partitions > 1 or mesh.dp_rank == 0)
                  and ("embedding" not in kind.addends or mesh.is_first_stage))


@pitfall("Each rank clips by its own norm",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: sums the squares over the world, each once", **TP)
def own_norm(config):
    """Each rank computes a norm of the gradients that it holds, without any sum over ranks. Shards are scaled by
    different factors, and so are the copies of norms and biases, which are then no longer equal."""
    sums = zero.ZeroOptimizer.sum_over_world

    def own(self, *arguments):
        loss, tokens, _, stops = sums(self, *arguments)
        return [loss, tokens, float(sum(zero.sum_of_squares(bucket.own_grad) for bucket in self.buckets)), stops]
    return [(zero.ZeroOptimizer, "sum_over_world", own)]


@pitfall("Biases and norms decay",
         "`nanodomino/optim/buckets.py`, `sort_into_buckets`: all parameters in a bucket have the same `ParameterKind`",
         world_size=1)
def all_decay(config):
    """A flat buffer does not know which parameter its elements belong to, so one weight decay applies to all. Norm
    weights are slowly pulled from 1 towards 0. Loss and gradients of the first step are right."""
    kind = parameters.ParameterKind
    return [(parameters, "ParameterKind", lambda update, *others: kind("decay", *others))]


@pitfall("One rank skips a step, the others do not",
         "`nanodomino/zero.py`, `ZeroOptimizer.sum_over_world`: gradients outside the norm must be finite too, so that"
         " all ranks decide alike", runner=train_rank, conditions=one_bad_number, straight=True, **TP)
def skips_alone(config):
    """A gradient overflows on one rank. If that rank alone skips the step, its shards are one step behind and its
    replicated parameters differ. With replicas the next collective hangs; without them nothing is ever noticed. Here
    the infinity is in a copy that the norm does not count."""
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


@pitfall("Gradients are accumulated in 16 bits",
         "`nanodomino/optim/buckets.py`, `Bucket`: `main_grad` is fp32",
         shown="It is clearest with 300 equal gradients, whose sum in bfloat16 is far from 300 times one of them.",
         world_size=1, micro_batch_size=1, check=bfloat16_accumulates)
def added_in_16_bit(config):
    """bfloat16 has 8 significant bits. With many microbatches each later gradient is too small to change the sum, and
    after 256 equal gradients the sum stops growing. With one microbatch the result is right."""
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
         "`nanodomino/optim/buckets.py`, `Bucket`; `nanodomino/zero.py`, `ZeroOptimizer.zero_grad`: zeros the whole "
         "buffer, not only the views of parameters", hidden_size=17, num_attention_heads=1)
def padding_counts(config):
    """A flat buffer is padded to a length that can be partitioned. If the padding keeps whatever the memory held, the
    norm and the optimizer take it for gradients. If the memory happens to be zero, the result is right."""
    make = buckets.Bucket.__init__

    def as_found(self, *arguments, **others):
        make(self, *arguments, **others)
        self.main_grad.fill_(0.5)

    def views_alone(self):
        for bucket in self.buckets:
            for weight in bucket.parameters:
                weight.main_grad.zero_()
        self.reports_left = dict(self.reports_needed)
    return [(buckets.Bucket, "__init__", as_found), (zero.ZeroOptimizer, "zero_grad", views_alone)]


# ---- data and evaluation

@pitfall("All replicas read the same samples",
         "`train.py`, `get_batch`; `nanodomino/data.py`, `sample_ids_of`: a pure function of step and position in the "
         "batch")
def same_samples(config):
    """Each replica starts its own reader, and all read the same samples as the first replica. With two replicas the
    batch has only half of its samples, each twice. All ranks agree, and the curve looks good."""
    get_batch = train.get_batch
    return [(train, "get_batch", lambda dataset, config, mesh, *others: get_batch(dataset, config,
                                                                                  dataclasses.replace(mesh, dp_rank=0),
                                                                                  *others))]


@pitfall("The ranks of a tensor-parallel group read different samples",
         "`train.py`, `get_batch`: chooses samples by the replica's rank, the same on all ranks of the group",
         **TP | MORE)
def other_samples(config):
    """A sampler that gets the global rank deals out samples to all ranks, even to ranks that work on one sample
    together. Partial results of different samples are added: one rank looks up words that the other has never seen."""
    get_batch = train.get_batch

    def own(dataset, config, mesh, step, shuffle, microbatch, chunk):
        return get_batch(dataset, config, mesh, step, shuffle, (microbatch + mesh.tp_rank) % config.microbatches, chunk)
    return [(train, "get_batch", own)]


@pitfall("Evaluation averages the ranks' means",
         "`train.py`, `evaluate`: sums over the world and divides once")
def evaluation_of_means(config):
    """Different numbers of tokens count on different ranks, mostly in the last batch. Training is right, and the
    validation loss depends on the layout."""
    def mean(stage, dataset, config, mesh, on_action=None):
        steps = range(min(config.eval_iters, math.ceil(dataset.windows / config.global_batch_size)))
        totals = [train.run_schedule(config.timetable.forwards, step, stage, dataset, config, mesh, shuffle=False)
                  for step in steps]
        means = sum(one.loss_sum for one in totals) / sum(one.tokens for one in totals)
        dist.all_reduce(means)
        return (means / dist.get_world_size()).item()
    return [(train, "evaluate", mean)]


@pitfall("Evaluation drops the last, incomplete batch",
         "`train.py`, `evaluate`: rounds the number of batches up; `nanodomino/data.py`, `TokenDataset.batch` pads "
         "with rows that do not count", world_size=1)
def last_batch_dropped(config):
    """A loader's drop_last is left on. How much text is evaluated then depends on the batch size, and a split smaller
    than one batch is not evaluated at all."""
    evaluate = train.evaluate

    def full_batches(stage, dataset, config, *others):
        full = dataset.windows // config.global_batch_size * config.global_batch_size
        return evaluate(stage, SimpleNamespace(windows=full, batch=dataset.batch), config, *others)
    return [(train, "evaluate", full_batches)]


# ---- resuming

RESUMED = dict(runner=stopped_and_resumed, straight=True)


def from_its_start(change):
    """Apply the patches change(first step) from the moment that restore() has loaded a checkpoint."""
    restore = load.restore

    def restored(folder, gpt, optimizer, mesh, weights_only=False):
        first = restore(folder, gpt, optimizer, mesh, weights_only)
        for owner, name, replacement in change(first):
            setattr(owner, name, replacement)
        return first
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in change(0)]
    return [(load, "restore", restored), *originals]        # patched with themselves, so that they are restored


@pitfall("A resumed run starts the data again",
         "`nanodomino/data.py`: the samples of a step are a function of (seed, step)", **RESUMED)
def data_again(config):
    """The loader is new and begins with the first sample. Some text is seen twice, other text never, and each restart
    repeats that. The loss falls below its previous level, because the model has seen this text before."""
    run = train.run_schedule
    return from_its_start(lambda first: [(train, "run_schedule",
                                          lambda table, step, *others, **more: run(table, step - first, *others,
                                                                                   **more))])


@pitfall("A resumed run restarts the learning-rate schedule",
         "`train.py`, `learning_rate`: a function of the step", **RESUMED)
def schedule_again(config):
    """The scheduler counts its own calls and is not saved. The rate warms up again and never decays; a bump in the
    curve at each restart is easily blamed on the data."""
    rate = train.learning_rate
    return from_its_start(lambda first: [(train, "learning_rate", lambda step, config: rate(step - first, config))])


@pitfall("A resumed run repeats the dropout of its first steps",
         "`nanodomino/layers/dropout_and_positions.py`, `MasksAndPositions`: seeds with the sample's number in the run",
         hidden_dropout=0.2, **RESUMED)
def dropout_again(config):
    """The generator's state is not saved, and the new process uses the initial seed. Nothing breaks, but an interrupted
    run differs from an uninterrupted one, so no two runs can be compared."""
    draw = dropout_and_positions.MasksAndPositions.draw_masks

    def shifted(first):
        def again(self, *arguments):
            old = self.sample_ids and [sample - first * config.global_batch_size for sample in self.sample_ids]
            with mock.patch.object(self, "sample_ids", old):
                return draw(self, *arguments)
        return [(dropout_and_positions.MasksAndPositions, "draw_masks", again)]
    return from_its_start(shifted)


@pitfall("Adam's step count is lost",
         "`nanodomino/zero.py`, `ZeroOptimizer.allocate_own_state`: sets each count from the manifest", **RESUMED)
def count_lost(config):
    """The moments are restored, but the step count is not. Adam divides the moments by 1 - beta^count, which is right
    only if they have been accumulated for `count` steps. With the betas used here the first update after a restart is
    up to 2.2 times too large."""
    place = zero.ZeroOptimizer.allocate_own_state

    def uncounted(self, bucket, name):
        found = place(self, bucket, name)
        if name != "weight":
            self.optimizer.state[bucket.master]["step"].zero_()
        return found
    return [(zero.ZeroOptimizer, "allocate_own_state", uncounted)]


@pitfall("Adam's step count is taken from the training step",
         "`nanodomino/checkpoint/load.py`, `restore`: the manifest stores `adam_steps` beside `step`",
         conditions=one_bad_number, **RESUMED, **TP)
def count_from_step(config):
    """The two counts are equal until a step is skipped. After that, a resumed run assumes one update too many. The
    difference is small, but the bits are no longer the same."""
    read = load.read_manifest

    def as_step(folder):
        manifest = read(folder)
        return {**manifest, "adam_steps": manifest["step"]}
    return [(load, "read_manifest", as_step)]


def die_while_saving(folder):
    """Save a checkpoint whose data cannot be written, and return the failure's message."""
    config = tiny(1)
    mesh, gpt, optimizer, _ = build(config)
    saver = save.Saver(Path(folder), mesh, keep_last=1)
    saver.save(1, gpt, optimizer, config)
    saver.wait()
    return saver.failure()


def unfinished_checkpoint_is_not_used(pool):
    with tempfile.TemporaryDirectory() as folder:
        (failure,) = pool.run(die_while_saving, folder, world_size=1)
        assert "the power is out" in failure
        found = newest_intact_checkpoint(Path(folder), report=lambda line: None)
        assert found is None, f"{found.name} is taken for complete"


def power_cut(config):
    def write_boxes(path, boxes):
        raise OSError("the power is out")
    return [(save, "write_boxes", write_boxes)]


@pitfall("An unfinished checkpoint is taken for a complete one",
         "`nanodomino/checkpoint/save.py`, `Saver.write` and `complete`: write data, then the manifest, then rename "
         "the folder",
         shown="No number of the training shows it, but the next start does: the newest checkpoint lacks its tensors.",
         world_size=1, check=unfinished_checkpoint_is_not_used, conditions=power_cut)
def named_too_early(config):
    """The folder gets its final name and its manifest before the data is written. A kill in between leaves a folder
    that the next start takes for the newest checkpoint."""
    def write(self, step, boxes, manifest):
        final = self.run_dir / "checkpoints" / f"step-{step:08d}"
        final.mkdir(parents=True)
        (final / "index.json").write_text("{}")
        files = file_digests([final / "index.json"])
        (final / "manifest.json").write_text(manifest_text({**manifest, "config": {}, "files": files}))
        save.write_boxes(final / "rank-00000.bin", boxes)
    return [(save.Saver, "write", write)]


# ---- recomputation

@pitfall("Recomputation draws new dropout masks",
         "`nanodomino/layers/dropout_and_positions.py`, `MasksAndPositions`: a mask is a function of (seed, sample, "
         "place in the model), also when it is drawn again",
         world_size=1, hidden_dropout=0.2, attention_dropout=0.2, recompute_granularity="full")
def new_masks(config):
    """Backward recomputes part of the forward, but the random generator has advanced since. So backward differentiates
    another function than the one whose loss was computed. The loss of the first step is right, but its gradients are
    wrong. All that shows is more noise."""
    draw = dropout_and_positions.MasksAndPositions.draw_masks

    def moved_on(self, site, *others):
        before = self.__dict__.setdefault("drawn", [])
        before.append(site)
        return draw(self, site + " again" * (before.count(site) > 1), *others)
    return [(dropout_and_positions.MasksAndPositions, "draw_masks", moved_on)]


# ---- ZeRO-2

@pitfall("The owner keeps only the last microbatch's gradients",
         "`nanodomino/zero.py`, `ZeroOptimizer.finish_reduces`: adds what arrives to the own partition",
         zero_stage=2, conditions=delayed("early"))
def kept_and_not_added(config):
    """Each microbatch's gradients are reduced to their owner, which receives them into its own partition and so
    overwrites the earlier ones. With one microbatch per step the result is right. With more, training uses only a
    part of its batch."""
    finish = zero.ZeroOptimizer.finish_reduces

    def overwrites(self, left=0):
        while len(self.reduces_in_flight) > left:
            self.reduces_in_flight[0][0].own_grad.zero_()
            finish(self, len(self.reduces_in_flight) - 1)
    return [(zero.ZeroOptimizer, "finish_reduces", overwrites)]


# ---- the loss scale

@pitfall("Gradients are clipped before they are unscaled",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: divides the norm by the scale first",
         world_size=1, loss_scale=1024.0)
def clipped_before_unscaled(config):
    """The threshold is meant for gradients of the mean loss, but it is compared with a norm that is `scale` times as
    large. So every step is clipped, to a norm that changes whenever the scale does. AdamW divides a gradient by its own
    magnitude, so the bug shows only where that is close to epsilon."""
    update = zero.ZeroOptimizer.update
    return [(zero.ZeroOptimizer, "update",
             lambda self, learning_rate, grad_norm, scale: update(self, learning_rate, grad_norm * config.loss_scale,
                                                                  scale))]


@pitfall("The loss scale falls only on the rank that overflowed",
         "`nanodomino/zero.py`, `ZeroOptimizer.step`: updates the scale from what the whole world found",
         conditions=one_bad_number_and_a_dynamic_scale, straight=True, hysteresis=1, **TP)
def own_scale(config):
    """All ranks skip the step, but each decides from its own gradients whether to lower the scale. From then on one
    rank's term in every all-reduce is half as large, and its shards' gradients are divided by half as much. Each
    sublayer's gradient changes direction, and the copies diverge."""
    sums, update = zero.ZeroOptimizer.sum_over_world, loss_scale.LossScale.update

    def own(self, *arguments):
        self.loss_scale.own = not all(bool(bucket.own_grad.isfinite().all()) for bucket in self.buckets)
        return sums(self, *arguments)
    return [(zero.ZeroOptimizer, "sum_over_world", own),
            (loss_scale.LossScale, "update", lambda self, overflow: update(self, self.own))]


# ---- sequence parallelism

@pitfall("Sequence parallelism: partial gradients are not summed over the tensor-parallel ranks",
         "`nanodomino/zero.py`, `ZeroOptimizer.finalize_gradients`: all-reduces the gradients of replicated parameters"
         " once a step", sequence_parallel=True, **TP | MORE)
def not_summed_over_the_cut(config):
    """With the residual stream sharded by tokens, norms, row-parallel biases and positions are still replicated but see
    only their rank's tokens, so their gradients are partial. Matrices are right. Each rank's copy of a norm learns from
    its own half of the text, and the copies diverge in the first step."""
    return [(zero.ZeroOptimizer, "finalize_gradients", lambda self: without_sums(self, "tp"))]


def without_sums(self, group, finish=zero.ZeroOptimizer.finalize_gradients):
    kinds = [bucket.kind for bucket in self.buckets]
    for bucket, kind in zip(self.buckets, kinds):
        bucket.kind = dataclasses.replace(kind, addends=tuple(name for name in kind.addends if name != group))
    finish(self)
    for bucket, kind in zip(self.buckets, kinds):
        bucket.kind = kind


@pitfall("Sequence parallelism: masks are drawn for the rank's own tokens",
         "`nanodomino/layers/dropout_and_positions.py`, `MasksAndPositions.hidden_dropout_mask`: draws for the whole "
         "sample, then shards as the residual stream is sharded",
         hidden_dropout=0.2, sequence_parallel=True, **TP | MORE)
def masks_of_a_part(config):
    """A rank holds s/t of a sample's tokens and draws that many masks from the seed that all ranks share. So the first
    token of each part drops the same elements. The same noise occurs t times, and it depends on the layout. No copies
    diverge."""
    hidden = dropout_and_positions.MasksAndPositions.hidden_dropout_mask

    def alone(self, *arguments):
        with mock.patch.object(self, "stream", None):
            return hidden(self, *arguments)
    return [(dropout_and_positions.MasksAndPositions, "hidden_dropout_mask", alone)]


# ---- model families

@pitfall("Gate and up of a SwiGLU are sharded as one block",
         "`nanodomino/parallel.py`, `ColumnParallelLinear`: cuts each of the stacked matrices, so that a rank has its "
         "part of both", swiglu=True, **TP)
def one_block(config):
    """W1 holds the gate's rows, then up's. A contiguous shard gives the first rank all of gate and the second rank all
    of up. Each rank uses its block as if it held half of gate and half of up. Shapes fit and the model trains, but it
    is a different model than on one process."""
    local = model.local_shard

    def cut(whole, weight):
        gate_and_up = len(weight.spec.shape) > weight.dim()
        if not gate_and_up:
            return local(whole, weight)
        rows = whole.flatten(0, whole.dim() - weight.dim())
        return rows[:len(weight)] if weight.spec.offset[1] == 0 else rows[-len(weight):]
    return [(model, "local_shard", cut), (harness, "local_shard", cut)]


@pitfall("Norms of q and k learn from one rank's heads",
         "`nanodomino/layers/attention.py`, `Attention`: declares the tp ranks' gradients as `addends`, which "
         "zero.py sums", qk_layernorm=True, normalization="RMSNorm", **TP)
def norms_of_own_heads(config):
    """One weight [d] normalizes q in every head. Each rank has only some of the heads, so it computes only a part of
    this weight's gradient. The other norms act on the replicated residual stream, and their gradients are complete on
    every rank. Without a sum over the ranks the copies of q's and k's weights diverge in the first step, and each fits
    its rank's heads slightly better than a common weight would."""
    return [(zero.ZeroOptimizer, "finalize_gradients", lambda self: without_sums(self, "tp"))]


@pitfall("RoPE rotates neighbours instead of halves",
         "`nanodomino/layers/positions.py`, `rotate`: pairs an element of the first half with an element of the "
         "second, as Llama's weights on Hugging Face need", world_size=1, position_embedding_type="rope", kv_channels=4)
def neighbours(config):
    """RoFormer's paper rotates each even element with the odd element after it, and Meta's own files are made for that.
    Files on Hugging Face have their rows in another order, for halves. A new model learns equally well with both.
    If weights made for one are used with the other, the model still writes text, but bad text."""
    def rotate(x, turn):
        (cos, sin), (first, second) = turn, (x[..., 0::2], x[..., 1::2])
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return [(attention, "rotate", rotate)]


# ---- experts

MOE = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24, num_layers=2)
REPLICAS = dict(micro_batch_size=12, zero_stage=0)


@pitfall("The weights of the chosen experts do not sum to 1",
         "`nanodomino/layers/router.py`, `Router.weights`: divides by the sum over the chosen experts", world_size=1,
         **MOE, moe_router_score_function="sigmoid")
def weights_not_divided(config):
    """The scores of all experts are computed first, then the best k are taken and used as they are. A model that is
    trained so from the start learns to live with it. But weights that were trained with the division (Mixtral,
    DeepSeek-V3) give wrong outputs, as large as the scores happen to be."""
    def scores(self, logits, experts):
        return self.scores(logits).gather(-1, experts)
    return [(router.Router, "weights", scores)]


@pitfall("The router gets no gradient from the loss of the model",
         "`nanodomino/layers/router.py`, `Router.backward`: the gradient of the weights reaches the logits",
         world_size=1, **MOE, moe_aux_loss_coeff=0.01)
def weights_detached(config):
    """A choice has no gradient, so the router learns from the loss only through the weights of the chosen experts. If
    the weights are detached together with the choice, only the auxiliary loss trains the router. It then learns to
    balance the load, whatever the tokens need, and a plot of the load looks healthy."""
    backward = router.Router.backward
    return [(router.Router, "backward", lambda self, routing, grad_weights, *others:
             backward(self, routing, torch.zeros_like(grad_weights), *others))]


@pitfall("The auxiliary loss has a gradient through the counts",
         "`nanodomino/layers/router.py`, `Router.loss`: the shares f_e are counts, without a gradient", world_size=1,
         **MOE, moe_aux_loss_coeff=0.1)
def soft_counts(config):
    """The count of an expert's tokens is replaced by the sum of their probabilities, which has a gradient. This loss is
    also smallest for a balanced load, and the curve looks the same. But the gradient is different: it lowers an
    expert's probability because the probability is high, not because the load is."""
    def loss(self, logits, experts):
        (_, s, count), probabilities = logits.shape, self.scores(logits)
        chosen = torch.zeros_like(probabilities).scatter(-1, experts, 1.0)
        shares = (chosen * probabilities).sum(dim=1) / (s * self.topk)
        return config.moe_aux_loss_coeff * s * count * (shares * probabilities.mean(dim=1)).sum()
    return [(router.Router, "loss", loss)]


@pitfall("The auxiliary loss is computed for a microbatch",
         "`nanodomino/layers/router.py`, `Router.loss`: a mean within each sample, then a sum over samples",
         world_size=1, **MOE | MORE, moe_aux_loss_coeff=0.1, slices=2)
def balance_of_a_slice(config):
    """The loss multiplies two means, so it is not a sum over tokens: the loss of two halves is not the mean of their
    losses. If it is computed for whatever samples share a microbatch, slice and replica, then the layout changes the
    gradients. The effect on the curve is small, so nobody looks for it when two layouts differ."""
    loss = router.Router.loss
    return [(router.Router, "loss", lambda self, logits, experts:
             loss(self, logits.flatten(0, 1)[None], experts.flatten(0, 1)[None]))]


@pitfall("Every tensor-parallel rank adds the auxiliary loss",
         "`nanodomino/layers/router.py`, `Router`: `counts_here` is true on one rank of the group", **TP, **MOE,
         moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
def auxiliary_loss_on_all_ranks(config):
    """All ranks of the group route the same tokens. The gradient of the router's weight is a sum of the ranks' addends,
    because each rank knows only its own part of the experts' outputs. But each knows the whole auxiliary loss. If all
    add its gradient, the coefficient is in effect t times as large."""
    make = router.Router.__init__

    def everywhere(self, *arguments):
        make(self, *arguments)
        self.counts_here = True
    return [(router.Router, "__init__", everywhere)]


@pitfall("The gradients of experts are summed over all replicas",
         "`nanodomino/layers/moe.py`, `MoE`: declares `expert_dp` as the replicas of an expert", **REPLICAS, **MOE,
         expert_model_parallel_size=2)
def summed_over_other_experts(config):
    """With expert parallelism, a replica holds other experts than its neighbour, in tensors of the same shape. A
    data-parallel wrapper sums all gradients over all replicas, so expert 0 learns from the tokens of expert 2 too.
    Copies stay equal, and the loss falls."""
    kind = parameters.ParameterKind
    return [(parameters, "ParameterKind", lambda update, shards, replicas, addends: kind(update, shards, "dp",
                                                                                         addends))]


@pitfall("The results of experts go to other tokens",
         "`nanodomino/layers/moe.py`, `combine`: reads the rows with the inverse of the permutation that sorted "
         "them", world_size=1, **MOE)
def sorted_order(config):
    """The rows were sorted by expert, and the results come back in this order. To undo a permutation, index with its
    inverse. If the code indexes with the permutation itself, most tokens get the results of other tokens. Shapes fit,
    and the rest of the model still learns."""
    plan = moe.plan_dispatch

    def not_inverted(*arguments):
        dispatch = plan(*arguments)
        return dataclasses.replace(dispatch, inverse_permutation=dispatch.permutation)
    return [(moe, "plan_dispatch", not_inverted)]


@pitfall("The expert bias is part of the weights",
         "`nanodomino/layers/router.py`, `Router.choose`: adds the bias for the choice only", world_size=1, **MOE,
         moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.05)
def biased_weights(config):
    """The bias makes an expert more likely to be chosen. If the weights are taken from the same biased scores, the bias
    also makes its output larger, although the bias follows the load and not the loss. A fresh model has zero biases, so
    the first step is right."""
    weights, function = router.Router.weights, router.SCORE_FUNCTIONS["sigmoid"]

    def biased(self, *arguments):
        with mock.patch.object(self, "scores", lambda logits: function(logits) + self.expert_bias):
            return weights(self, *arguments)
    return [(router.Router, "weights", biased)]


@pitfall("The expert bias follows the counts of one replica",
         "`nanodomino/zero.py`, `ZeroOptimizer.reduce`: sums the counts over the replicas like a gradient", **REPLICAS,
         **MOE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
         moe_router_bias_update_rate=0.05)
def own_counts(config):
    """The bias is no parameter for the optimizer, so its update is written by hand, and the sum over the replicas is
    forgotten. Each replica balances the load of its own samples. The copies of the bias differ from the first step on,
    so two replicas may send the same token to different experts."""
    reduce = zero.ZeroOptimizer.reduce
    return [(zero.ZeroOptimizer, "reduce",
             lambda self, bucket: None if bucket.kind.update == "sign" else reduce(self, bucket))]


@pitfall("The final norm is reported complete after the head of a depth",
         "`nanodomino/config/config.py`, `Config.head_uses`: the final norm and the head declare as many uses, and "
         "the optimizer waits for as many reports", conditions=delayed("early"), bucket_size=1,
         untie_embeddings_and_output_weights=True, **REPLICAS, **DEPTH)
def complete_too_early(config):
    """With multi-token prediction a microbatch passes through the final norm and the head several times. Backward
    starts with the last depth and ends with the main model's head. If the gradients count as complete after the first
    of these, the replicas sum gradients that lack those of the main loss, and each adds its own afterwards."""
    def only_once(self, *modules):
        self.remaining[modules] = self.remaining.get(modules, self.slices) - 1
        if self.on_gradients_ready and self.remaining[modules] == 0:
            self.on_gradients_ready(modules)
    return [(Config, "head_uses", 1), (domino.GradientsReady, "__call__", only_once)]


@pitfall("The labels of a depth wrap around the end of the sample",
         "`nanodomino/data.py`, `Batch.look_ahead`: the last d places of depth d do not count", world_size=1, **DEPTH)
def labels_wrap_around(config):
    """Depth 1 predicts the token after the next one, so its labels are the labels moved by one place. `roll` moves
    them, and puts the sample's first label at the end. The loss mask moves in the same way, so the depth learns that
    the sample starts again. Only one place in s is wrong."""
    def rolled(batch, depths, documents):
        for _ in range(depths):
            batch.ahead = dataclasses.replace(batch, tokens=batch.labels, labels=batch.labels.roll(-1, dims=1),
                                              loss_mask=batch.loss_mask.roll(-1, dims=1))
            batch = batch.ahead
    return [(Batch, "look_ahead", rolled)]


@pitfall("A depth's gradient ends at the depth",
         "`nanodomino/domino.py`, `Domino.backward_slice`: adds it to the gradient of the main model's last hidden "
         "states", world_size=1, **DEPTH)
def depth_detached(config):
    """The depth learns, and its loss falls. But the layers of the main model learn nothing from it, although better
    hidden states are the purpose of multi-token prediction. Only the embedding, the final norm and the head get
    gradients from the depth, because the main model and the depth share them."""
    run = multi_token_prediction.PredictionDepths.backward

    def without_result(self, slice, ready):
        yield from run(self, slice, ready)
    return [(multi_token_prediction.PredictionDepths, "backward", without_result)]


@pitfall("The gradients of an untied word embedding's copies are not summed",
         "`nanodomino/model.py`, `Embedding`: declares `embedding` as addends for an untied head too, if the model "
         "has depths", untie_embeddings_and_output_weights=True, **PP, **DEPTH)
def embedding_of_its_own(config):
    """With an untied head, only the first stage needs the word embedding. But a depth looks up words on the last stage,
    which therefore holds a copy. This copy gets only the gradients of the depths' look-ups, and the first stage's copy
    gets all others. The two copies drift apart, and a checkpoint keeps one of them."""
    return not_tied(config)


# ---- fp8

FP8 = dict(world_size=1, dtype="float32", fp8_format="hybrid", straight=True)


def new_weights_are_used(pool):
    pool.run(check_new_weights, world_size=1)


@pitfall("Converted weights outlive the update",
         "`nanodomino/zero.py`, `ZeroOptimizer.gather_weights`: clears each bucket's `derived`",
         check=new_weights_are_used, **FP8)
def stale_weights(config):
    """Weights are converted to 8 bits once a step, and the copies are kept. If they are not dropped after the update,
    all later steps multiply by the first weights. The master weights still move, and so do embedding, norms and
    biases, which learn to live with fixed matrices. The loss falls, and the first step is right."""
    class Kept(dict):
        def clear(self):
            pass
    make = buckets.Bucket.__init__

    def keeping(self, *arguments, **options):
        make(self, *arguments, **options)
        self.derived = Kept()
    return [(buckets.Bucket, "__init__", keeping)]


def gradients_are_near_those_of_fp32(pool):
    check_near_fp32(pool, {}, "hybrid", "tensorwise")


@pitfall("Gradients are converted with the weight's scale",
         "`nanodomino/layers/fp8.py`, `Fp8Weight.convert`: each tensor has its own scale, each kind its type",
         check=gradients_are_near_those_of_fp32, **FP8)
def weights_scale(config):
    """The matmul has the scale of its weight already, and this seems to serve for the gradient too. But gradients
    differ from weights by powers of ten. Here they are larger, so they saturate at 448 times the scale; with a mean
    loss they would be smaller and become 0. AdamW hides both, because it divides each gradient by its own
    magnitude."""
    convert = fp8.Fp8Weight.convert

    def of_the_weight(self, x):
        if not self.transposed or isinstance(x, fp8.Fp8Tensor):
            return convert(self, x)
        scale = self.in_8_bits().scale
        return fp8.Fp8Tensor((x / scale).clamp(-448, 448).to(fp8.E4M3), scale)
    return [(fp8.Fp8Weight, "convert", of_the_weight)]


def matmuls_equal_those_of_rounded_numbers(pool):
    pool.run(check_matmuls, "hybrid", "rowwise", torch.float32, 1e-6, (32, 32), world_size=1)


@pitfall("A transposed weight keeps the scales of its rows",
         "`nanodomino/layers/fp8.py`, `Fp8Recipe.convert_transposed`: columns have scales of their own",
         check=matmuls_equal_those_of_rounded_numbers, fp8_recipe="rowwise", **FP8)
def scales_of_rows(config):
    """An input gradient adds up over the rows of W, so rows of W^T need scales of their own. Only in a square matrix
    are there as many scales for rows as for columns. There the old scales pass for the new ones, and each column is
    multiplied by the scale of a row. In this model only attention's second matrix is square."""
    transposed = fp8.Fp8Recipe.convert_transposed

    def keeping(self, x, to_8_bits):
        if isinstance(x, fp8.Fp8Tensor) or x.dim() > 2 or x.size(0) != x.size(1):
            return transposed(self, x, to_8_bits)
        rows = self.convert(x, to_8_bits)
        return fp8.Fp8Tensor(rows.values.t().contiguous(), rows.scale)
    return [(fp8.Fp8Recipe, "convert_transposed", keeping)]


# ---- context parallelism

SHARED = dict(context_parallel_size=2, micro_batch_size=12)


@pitfall("Context parallelism: RoPE rotates by a token's index on its rank",
         "`nanodomino/data.py`, `Batch.at_own_places`: cuts the positions like the tokens", **SHARED,
         position_embedding_type="rope", kv_channels=4)
def rotated_by_own_index(config):
    """A rank holds two parts of a sample and counts its tokens from 0. Within a part the distances are right. But
    tokens of different parts are rotated as if they were close together, or had the same place. Every rank does the
    same, no shape is wrong, and the model learns with the wrong distances. But its weights then fit only this
    layout."""
    return [(context_parallel, "rotation", lambda config, positions, s, device: rotation(config, None, s, device))]


@pitfall("Context parallelism: each rank keeps the gradients of its own keys",
         "`nanodomino/layers/context_parallel.py`, `GatheredKeys.core_backward`: sums them with a reduce-scatter",
         **SHARED)
def keys_of_own_queries(config):
    """The queries of all ranks attend to a key, so each rank has an addend of its gradient. If an all-gather is
    differentiated as if it were a copy, a rank takes its own part and discards the rest. The gradients of queries are
    complete, and so is everything after attention. Only what reaches the keys and values of other ranks is lost."""
    def own_part(addend, shape, group, name):
        return Flight(addend.view(-1).chunk(group.size())[group.rank()].view(shape))
    return [(slice_ops, "prepare_reduce_scatter", own_part)]


@pitfall("Context parallelism: gathered keys stay in the order of the ranks",
         "`nanodomino/layers/positions.py`, `in_order`: puts the parts of the sample in their order", **SHARED)
def order_of_the_ranks(config):
    """To balance the causal mask, rank r holds parts r and 2 c - 1 - r of a sample. After the all-gather, the keys lie
    rank by rank, but the mask counts them in the order of the sample. So a token attends to some later tokens, which
    contain the answer, and not to some earlier ones. All shapes fit."""
    def by_rank(b, s, ranks):
        return torch.cat(list(torch.arange(b * s).view(ranks, b, -1)), dim=1)
    return [(context_parallel, "gathered_places", by_rank)]


# ---- bugs that are not put back here, and the tests that guard against them

GUARDED = [
    ("Positions that restart at 0 with every cached token",
     "A key rotated for position 0 is right only for the first token. Keys that were cached before the window slid are "
     "wrong too.",
     "generate/test_generate.py",
     "test_every_family_generates_what_the_plain_model_does_within_documents"),
    ("An imported square matrix that is not transposed",
     "GPT-2's own files store all matrices transposed. The shape of a square matrix fits without a transpose.",
     "huggingface/test_conversion.py", "test_gradients_equal_those_of_transformers"),
    ("A token that attends to the previous document",
     "No error is raised. The model learns from unrelated text, and computes something else if each document stands "
     "alone.",
     "layers/test_positions.py", "test_a_packed_sample_is_its_documents_one_by_one"),
    ("Messages whose order works only while they are small",
     "A send returns at once as long as the transport buffers the message. The first larger message waits for its "
     "receive, and two stages that both send wait forever.",
     "test_pipeline.py", "test_messages_of_megabytes_do_not_deadlock"),
    ("Two stages that communicate for the first time",
     "NCCL connects two ranks at their first message and blocks both hosts until both have arrived. Two stages that "
     "start with different messages block forever, and no watchdog sees it.",
     "simulated_gpu/test_nccl_rules.py", "test_without_its_precaution_a_pipeline_hangs"),
    ("A receive that is posted early",
     "On a GPU it occupies the device: work that waits for the whole device waits for the message, which may in turn "
     "wait for that work. And a batch's messages are ordered: a receive before a send delays the send, and a cycle of "
     "them never ends.",
     "simulated_gpu/test_nccl_rules.py", "test_no_stage_waits_for_ever"),
    ("A receive that is posted only when the message is needed",
     "Its sender is blocked until then. If two stages send messages to each other, they block each other forever. So "
     "the schedule says when to post a receive.",
     "simulated_gpu/test_nccl_rules.py", "test_receives_posted_only_when_needed_block_their_senders_for_ever"),
    ("A weight that is reported ready with its input gradient",
     "With a split backward, the weight gradient is added later, possibly microbatches later, and is not reduced. A "
     "weight is ready only after its last weight gradient.",
     "docs/test_docstring_claims.py", "test_a_sublayers_gradients_are_complete_when_it_is_reported_ready"),
    ("Gradient memory that is reused while it is in flight",
     "If a bucket's memory is reused before its reduction is done, the reduction sums another bucket's gradients, or "
     "zeros.",
     "simulated_gpu/test_hazards.py", "test_nothing_is_touched_in_flight"),
    ("More stages than microbatches",
     "The warm-up is longer than the work, and a stage waits for a microbatch that never comes.",
     "exactness/test_layouts.py", "test_training_equals_one_plain_process"),
    ("Replicated shards that no longer agree",
     "Two ranks run different kernels: their copies diverge in the last bit, which no loss shows.",
     "run/test_interrupted_runs.py", "test_a_copy_that_differs_in_one_bit_is_named_at_the_next_save"),
    ("Validation text in the training split",
     "Splitting by tokens puts parts of a document, or copies of it, on both sides.",
     "data/test_data.py", "test_copies_never_reach_a_second_split"),
    ("Evaluation that shuffles, or wraps around the end",
     "Some windows are counted twice, others never.",
     "data/test_data.py", "test_evaluation_stops_at_the_end_and_counts_no_token_twice"),
    ("One more tensor of the size of the logits",
     "For example an fp32 softmax on the tape, or the result of a matmul that is stored before it is added. The only "
     "cost is memory.",
     "simulated_gpu/test_gpu_budgets.py", "test_memory_of_gpt2"),
    ("A schedule's cost that is looked up by its name",
     "GPipe keeps all microbatches alive, and every other schedule is treated as 1F1B: right for both, and silently "
     "wrong for a third schedule.",
     "dry_run/test_dry_run.py", "test_small_runs_tell_what_all_layers_and_microbatches_of_four_stages_need"),
    ("An all-reduce that recomputation repeats",
     "If a sublayer is recomputed to its end, it launches its all-reduce again, which costs time and may count a sum "
     "twice.",
     "overlap/test_recompute.py", "test_no_collective_is_repeated"),
    ("Memory that is freed while a copy still reads it",
     "Copies to the host and back run beside training. A tensor is freed and its memory is given to another tensor, "
     "which the copy then reads; or data is used before it is back on the device.",
     "overlap/test_recompute.py", "test_what_was_on_the_host_comes_back_in_time_and_with_the_same_bits"),
    ("A new setting that rejects every older checkpoint",
     "A setting that the checkpoint does not record is compared with today's default.",
     "config/test_settings.py", "test_a_run_of_an_older_version_can_be_resumed"),
    ("The sign of a zero",
     "An optimizer that takes the sign of a gradient turns the rounding error of a true zero into a full step, and "
     "layouts diverge.",
     "optim/test_optimizers.py", "test_lion_agrees_on_every_layout_but_where_the_true_gradient_is_zero"),
    ("An expert without tokens",
     "Its matmuls have no rows, and a rank may receive nothing at all. Code that expects a row fails or hangs there.",
     "exactness/test_experts.py", "test_however_the_tokens_choose_no_row_is_dropped"),
    ("A dispatch that recomputation repeats",
     "The rows travel again, and if a kernel breaks a tie in another way, to other experts than in forward.",
     "exactness/test_experts.py", "test_recomputation_repeats_no_dispatch"),
    ("A checkpoint that runs a program",
     "A pickle can run code. So anyone who can write a checkpoint could run a program on every rank.",
     "checkpoint/test_damage.py", "test_no_program_in_a_checkpoint_is_run"),
]


# ---- the command and the document

def applies(entry: Pitfall) -> str:
    """Return the layout that shows a bug, such as "tp 2, dp 2"."""
    config = entry.config
    sizes = dict(tp=config.tp, pp=config.pp, dp=config.dp, cp=config.cp, ep=config.ep)
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join(words) or "one process"


def lines(entry: Pitfall, right: Side, found: Side) -> list[str]:
    """Return a table of all steps, right and wrong."""
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
    """Return the AssertionError's line of a failed check, from whichever process it came."""
    return next((line for line in str(error).splitlines() if line.startswith("AssertionError")),
                str(error).splitlines()[0])


COLUMNS = ("", "what goes wrong", "on", "loss: right", "wrong", "norm: right", "wrong",
           "worst gradient, or what else differs")


def row_of(entry: Pitfall, right: Side, found: Side, ends: tuple[float, float]) -> str:
    """Return a row of the document's table: a run of CHECKED steps, and the mean losses `ends` of the long runs."""
    numbers = *ends, right.norms[-1], found.norms[-1]
    cells = [f"[{entry.number}](#{entry.number})", entry.title, applies(entry),
             *(f"{number:.5f}" for number in numbers), largest_difference(right, found)]
    return f"| {' | '.join(cells)} |"


def largest_difference(right: Side, found: Side) -> str:
    """Return the worst gradient of the last step; if all gradients are right, judge()'s message."""
    error, name = worst(found.gradients[-1], right.gradients[-1])
    if error > TOLERANCE:
        return f"`{name}`, missing" if error == math.inf else f"`{name}`, {percent(error)}"
    try:
        judge(right, found)
    except AssertionError as difference:
        return str(difference)
    return "nothing"


def percent(error: float) -> str:
    """Format an error with two significant digits."""
    return f"{100 * error:.{max(0, 1 - math.floor(math.log10(100 * error)))}f} %"


def measured_row(pool, entry: Pitfall) -> str:
    curves = measure(pool, entry, True, LONG)
    return row_of(entry, *measure(pool, entry, True, CHECKED), tuple(sum(side.losses[-END:]) / END for side in curves))


def section(entry: Pitfall) -> str:
    return (f"<a id=\"{entry.number}\"></a>\n### {entry.number}. "
            f"{entry.title}\n\n{wrapped(f'{entry.lesson} {entry.shown}')}\n\n"
            + wrapped(f"Prevented by {entry.guard}. See it: `python tests/pitfalls.py {entry.number}`"))


def wrapped(paragraph: str, **options) -> str:
    """Wrap a paragraph at 120 columns, without a break inside `code`."""
    kept = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), paragraph.strip())
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False, **options).replace("\0", " ")


HEAD = f"""# How training goes silently wrong

Few bugs in distributed training end the run. Most leave a curve that falls: AdamW divides each gradient by its own
magnitude, so a constant factor does not show, and even half of a model learns. And nobody knows what the loss should
have been. Here {{count}} such bugs are put back into this code, one at a time, and compared with the right numbers.
`tests/docs/test_pitfalls.py` checks on every run of the tests that each bug is found, that the code without it passes,
and that this page shows what was measured.

**Read the table by columns.** If the two losses are equal to the last digit, no curve will ever show the bug. If the
norms differ, a log of norms would show the bug, if the right norm is known. To find every bug, compare each gradient
with that of one plain process in float64. If even the gradients agree, compare the weights after a step, the
evaluation, or what the entry below names. In {{lower}} of {{count}} rows the wrong loss is the *lower* one. With such a
small model it is chance which of two curves ends lower, and neither looks like a bug.

Each row trains a tiny model (3 layers, hidden size 16, 24 samples of 8 tokens a step, most tokens follow from the
previous token; AdamW; clipping at 0.1) on the smallest layout that shows the bug. If the bug concerns experts, the
model has 2 layers with 4 experts each, of which a token uses 2. The right numbers come from the plain
model in `tests/support/reference.py`. If the bug needs a resumed run, they come from the same run without an
interruption. If the bug is in fp8, they come from the same run without the bug. If it needs a number that is not
finite, they come from the run that skips the step on all ranks. The loss
is the mean of steps {LONG - END + 1} to {LONG}. Norm and gradient are those of step {CHECKED}, and the error of a
gradient is relative to the tensor's largest entry; the tests check norms and gradients. The command
`python tests/pitfalls.py NUMBER --steps {LONG}` shows the run of a row. `python tests/pitfalls.py --write` measured the
table, on {MACHINE}.
"""


def document(rows: list[str]) -> str:
    """Return docs/pitfalls.md with the given rows of its table."""
    losses = [[float(cell) for cell in row.split("|")[4:6]] for row in rows]
    head = HEAD.format(count=len(TABLE), lower=sum(wrong < right for right, wrong in losses))
    guarded = [f"{title}.** {lesson} `{name}` in `tests/{path}`" for title, lesson, path, name in GUARDED]
    bullets = "\n".join(wrapped(f"- **{item}", subsequent_indent="  ") for item in guarded)
    return "\n\n".join([
        *map(wrapped, head.split("\n\n")),
        "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *rows]),
        "## One by one", *map(section, TABLE),
        "## Guarded elsewhere",
        "These bugs hang, cost memory, or need a corpus or a device. Each has a test of its own.", bullets]) + "\n"


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
                                     description="Put a bug back and compare the training with the right numbers.")
    parser.add_argument("number", nargs="?", type=int, choices=range(1, len(TABLE) + 1), metavar="NUMBER",
                        help=f"the bug's number, 1 to {len(TABLE)}")
    parser.add_argument("--steps", type=lambda text: max(1, int(text)), default=5, help="training steps (default 5)")
    parser.add_argument("--list", action="store_true", help="list all bugs")
    parser.add_argument("--write", action="store_true", help=f"measure all bugs and write {DOCUMENT.relative_to(ROOT)}")
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
