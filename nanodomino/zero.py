"""ZeRO: shards the optimizer state, in ZeRO-2 also the gradients, over the replicas (1910.02054, section 5).

Data-parallel replicas hold the same weights and sum their gradients. Without ZeRO, each replica then runs the whole
optimizer, so all repeat the same work. With ZeRO, each of the dp replicas owns 1/dp of the weights, its *partition*,
and updates only that. A step has three phases:

    1  reduce-scatter  Sum each bucket of gradients over the replicas; each replica receives the sum of its partition.
                       Launched as soon as the bucket's gradients are complete, while backward continues
    2  update          Each replica: norm, clipping and optimizer on its partition, with fp32 master weights and moments
    3  all-gather      Send the new weights of each partition to all replicas

    a flat bucket    | qkv.weight | dense.weight | ... |pad|     see optim/buckets.py
    dp = 4           |  dp 0  |  dp 1   |  dp 2  |  dp 3   |     each replica updates its quarter as one tensor

ZeRO-1 accumulates the gradients of a step's m microbatches and reduces the sum once. ZeRO-2 reduces the gradients of
each microbatch, and each replica accumulates only its own partition. The tensor for a bucket's whole gradients,
main_grad, then exists only from the first gradient until the reduce is done. Without ZeRO (zero_stage 0) the same code
runs with a single partition: phase 1 is an all-reduce, and phase 3 sends nothing.

**When are a bucket's gradients complete?** The optimizer counts reports. domino.py reports a sublayer once per
microbatch, after the last slice has added to the sublayer's gradients. This counts as one report for each parameter.
For example, take a bucket of 4 parameters and a step of 3 microbatches. ZeRO-1 reduces the bucket once, after
4 x 3 = 12 reports; ZeRO-2 reduces it after every 4 reports.

In some schedules the backwards of two microbatches interleave. Then a reduce of ZeRO-2 carries some gradients of both.
This is harmless: the last reduce is launched after the last gradient was added, so all reduces add up to the same sum.
The replicas of a pipeline stage run the same schedule, so they launch the same reduces in the same order.

**What does a parameter cost?** Bytes per rank with AdamW:

               memory, 16-bit training     memory, fp32 training     sent per step, 16-bit training
    no ZeRO    2 + 4 + 4 + 4 + 4           4 + 4 + 4 + 4             (4 + 4) (dp-1)/dp
    ZeRO-1     2 + 4 + (4 + 4 + 4)/dp      4 + 4 + (4 + 4)/dp        (4 + 2) (dp-1)/dp
    ZeRO-2     2 + (4 + 4 + 4 + 4)/dp      4 + (4 + 4 + 4)/dp        (4 m + 2) (dp-1)/dp

The terms under memory are, in order: weight, gradient, master weight, two moments. In fp32 training the weight is its
own master. ZeRO-2 also needs the main_grads of the few buckets that are being filled or reduced. Phase 1 sends
gradients in fp32. An all-reduce sends each gradient twice, a reduce-scatter sends it once. Phase 3 sends 16-bit
weights.

Each microbatch of ZeRO-2 sends 4 (dp-1)/dp bytes per parameter, while backward computes 4 FLOP per token and parameter.
At C FLOP/s and R bytes/s, backward hides the reduces if a microbatch has at least C/R (dp-1)/dp tokens. On H100s
(C = 750e12) with large dp this means about 1,700 tokens over NVLink and 15,000 over 400 Gbit/s. Use ZeRO-2 only if the
model does not fit otherwise, and with few or large microbatches.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.comm.device import on_gpu
from nanodomino.comm.collectives import all_gather, reduce_scatter
from nanodomino.comm.trace import NO_TRACE
from nanodomino.optim.buckets import Bucket, sort_into_buckets
from nanodomino.optim.optimizers import LossScale

MAX_REDUCES_IN_FLIGHT = 2        # in ZeRO-2, because each reduce in flight keeps a main_grad in memory


def sum_of_squares(flat):
    """Return the sum of squares of a flat tensor in float64. Blocks are first summed in the tensor's own type, which is
    several times as fast. A GPU sums each block as a tree, so its blocks may be large, which saves launches."""
    return torch.stack(torch._foreach_norm(flat.split(1 << (24 if on_gpu(flat) else 18)))).double().square().sum()


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step for the global batch. All ranks have the same values."""
    loss: float          # mean over the tokens that count; 0 if none does
    tokens: float        # the number of tokens that count
    grad_norm: float     # before clipping
    skipped: bool        # the loss or a gradient was not finite, so no weight has changed
    stop: bool           # at least one rank wants to stop
    loss_scale: float    # the scale that this step used
    statistics: tuple[float]   # GPT.statistics, flat; often ()


class ZeroOptimizer:
    """Runs config.optimizer on flat buckets. If config.zero_stage is 1 or 2, each replica updates its own partition."""

    def __init__(self, model, config, mesh, trace=NO_TRACE):
        self.config, self.mesh, self.trace = config, mesh, trace
        self.buckets = []
        for kind, parameters in sort_into_buckets(model):
            partitions, partition = mesh.axis(kind.replicas) if config.zero_stage else (1, 0)        # count, own index
            self.buckets.append(Bucket(kind, parameters, partitions, partition,
                                       shards_gradients=config.zero_stage == 2 and partitions > 1))
        self.bucket_of = {weight: bucket for bucket in self.buckets for weight in bucket.parameters}
        parts = [part for chunk in [*model.chunks, *model.chunks_behind_head] for part in chunk.parts.values()]
        self.buckets_of = {part: Counter(self.bucket_of[weight] for module in part for weight in module.parameters())
                           for part in parts}            # how many parameters a part has in each bucket
        self.reports_needed = sum((self.buckets_of[part] for part in parts), Counter())
        for bucket in self.buckets:
            self.reports_needed[bucket] *= 1 if bucket.shards_gradients else config.microbatches
        self.reduces_in_flight = deque()                 # (bucket, its main_grad, work, received or None)
        self.has_loss, self.statistics = model.post_process, model.statistics
        self.updates = 0                                 # steps that were not skipped; AdamW's step count
        self.skipped_in_a_row = 0                        # without skips that a smaller loss scale might prevent
        self.loss_scale = LossScale(config)
        updates, self.optimizers = config.updates, {}    # optimizers: OptimizerSpec -> torch.optim.Optimizer
        self.spec_of = {bucket: updates[bucket.kind.update][0] for bucket in self.buckets}
        for spec in dict.fromkeys(self.spec_of.values()):
            groups = [dict(params=[bucket.master for bucket in buckets], buckets=buckets, weight_decay=decay)
                      for update, (its_spec, decay) in updates.items() if its_spec is spec
                      and (buckets := [bucket for bucket in self.buckets if bucket.kind.update == update])]
            self.optimizers[spec] = spec.make(groups, config, self)
        self.zero_grad()

    # ---- state, for checkpoints and memory accounts

    def states_of(self, bucket: Bucket) -> tuple[str, ...]:
        """Return what a checkpoint saves for each of a bucket's parameters: for AdamW ("weight", "exp_avg",
        "exp_avg_sq")."""
        return ("weight", *self.spec_of[bucket].moments)

    def optimizer_state(self, bucket: Bucket) -> dict:
        """Return the state that torch's optimizer keeps for a bucket."""
        return self.optimizers[self.spec_of[bucket]].state[bucket.master]

    def own_state(self, bucket: Bucket, name: str):
        """Return this rank's partition of a bucket's state, in fp32 or wider. name: one of states_of(bucket). Before
        the first update the optimizer has no moments, so for their names this returns None."""
        return bucket.master if name == "weight" else self.optimizer_state(bucket).get(name)

    def allocate_own_state(self, bucket: Bucket, name: str):
        """Return own_state() for a checkpoint to overwrite, and allocate it if it does not exist yet. The caller sets
        `updates` before the first call, and calls gather_weights() after all states are filled."""
        if name == "weight":
            return bucket.master
        state = self.optimizer_state(bucket)
        if self.spec_of[bucket].counts_steps:
            state["step"] = torch.tensor(float(self.updates), device=bucket.master.device)
        if name not in state:
            state[name] = torch.zeros_like(bucket.master)
        return state[name]

    def state_tensors(self) -> list[torch.Tensor]:
        """Return this rank's master weights, moments and step counts."""
        states = [value for bucket in self.buckets for value in self.optimizer_state(bucket).values()]
        return [bucket.master for bucket in self.buckets] + states

    def zero_grad(self):
        """Zero gradients and statistics, and restart the counts of reports, before the first forward of a step."""
        self.statistics.zero_()
        for bucket in self.buckets:
            bucket.zero_grad()
        self.reports_left = dict(self.reports_needed)

    def warm_up(self):
        """Run each collective of a step once, on zeros, so that communicators are set up before training."""
        self.finish_reduces()                            # finish what the warm-up's backward has launched
        self.zero_grad()
        for bucket in self.buckets:
            self.reduce(bucket)
        self.finalize_gradients()
        dist.all_reduce(torch.zeros(4 + self.statistics.numel(), dtype=torch.float64, device=self.mesh.device))
        self.gather_weights()

    # ---- phase 1

    def on_gradients_ready(self, modules):
        """Count one report for each parameter of `modules`, a part of a chunk. Reduce each bucket that now has all of
        its reports."""
        for bucket, count in self.buckets_of[modules].items():
            self.reports_left[bucket] -= count
            if self.reports_left[bucket] <= 0:
                self.reports_left[bucket] += self.reports_needed[bucket]
                self.reduce(bucket)

    def reduce(self, bucket):
        """Launch the all-reduce or reduce-scatter of a bucket's gradients."""
        group, kind = bucket.kind.replicas, "all_reduce" if bucket.partitions == 1 else "reduce_scatter"
        if self.mesh.axis(group)[0] == 1:
            return
        if bucket.shards_gradients and len(self.reduces_in_flight) == MAX_REDUCES_IN_FLIGHT:
            self.finish_reduces(MAX_REDUCES_IN_FLIGHT - 1)
        flat, received = bucket.pop_gradients(), None
        if bucket.partitions == 1:
            work = dist.all_reduce(flat, group=self.mesh.groups[group], async_op=True)
        else:
            work, received = reduce_scatter(flat, group=self.mesh.groups[group])
        self.reduces_in_flight.append((bucket, flat, work, received))
        self.trace.watch(kind, work, group=group, bytes=flat.nbytes)

    def finish_reduces(self, max_in_flight=0):
        """Wait for the oldest reduces until at most `max_in_flight` are left. Add up the received gradients in the
        order of the launches, so that a rerun gives the same bits."""
        done = [self.reduces_in_flight.popleft() for _ in range(len(self.reduces_in_flight) - max_in_flight)]
        for bucket, _, work, _ in done:
            self.wait(bucket.kind.replicas, work)
        with self.trace.span("optimizer"):
            for bucket, flat, _, received in done:
                own = flat.chunk(bucket.partitions)[bucket.partition]
                if received is not None:
                    torch.sum(received, dim=0, out=own)
                if bucket.shards_gradients:
                    bucket.own_grad.add_(own)

    def finalize_gradients(self):
        """After the last backward, finish all reduces. Then all-reduce some gradients once more, over the groups in
        `addends`: over the tp ranks if each knows only a part of the gradient, from its own tokens, heads or features;
        over the first and the last stage if each holds a copy of the tied embedding. The sum over the replicas is
        already done. So all replicas add the same numbers here, and their weights stay equal."""
        assert self.reports_left == self.reports_needed, "a gradient was never reported as complete"
        self.finish_reduces()
        for bucket in self.buckets:
            for group in bucket.kind.addends:
                work = dist.all_reduce(bucket.own_grad, group=self.mesh.groups[group], async_op=True)
                self.trace.watch("all_reduce", work, group=group, bytes=bucket.own_grad.nbytes)
                self.wait(group, work)

    # ---- phases 2 and 3

    def step(self, learning_rate: float, totals, stop=False) -> StepResult:
        """Divide the gradients by the loss scale and the number of tokens in the global batch, clip, update and gather.

        totals: the result of pipeline.run.
        stop: whether this rank wants to stop after the step.
        If the loss or the gradient norm is not finite, skip the update. Step number, data and learning rate advance as
        usual."""
        self.finalize_gradients()
        loss_sum, tokens, squares, stops, *statistics = self.sum_over_world(totals, stop)
        divisor, scale = tokens or math.inf, self.loss_scale.value     # inf: if no token counts, no gradient does
        grad_norm = math.sqrt(squares) / (divisor * scale)
        skipped = not (math.isfinite(loss_sum) and math.isfinite(grad_norm))
        if not (math.isfinite(loss_sum) and self.loss_scale.update(overflow=skipped)):
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            self.update(learning_rate, grad_norm, 1.0 / (divisor * scale))
        return StepResult(loss_sum / divisor, tokens, grad_norm, skipped, stops > 0, scale, tuple(statistics))

    def sum_over_world(self, totals, stop=False):
        """Return [loss sum, tokens, sum of squared gradients, ranks that want to stop, *statistics of the model],
        summed over the world.

        Each token and each parameter counts once. All ranks get the same numbers. So they agree whether to skip the
        step and whether to stop after it.
        """
        sums = F.pad(self.statistics.flatten(), (4, 0))        # four zeros, then the statistics
        sums[3].fill_(stop)                                    # `sums[3] = stop` would make the host wait for the GPU
        counts = float(self.has_loss and self.mesh.tp_rank == 0)           # 0 times a sum that is not finite is NaN
        sums[0], sums[1] = counts * totals.loss_sum, counts * totals.tokens
        with self.trace.span("optimizer"):
            for bucket in self.buckets:
                square = sum_of_squares(bucket.own_grad)
                sums[2] += square if self.counts_in_norm(bucket) else 0.0 * square
        work = dist.all_reduce(sums, async_op=True)
        self.trace.watch("all_reduce", work, group="world", bytes=sums.nbytes)
        self.wait("world", work)
        return sums.tolist()                                   # here, once per step, the host waits for the GPU

    def counts_in_norm(self, bucket: Bucket) -> bool:
        """Return whether this rank adds its gradients of this bucket to the global norm. Of all ranks that hold a copy
        of a gradient, exactly one does."""
        kind, mesh = bucket.kind, self.mesh
        return (self.spec_of[bucket].counts_in_norm and ("tp" in kind.shards or mesh.tp_rank == 0)
                and (bucket.partitions > 1 or mesh.axis(kind.replicas)[1] == 0)
                and ("embedding" not in kind.addends or mesh.pp_rank == 0))

    def update(self, learning_rate: float, grad_norm: float, scale: float):
        """Multiply the gradients by `scale`, then run phases 2 and 3."""
        if self.config.clip_grad > 0.0:
            scale *= min(1.0, self.config.clip_grad / (grad_norm + 1e-6))
        with self.trace.span("optimizer"):
            for bucket in self.buckets:
                bucket.own_grad.mul_(scale)
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        self.updates += 1
        self.gather_weights()

    def gather_weights(self):
        """Phase 3: round the master weights to the training type, and send each partition to all replicas."""
        works = []
        for bucket in self.buckets:
            group = bucket.kind.replicas
            bucket.derived.clear()
            if bucket.master is not bucket.own_weights:
                bucket.own_weights.copy_(bucket.master)
            if bucket.partitions > 1:
                works.append((group, all_gather(bucket.weights, bucket.own_weights, group=self.mesh.groups[group])))
                self.trace.watch("all_gather", works[-1][1], group=group, bytes=bucket.weights.nbytes)
        for group, work in works:
            self.wait(group, work)

    def wait(self, group: str, work):
        with self.trace.span("wait", group=group):
            work.wait()
