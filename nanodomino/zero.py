"""ZeRO stages 1 and 2: shards the optimizer's state, and the gradients, over the replicas (1910.02054, section 5).

Data-parallel replicas hold the same weights and sum their gradients. Instead of running the whole optimizer, each
replica owns one of dp partitions of the weights and updates only that. A step has three phases:

    1  reduce-scatter  sums each gradient bucket over the replicas; each receives the sum of its own partition.
                       Launched while backward still runs, as soon as the bucket's gradients are complete
    2  update          norm, clipping and optimizer on its own partition, with fp32 master weights and moments
    3  all-gather      sends the new weights of each partition to all replicas

    a flat bucket    | qkv.weight | dense.weight | ... |pad|     see optim/buckets.py
    dp = 4           |   rank 0   |   rank 1  |   2  |   3   |   each rank updates its quarter as one tensor

Stage 1 accumulates the gradients of a step's m microbatches and reduces the sum. Stage 2 reduces the gradients of each
microbatch and accumulates only its own partition; a bucket's main_grad exists only from its first gradient until its
reduce is done. Stage 0 is the same code with one partition: phase 1 is an all-reduce, and phase 3 sends nothing.

**When are a bucket's gradients complete?** The bucket counts reports. domino.py reports a sublayer's modules once per
microbatch, after the last slice has added to their gradients, and the report counts once for each parameter. A bucket
of 4 parameters and a step of 3 microbatches: stages 0 and 1 reduce it once, after 12 reports; stage 2 reduces it after
every 4. There the reports of two microbatches may interleave, and a reduce then carries some gradients of both. This is
harmless, because the last report follows the last gradient and all reduces add up to the same sum. Replicas of a stage
run the same schedule, so they launch the same reduces in the same order.

With AdamW a parameter costs

                 bytes, 16-bit training      fp32: the weight is its own master        bytes sent, 16 bit, (dp-1)/dp x
    stage 0      2 + 4 + 4 + 4 + 4           4 + 4 + 4 + 4                             4 + 4
    stage 1      2 + 4 + (4 + 4 + 4)/dp      4 + 4 + (4 + 4)/dp                        4 + 2
    stage 2      2 + (4 + 4 + 4 + 4)/dp      4 + (4 + 4 + 4)/dp                        4 m + 2

The terms are, in this order: weight, gradient, fp32 master weight (16-bit training only), two moments. In stage 2 the
main_grads of the few buckets that are being filled or reduced come on top.

Stage 2 reduces once per microbatch. Backward takes 4 FLOP per token and parameter, so at C FLOP/s and R bytes/s it
hides these reduces if a microbatch has at least C/R (dp-1)/dp tokens: about 1,700 on H100s with NVLink, 15,000 over
400 Gbit/s (C = 750e12, large dp). Use stage 2 if the model does not fit otherwise, with few or large microbatches.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.scatter_and_gather import all_gather, reduce_scatter
from nanodomino.comm.trace import NO_TRACE
from nanodomino.optim.buckets import Bucket, ParameterKind, sort_into_buckets
from nanodomino.optim.loss_scale import LossScale
from nanodomino.optim.optimizers import OPTIMIZERS

MAX_REDUCES_IN_FLIGHT = 2        # in stage 2, where each holds a bucket's main_grad


def sum_of_squares(flat):
    """Return the sum of squares in float64. Within a block it is computed in the tensor's own type, which is several
    times as fast."""
    return torch.stack(torch._foreach_norm(flat.split(1 << 18))).double().square().sum()


@dataclass(frozen=True)
class StepResult:
    """The outcome for the global batch, equal on all ranks."""
    loss: float
    grad_norm: float
    skipped: bool        # the loss or a gradient was not finite, so no weight has changed
    stop: bool           # some rank wants to stop
    loss_scale: float    # during this step


class ZeroOptimizer:
    """Runs config.optimizer on flat buckets, partitioned over the replicas if config.zero_stage is 1 or 2."""

    def __init__(self, model, config, mesh, trace=NO_TRACE):
        self.config, self.mesh, self.trace = config, mesh, trace
        self.partitions, self.partition = (mesh.dp, mesh.dp_rank) if config.zero_stage else (1, 0)
        shards_gradients = config.zero_stage == 2 and mesh.dp > 1
        self.buckets = [Bucket(kind, parameters, self.partitions, self.partition, shards_gradients)
                        for kind, parameters in sort_into_buckets(model)]
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.parameters}
        self.buckets_of = {}                             # modules -> Counter of the buckets of their parameters
        self.reports_needed = {bucket: len(bucket.parameters) * (1 if shards_gradients else config.microbatches)
                               for bucket in self.buckets}
        self.reduces_in_flight = deque()                 # (bucket, its main_grad, work, received)
        self.has_loss = model.post_process
        self.updates = 0                                 # steps that were not skipped, as the optimizer counts them
        self.skipped_in_a_row = 0                        # without those that a smaller loss scale might have prevented
        self.loss_scale = LossScale(config)
        self.spec = OPTIMIZERS[config.optimizer]
        groups = [dict(params=[bucket.master for bucket in self.buckets if bucket.kind.decay == decay],
                       weight_decay=config.weight_decay if decay else 0.0) for decay in (True, False)]
        self.optimizer = self.spec.make([group for group in groups if group["params"]], config)
        self.zero_grad()

    # ---- state, for checkpoints and memory accounts

    @property
    def state_names(self) -> tuple[str, ...]:
        """What a checkpoint saves for each parameter."""
        return ("weight", *self.spec.moments)

    def own_state(self, bucket: Bucket, name: str):
        """Return this rank's partition of a state, in fp32 or wider; None for a moment before the first update."""
        return bucket.master if name == "weight" else self.optimizer.state[bucket.master].get(name)

    def allocate_own_state(self, bucket: Bucket, name: str):
        """Return this rank's partition of a state, allocated if need be, for a checkpoint to fill. Set `updates` first,
        and call gather_weights() last."""
        if name == "weight":
            return bucket.master
        state = self.optimizer.state[bucket.master]
        if self.spec.counts_steps:
            state["step"] = torch.tensor(float(self.updates), device=bucket.master.device)
        if name not in state:
            state[name] = torch.zeros_like(bucket.master)
        return state[name]

    def state_tensors(self) -> list[torch.Tensor]:
        """Return all master weights, moments and step counts."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [bucket.master for bucket in self.buckets] + states

    def zero_grad(self):
        """Prepare for the first backward of a step."""
        for bucket in self.buckets:
            bucket.zero_grad()
        self.reports_left = dict(self.reports_needed)

    def warm_up(self):
        """Run each collective of a step once, on zeros, so that communicators are set up before training."""
        self.finish_reduces()                            # ... that the warm-up's backward has launched
        self.zero_grad()
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finalize_gradients()
        dist.all_reduce(torch.zeros(4, dtype=torch.float64, device=self.mesh.device))
        self.gather_weights()

    # ---- phase 1

    def on_gradients_ready(self, modules):
        """Count one report for each parameter of the modules; reduce each bucket whose reports are now complete."""
        if modules not in self.buckets_of:
            self.buckets_of[modules] = Counter(self.bucket_of[weight] for module in modules
                                               for weight in module.parameters())
        for bucket, count in self.buckets_of[modules].items():
            self.reports_left[bucket] -= count
            if self.reports_left[bucket] <= 0:
                self.reports_left[bucket] += self.reports_needed[bucket]
                self.reduce(bucket)

    def reduce(self, bucket):
        """Launch the sum of a bucket's gradients over the replicas."""
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

    def finish_reduces(self, max_in_flight=0):
        """Wait for the oldest reduces until at most `max_in_flight` are left. Sums are always added in the order of the
        launches, so that a rerun gives the same bits."""
        done = [self.reduces_in_flight.popleft() for _ in range(len(self.reduces_in_flight) - max_in_flight)]
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
        """After the last backward, finish all reduces. Then sum the gradients that are still spread over several ranks:
        those of the tied embedding, over the first and the last stage, and those of parameters that each
        tensor-parallel rank applies only to its own tokens or heads. The sum over the replicas comes first, so all
        replicas add the same numbers here, and their copies stay equal."""
        assert self.reports_left == self.reports_needed, "a gradient was never reported as complete"
        self.finish_reduces()
        for bucket in self.buckets:
            for group, partial in (("tp", bucket.kind.partial_gradient), ("embedding", bucket.kind.tied)):
                if partial:
                    work = dist.all_reduce(bucket.own_grad, group=getattr(self.mesh, f"{group}_group"), async_op=True)
                    self.trace.watch("all_reduce", work, group=group, bytes=bucket.own_grad.nbytes)
                    self.wait(group, work)

    # ---- phases 2 and 3

    def step(self, learning_rate: float, totals, stop=False) -> StepResult:
        """Divide the gradients by the global number of tokens and the loss scale, clip, update and gather.

        totals: what pipeline.run returned; stop: whether this rank wants to stop after the step. If the loss or the
        norm is not finite, the update is skipped; the step number, the data and the learning rate go on as always.
        """
        self.finalize_gradients()
        loss_sum, tokens, squares, stops = self.sum_over_world(totals, stop)
        tokens, scale = max(tokens, 1.0), self.loss_scale.value    # if no token counts, all gradients are zero
        grad_norm = math.sqrt(squares) / (tokens * scale)
        skipped = not (math.isfinite(loss_sum) and math.isfinite(grad_norm))
        if not (math.isfinite(loss_sum) and self.loss_scale.update(overflow=skipped)):
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            self.update(learning_rate, grad_norm, 1.0 / (tokens * scale))
        return StepResult(loss_sum / tokens, grad_norm, skipped, stops > 0, scale)

    def sum_over_world(self, totals, stop=False):
        """Return the world's [loss sum, tokens, sum of squared gradients, ranks that want to stop], each token and each
        parameter counted once. All ranks see the same numbers, so all skip a step, or stop after it, or none does."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        sums[3].fill_(stop)                                    # sums[3] = stop would copy it and wait for the GPU
        if self.has_loss and self.mesh.tp_rank == 0:
            sums[0], sums[1] = totals.loss_sum, totals.tokens
        else:
            sums[0] += 0.0 * totals.loss_sum                   # 0 x NaN is NaN: what does not count must be finite too
        with self.trace.span("optimizer"):
            for bucket in self.buckets:
                square = sum_of_squares(bucket.own_grad)
                sums[2] += square if self.counts_in_norm(bucket.kind) else 0.0 * square
        work = dist.all_reduce(sums, async_op=True)
        self.trace.watch("all_reduce", work, group="world", bytes=sums.nbytes)
        self.wait("world", work)
        return sums.tolist()                                   # here, once a step, the host waits for its device

    def counts_in_norm(self, kind: ParameterKind) -> bool:
        """Return whether this rank, of all that hold a copy of the same gradients, adds them to the global norm."""
        mesh = self.mesh
        return ((kind.sharded or mesh.tp_rank == 0) and (self.partitions > 1 or mesh.dp_rank == 0)
                and (not kind.tied or mesh.is_first_stage))

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

    def gather_weights(self):
        """Phase 3: send the new weights of each partition to all replicas."""
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
