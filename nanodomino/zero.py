"""ZeRO stage 1: every replica keeps 1/dp of the optimizer (ZeRO, 1910.02054, section 5.1).

Data-parallel replicas hold the same weights and sum their gradients. Each could run the whole optimizer and keep all of
its state; instead each owns 1/dp of it. The step has three phases:

    1  reduce-scatter  every gradient bucket is summed over the replicas, each gets the sum of its own part
                       (started while backward still runs, as soon as a bucket is final)
    2  update          norm, clipping, optimizer on the own part: fp32 master weights and moments of that part alone
    3  all-gather      the new weights of all parts to everybody

    bucket of one kind    | qkv.weight | dense.weight | ... |pad|     weights: the model's parameters are views of it
                          | . . . . . . . . . . . . . . . . . . |     main_grad: fp32 when training in 16 bit
    dp = 4                |   rank 0   |   rank 1  |   2  |   3   |   each rank updates its quarter as one tensor

An all-reduce is a reduce-scatter and an all-gather, so ZeRO-1 sends no more bytes than plain data parallelism, and in
16-bit training less: (4 + 2)(dp-1)/dp a parameter, since fp32 gradients are scattered and 16-bit weights gathered,
where an all-reduce of fp32 gradients sends (4 + 4)(dp-1)/dp. Stage 0 is the same code with one part: the reduce is an
all-reduce, the part is everything, and nothing is gathered.

Bytes kept per parameter, with AdamW: 16-bit training 2 + 4 + (4 + 4 + 4)/dp; fp32 training 4 + 4 + (4 + 4)/dp, the
master being the weight.

A bucket holds parameters of one kind, because a flat buffer forgets whose numbers it holds, and three things depend on
it: decay (matrices only), how often a parameter exists in the world (shards once, replicas on every tp rank, a tied
matrix on two stages: in the norm each must count once), and whether first and last stage must add up what they have,
once the replicas have.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from nanodomino.collectives import all_gather, reduce_scatter
from nanodomino.config import Config
from nanodomino.loss_scale import LossScale
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optimizers import OPTIMIZERS
from nanodomino.trace import NO_TRACE

ALIGNMENT = 16       # elements; a parameter starts at a multiple, as the matrix units of GPUs like it


@dataclass(frozen=True)
class Kind:
    decay: bool          # a matrix: weight decay applies
    sharded: bool        # cut over tp; else every tp rank holds a copy
    tied: bool           # the word embedding of which first and last stage hold a copy


def sort_into_buckets(model: GPT) -> list[tuple[Kind, list[nn.Parameter]]]:
    """(kind, parameters) of each bucket: in the order of backward, cut at config.bucket_size parameters."""
    open_buckets, full, tied_copy = {}, [], model.tied_copy
    for weight in reversed(list(model.parameters())):
        kind = Kind(decay=weight.dim() >= 2, sharded=weight.shard_dim is not None, tied=weight is tied_copy)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(weight)
        if sum(one.numel() for one in bucket) >= model.config.bucket_size:
            full.append((kind, open_buckets.pop(kind)))
    return full + list(open_buckets.items())


def flat_layout(parameters, parts: int) -> tuple[dict, int]:
    """({parameter: where it begins}, the whole length) of a flat buffer that can be cut into `parts`, in elements."""
    offsets, size = {}, 0
    for weight in parameters:
        offsets[weight] = size
        size += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
    return offsets, -(-size // (parts * ALIGNMENT)) * parts * ALIGNMENT


class Bucket:
    """Some parameters of one kind, flat: weights, gradients, and the part of both that this rank owns."""

    def __init__(self, kind: Kind, parameters: list[nn.Parameter], parts: int, part: int):
        self.kind, self.parameters = kind, parameters
        first = parameters[0]
        self.offsets, size = flat_layout(parameters, parts)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.main_grad = torch.zeros(size, dtype=wide, device=first.device)
        for weight in parameters:
            place = self.view(weight, self.weights)
            place.copy_(weight.data)
            weight.data, weight.main_grad = place, self.view(weight, self.main_grad)
        self.own_weights = self.weights.chunk(parts)[part]
        self.own_begin = part * len(self.own_weights)
        self.own_grad = self.main_grad.chunk(parts)[part]
        self.master = self.own_weights if wide == first.dtype else self.own_weights.to(wide)
        self.master.grad = self.own_grad
        self.work = self.received = None                 # the reduce over replicas, once it is under way

    def view(self, weight, flat):
        """A parameter's place in any flat tensor that is laid out as this bucket is."""
        offset = self.offsets[weight]
        return flat[offset:offset + weight.numel()].view(weight.shape)


def sum_of_squares(flat):
    """As a float64. Pieces are summed in the tensor's own type, several times as fast as all of it in float64."""
    return torch.stack(torch._foreach_norm(flat.split(1 << 18))).double().square().sum()


@dataclass(frozen=True)
class StepResult:
    """Of the global batch, and the same on every rank."""
    loss: float
    grad_norm: float
    skipped: bool        # not finite: no weight has changed
    stop: bool           # some rank wishes to stop
    loss_scale: float    # of this step


class ZeroOptimizer:
    """config.optimizer over flat buckets, sharded over the replicas with config.zero_stage 1."""

    def __init__(self, model: GPT, config: Config, mesh: Mesh, trace=NO_TRACE):
        self.config, self.mesh, self.trace = config, mesh, trace
        self.parts, self.part = (mesh.dp, mesh.dp_rank) if config.zero_stage == 1 else (1, 0)
        self.buckets = [Bucket(kind, parameters, self.parts, self.part)
                        for kind, parameters in sort_into_buckets(model)]
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.parameters}
        self.has_loss = model.post_process
        self.updates = 0                                 # steps that were not skipped: the optimizer's own count
        self.skipped_in_a_row = 0                        # steps up to this one that were, and not by the scale alone
        self.loss_scale = LossScale(config)
        self.missing = {}                                # bucket -> parameters whose gradient is not final yet
        self.choice = OPTIMIZERS[config.optimizer]
        groups = [dict(params=[bucket.master for bucket in self.buckets if bucket.kind.decay == decay],
                       weight_decay=config.weight_decay if decay else 0.0) for decay in (True, False)]
        self.optimizer = self.choice.make([group for group in groups if group["params"]], config)

    # ---- what is kept of each bucket beside its gradient: for whoever saves, counts or restores it

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of what must be saved of each parameter to go on."""
        return ("weight", *self.choice.moments)

    def own(self, bucket: Bucket, name: str):
        """This rank's part of what is `kept`: fp32 or wider. None for a moment before the first update."""
        return bucket.master if name == "weight" else self.optimizer.state[bucket.master].get(name)

    def place_of(self, bucket: Bucket, name: str):
        """Where this rank's part of what is `kept` lies, made where it is not there yet: to be filled by whoever
        restores it, who sets `updates` before and calls gather_weights after."""
        if name == "weight":
            return bucket.master
        state = self.optimizer.state[bucket.master]
        if self.choice.counts:
            state["step"] = torch.tensor(float(self.updates), device=bucket.master.device)
        if name not in state:
            state[name] = torch.zeros_like(bucket.master)
        return state[name]

    def state_tensors(self) -> list[torch.Tensor]:
        """Everything that is kept for the update: master weights, moments, counts."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [bucket.master for bucket in self.buckets] + states

    def zero_grad(self):
        """Before the first backward of a step."""
        for bucket in self.buckets:
            bucket.main_grad.zero_()
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}

    def warm_up(self):
        """Every sum and gather of a step, of zeros: what a communicator does at its first time is then done."""
        self.zero_grad()
        self.missing = {}                                # nobody has gone backward
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finish_reduces()
        dist.all_reduce(torch.zeros(4, dtype=torch.float64, device=self.mesh.device))
        self.gather_weights()

    # ---- phase 1

    def on_final(self, modules):
        """These modules' gradients are final on this rank; a bucket that is now complete goes on the wires."""
        for module in modules:
            for weight in module.parameters():
                bucket = self.bucket_of[weight]
                self.missing[bucket].remove(weight)      # KeyError: it was said to be final before, and was not
                if not self.missing[bucket]:
                    self.reduce(bucket)

    def reduce(self, bucket):
        """Start summing a bucket over the replicas, into own_grad."""
        if self.mesh.dp == 1:
            return
        if self.parts == 1:
            bucket.work = dist.all_reduce(bucket.main_grad, group=self.mesh.dp_group, async_op=True)
        else:
            bucket.work, bucket.received = reduce_scatter(bucket.main_grad, group=self.mesh.dp_group)
        self.trace.watch("all_reduce" if self.parts == 1 else "reduce_scatter", bucket.work, group="dp",
                         bytes=bucket.main_grad.nbytes)

    def finish_reduces(self):
        """After the last backward: wait for all. Then first and last stage add up what they have of a tied matrix:
        after the sum over replicas, so that both add the same two numbers and their copies never drift apart."""
        assert not any(self.missing.values()), "a gradient was never reported as final"
        for bucket in self.buckets:
            if bucket.work is not None:
                self.wait("dp", bucket.work)
        with self.trace.span("optimizer"):
            for bucket in self.buckets:
                if bucket.received is not None:
                    torch.sum(bucket.received, dim=0, out=bucket.own_grad)
                bucket.work = bucket.received = None
        for bucket in self.buckets:
            if bucket.kind.tied:
                work = dist.all_reduce(bucket.own_grad, group=self.mesh.embedding_group, async_op=True)
                self.trace.watch("all_reduce", work, group="embedding", bytes=bucket.own_grad.nbytes)
                self.wait("embedding", work)

    # ---- phases 2 and 3

    def counts_here(self, kind: Kind) -> bool:
        """Whether this rank is the one that adds its part of such a bucket to the global norm."""
        mesh = self.mesh
        return ((kind.sharded or mesh.tp_rank == 0) and (self.parts > 1 or mesh.dp_rank == 0)
                and (not kind.tied or mesh.is_first_stage))

    def step(self, learning_rate: float, totals, stop=False) -> "StepResult":
        """Divide by the global number of tokens and the scale, clip, update, gather; or skip, if a sum is not finite.

        totals: what pipeline.run returned; stop: whether this rank wishes to stop after the step.
        """
        self.finish_reduces()
        loss_sum, tokens, squares, stops = self.sum_over_world(totals, stop)
        tokens, scale = max(tokens, 1.0), self.loss_scale.value    # where nothing counts all gradients are zero
        grad_norm = math.sqrt(squares) / (tokens * scale)          # main_grad holds gradients of scale x the loss sum
        skipped = not (math.isfinite(loss_sum) and math.isfinite(grad_norm))
        if not (math.isfinite(loss_sum) and self.loss_scale.update(overflow=skipped)):
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            self.update(learning_rate, grad_norm, 1.0 / (tokens * scale))
        return StepResult(loss_sum / tokens, grad_norm, skipped, stops > 0, scale)

    def update(self, learning_rate: float, grad_norm: float, scale: float):
        """Phases 2 and 3, with `scale` times the gradients."""
        if self.config.clip_grad > 0.0:
            scale *= min(1.0, self.config.clip_grad / (grad_norm + 1e-6))
        with self.trace.span("optimizer"):
            for bucket in self.buckets:
                bucket.own_grad.mul_(scale)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.updates += 1
        self.gather_weights()

    def sum_over_world(self, totals, stop=False):
        """One all-reduce of four numbers: loss sum, tokens, sum of squared gradients, each counted once in the world,
        and how many ranks wish to stop. So all decide alike: to skip a step that is not finite on one of them, to stop
        after it."""
        mine = torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        mine[3].fill_(stop)                                    # mine[3] = stop would copy it, and wait for the GPU
        if self.has_loss and self.mesh.tp_rank == 0:
            mine[0], mine[1] = totals.loss_sum, totals.tokens
        else:
            mine[0] += 0.0 * totals.loss_sum                   # what does not count here must be finite all the same,
        with self.trace.span("optimizer"):
            for bucket in self.buckets:                        # and 0 x NaN and 0 x infinity are NaN
                square = sum_of_squares(bucket.own_grad)
                mine[2] += square if self.counts_here(bucket.kind) else 0.0 * square
        work = dist.all_reduce(mine, async_op=True)
        self.trace.watch("all_reduce", work, group="world", bytes=mine.nbytes)
        self.wait("world", work)
        return mine.tolist()                             # here the host waits for its device, once a step: watch.py

    def gather_weights(self):
        """Phase 3: the new weights of every part to every replica."""
        works = []
        for bucket in self.buckets:
            if bucket.master is not bucket.own_weights:
                bucket.own_weights.copy_(bucket.master)
            if self.parts > 1:
                works.append(all_gather(bucket.weights, group=self.mesh.dp_group))
                self.trace.watch("all_gather", works[-1], group="dp", bytes=bucket.weights.nbytes)
        for work in works:
            self.wait("dp", work)

    def wait(self, group: str, work):
        with self.trace.span("wait", group=group):
            work.wait()
