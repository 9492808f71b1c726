"""ZeRO stages 1 and 2: a replica keeps 1/dp of the optimizer, and of the gradients (1910.02054, sections 5.1 and 5.2).

Data-parallel replicas hold the same weights and sum their gradients. Each could run the whole optimizer and keep all of
its state; instead each owns 1/dp of it. The step has three phases:

    1  reduce-scatter  every gradient bucket is summed over the replicas, each gets the sum of its own part
                       (started while backward still runs, as soon as it is through with a bucket)
    2  update          norm, clipping, optimizer on the own part: fp32 master weights and moments of that part alone
    3  all-gather      the new weights of all parts to everybody

    bucket of one kind    | qkv.weight | dense.weight | ... |pad|     weights: the model's parameters are views of it
                          | . . . . . . . . . . . . . . . . . . |     main_grad: fp32 when training in 16 bit
    dp = 4                |   rank 0   |   rank 1  |   2  |   3   |   each rank updates its quarter as one tensor

Stage 1 adds up the gradients of a step's m microbatches, and reduces their sum. Stage 2 reduces those of each, and adds
up the own part alone: a bucket has memory for gradients from the first that is added until its reduce is done, then
another bucket has it. (All replicas of a stage run the same schedule, so they send the same buckets in the same order.)
Stage 0 is the same code with one part: the reduce is an all-reduce, which is a reduce-scatter and an all-gather, the
part is everything, and no weights are gathered. With AdamW a parameter costs

                 bytes, 16-bit training      fp32, where the master is the weight      on the wires, 16 bit, (dp-1)/dp x
    stage 0      2 + 4 + 4 + 4 + 4           4 + 4 + 4 + 4                             4 + 4
    stage 1      2 + 4 + (4 + 4 + 4)/dp      4 + 4 + (4 + 4)/dp                        4 + 2
    stage 2      2 + (4 + 4 + 4 + 4)/dp      4 + (4 + 4 + 4)/dp                        4 m + 2

Beside that, stage 2 has some buckets in memory, which should be small beside the whole: those that are being filled,
and those on their way. Backward, 4 FLOP a token and parameter, hides the wires of a microbatch that has C/R (dp-1)/dp
tokens or more, at C FLOP/s and R bytes/s: some 1,600 for an H100 among its neighbours, 15,000 on a network of 400
Gbit/s. What it does not hide is paid m times: stage 2 is for what does not fit otherwise, in few or large microbatches.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.collectives import all_gather, reduce_scatter
from nanodomino.comm.trace import NO_TRACE
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.optim.buckets import Bucket, ParameterKind, sort_into_buckets
from nanodomino.optim.loss_scale import LossScale
from nanodomino.optim.optimizers import OPTIMIZERS

MAX_REDUCES_IN_FLIGHT = 2        # reduces that stage 2 has under way at most, each with its memory


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
    """config.optimizer over flat buckets, sharded over the replicas from config.zero_stage 1 on."""

    def __init__(self, model: GPT, config, mesh: Mesh, trace=NO_TRACE):
        self.config, self.mesh, self.trace = config, mesh, trace
        self.partitions, self.partition = (mesh.dp, mesh.dp_rank) if config.zero_stage else (1, 0)
        shards_gradients = config.zero_stage == 2 and mesh.dp > 1
        self.buckets = [Bucket(kind, parameters, self.partitions, self.partition, shards_gradients)
                        for kind, parameters in sort_into_buckets(model)]
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.parameters}
        self.buckets_of = {}                             # modules -> how many of their parameters are in which bucket
        self.reports_needed = {bucket: len(bucket.parameters) * (1 if shards_gradients else config.microbatches)
                               for bucket in self.buckets}      # that a bucket waits for before its reduce
        self.reduces_in_flight = deque()                 # reduces: (bucket, its gradients, work, received)
        self.has_loss = model.post_process
        self.updates = 0                                 # steps that were not skipped: the optimizer's own count
        self.skipped_in_a_row = 0                        # steps up to this one that were, and not by the scale alone
        self.loss_scale = LossScale(config)
        self.spec = OPTIMIZERS[config.optimizer]
        groups = [dict(params=[bucket.master for bucket in self.buckets if bucket.kind.decay == decay],
                       weight_decay=config.weight_decay if decay else 0.0) for decay in (True, False)]
        self.optimizer = self.spec.make([group for group in groups if group["params"]], config)
        self.zero_grad()

    # ---- what is kept of each bucket beside its gradient: for whoever saves, counts or restores it

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of what must be saved of each parameter to go on."""
        return ("weight", *self.spec.moments)

    def own_state(self, bucket: Bucket, name: str):
        """This rank's part of what is `kept`: fp32 or wider. None for a moment before the first update."""
        return bucket.master if name == "weight" else self.optimizer.state[bucket.master].get(name)

    def allocate_own_state(self, bucket: Bucket, name: str):
        """Where this rank's part of what is `kept` lies, made where it is not there yet: to be filled by whoever
        restores it, who sets `updates` before and calls gather_weights after."""
        if name == "weight":
            return bucket.master
        state = self.optimizer.state[bucket.master]
        if self.spec.counts_steps:
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
            bucket.zero_grad()
        self.reports_left = dict(self.reports_needed)

    def warm_up(self):
        """Every sum and gather of a step, of zeros: what a communicator does at its first time is then done."""
        self.finish_reduces()                                    # of what a microbatch of nothing has sent
        self.zero_grad()
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finalize_gradients()
        dist.all_reduce(torch.zeros(4, dtype=torch.float64, device=self.mesh.device))
        self.gather_weights()

    # ---- phase 1

    def on_gradients_ready(self, modules):
        """These modules' gradients of a microbatch are there. A bucket that has heard so of all its parameters, by each
        microbatch that it waits for, goes on the wires. (Where these take turns, after as many reports: a sum may be
        sent in any parts, and the last report comes behind all that is added.)"""
        if modules not in self.buckets_of:
            self.buckets_of[modules] = Counter(self.bucket_of[weight] for one in modules for weight in one.parameters())
        for bucket, count in self.buckets_of[modules].items():
            self.reports_left[bucket] -= count
            if self.reports_left[bucket] <= 0:
                self.reports_left[bucket] += self.reports_needed[bucket]
                self.reduce(bucket)

    def reduce(self, bucket):
        """Start summing a bucket over the replicas."""
        if self.mesh.dp == 1:
            return
        if bucket.shards_gradients and len(self.reduces_in_flight) == MAX_REDUCES_IN_FLIGHT:
            self.finish_reduces(MAX_REDUCES_IN_FLIGHT - 1)
        flat, received = bucket.pop_gradients(), None
        if self.partitions == 1:
            work = dist.all_reduce(flat, group=self.mesh.dp_group, async_op=True)
        else:
            work, received = reduce_scatter(flat, group=self.mesh.dp_group)
        self.reduces_in_flight.append((bucket, flat, work, received))
        self.trace.watch("all_reduce" if self.partitions == 1 else "reduce_scatter", work, group="dp",
                         bytes=flat.nbytes)

    def finish_reduces(self, left=0):
        """Wait until so few reduces are under way, the oldest first. Whoever was late, the own parts of their sums are
        added up in the order of the launches: the same run has the same bits."""
        done = [self.reduces_in_flight.popleft() for _ in range(len(self.reduces_in_flight) - left)]
        for _, _, work, _ in done:
            self.wait("dp", work)
        with self.trace.span("optimizer"):
            for bucket, flat, _, received in done:
                own = flat.chunk(self.partitions)[self.partition]
                if received is not None:
                    torch.sum(received, dim=0, out=own)
                if bucket.shards_gradients:
                    bucket.own_grad.add_(own)

    def finalize_gradients(self):
        """After the last backward: wait for all. Then those who have parts of one gradient add them up: first and last
        stage, of a tied matrix; where tensor-parallel ranks have worked on the rows of one, of what is whole on each.
        After the sum over replicas, so that all add the same numbers and their copies never drift apart."""
        assert self.reports_left == self.reports_needed, "a gradient was never reported as final"
        self.finish_reduces()
        for bucket in self.buckets:
            for group, is_a_part in (("tp", bucket.kind.partial_gradient), ("embedding", bucket.kind.tied)):
                if is_a_part:
                    work = dist.all_reduce(bucket.own_grad, group=getattr(self.mesh, f"{group}_group"), async_op=True)
                    self.trace.watch("all_reduce", work, group=group, bytes=bucket.own_grad.nbytes)
                    self.wait(group, work)

    # ---- phases 2 and 3

    def counts_in_norm(self, kind: ParameterKind) -> bool:
        """Whether this rank is the one that adds its part of such a bucket to the global norm."""
        mesh = self.mesh
        return ((kind.sharded or mesh.tp_rank == 0) and (self.partitions > 1 or mesh.dp_rank == 0)
                and (not kind.tied or mesh.is_first_stage))

    def step(self, learning_rate: float, totals, stop=False) -> "StepResult":
        """Divide by the global number of tokens and the scale, clip, update, gather; or skip, if a sum is not finite.

        totals: what pipeline.run returned; stop: whether this rank wishes to stop after the step.
        """
        self.finalize_gradients()
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
                mine[2] += square if self.counts_in_norm(bucket.kind) else 0.0 * square
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
            if self.partitions > 1:
                works.append(all_gather(bucket.weights, group=self.mesh.dp_group))
                self.trace.watch("all_gather", works[-1], group="dp", bytes=bucket.weights.nbytes)
        for work in works:
            self.wait("dp", work)

    def wait(self, group: str, work):
        with self.trace.span("wait", group=group):
            work.wait()
