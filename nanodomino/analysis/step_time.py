"""How long a training step must take: a model of few numbers, each of which can be looked up or measured.

    products     a rank's matrix products, at the rate that it reaches in them
    tp wires     sums of tensor parallelism that nothing hides: with s slices an action takes as long as all its work,
                 as all its wires, or as one slice's work and wires, whichever is longest (2409.15241, section 3). A
                 pair has the work and the wires of both its halves, and twice as many slices to take turns; where
                 input and weight gradients are apart, no weight gradient is a cover of wires
    bubble       idle time of the busiest stage when the schedule is played through with each stage's own times
                 (schedules.py); (p - 1)/m of its busy time for 1F1B and equal stages (2104.04473, section 2.2)
    pp wires     by how much longer that takes when each message takes its time. In 1F1B with equal stages every turn
                 waits for one: a stage has nothing else to do between the forward that it has sent on and the backward
                 that this brings back
    dp wires     gradients beyond what a stage still does when they are final, chunk by chunk: with one chunk, beyond
                 the last backward; gathering the weights, which nothing hides. In ZeRO-2 no backward is shorter than
                 the wires of its gradients, as few buckets may be on their way: what that makes of the schedule
    optimizer    what is read and written for it, at the rate of the memory
    again        what backward computes again; it covers sums, as weight gradients do
    host copies  to and from the host's memory, by how much they take longer than the rest of an action

They add up to the step. Left out: Python, the launch of kernels, products that slices make too small to be efficient,
sums that slow the work beside them, and ranks that wait for a slower one. Element-wise work is in the rate of the
products.
"""

import dataclasses
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.analysis import expected_memory, expected_traffic, sizes
from nanodomino.analysis.expected_traffic import Traffic
from nanodomino.analysis.sizes import flops_per_token
from nanodomino.config.config import Config
from nanodomino.errors import require
from nanodomino.model import Chunk
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules import simulation


@dataclass(frozen=True)
class Machine:
    """What a process has to itself."""
    products: float              # FLOP/s that it reaches in matrix products
    near: float                  # bytes/s that it sends to processes of its host
    far: float                   # and to those of others
    latency: float               # seconds that a collective takes, beside its bytes
    per_host: int                # processes of a host
    memory: float                # bytes/s of its memory, for what is not a product
    host: float = math.inf       # bytes/s that it copies to its host, and from there


# ---- the model

def communication_seconds(config: Config, machine: Machine, at, found: list[Traffic]) -> float:
    """On the wires, one collective after the other. A ring is as slow as its slowest link."""
    seconds = 0.0
    for one in found:
        ranks = set(sizes.group_ranks(at, one.group))
        rate = machine.near if len({rank // machine.per_host for rank in ranks}) == 1 else machine.far
        if len(ranks) > 1 and one.kind != "receive":
            seconds += one.calls * machine.latency + expected_traffic.bytes_sent(one.kind, one.bytes, len(ranks)) / rate
    return seconds


def forward_flops(config: Config, at, chunk: Chunk) -> tuple[float, float, float]:
    """Of one microbatch forward through a chunk: (products with the layers' weights, with the head's, attention's own).
    Attention is not halved for causality."""
    h, n, heads = config.hidden_size, sizes.tokens_per_microbatch(config), config.num_attention_heads * config.kv_channels
    matrices = sum(weight.numel() for layer in chunk.layers for weight in layer.parameters() if weight.dim() == 2)
    head = h * sizes.local_vocab_size(config, at) if chunk.post_process else 0
    return 2 * n * matrices, 2 * n * head, len(chunk.layers) * 4 * n * config.seq_length * heads / config.tp


def recomputed_flops(config: Config, at, chunk: Chunk) -> float:
    """What its backward computes again of them: attention's own, and the column-parallel products."""
    *_, attention = forward_flops(config, at, chunk)
    columns = 2 * sizes.tokens_per_microbatch(config) * sum(sublayer.inside().restored_elements for sublayer in chunk.sublayers)
    forgets = GRANULARITIES[config.recompute_granularity]
    return attention * ("activation" in forgets) + columns * ("h" in forgets)


def stage_flops(config: Config, at) -> tuple[float, float]:
    """FLOPs of a microbatch on a stage, forward and backward, and of what is computed again."""
    chunks = sizes.stage_model(config, at).chunks
    return (3 * sum(sum(forward_flops(config, at, chunk)) for chunk in chunks),
            sum(recomputed_flops(config, at, chunk) for chunk in chunks))


@dataclass(frozen=True)
class Cost:
    """Seconds of an action, or of a half of a pair."""
    work: float                  # that waits for sums, or that sums wait for
    wires: float = 0.0           # the sums
    cover: float = 0.0           # work that waits for no sum, and for which no sum waits
    copies: float = 0.0          # to the host, or back
    reduces: float = 0.0         # on other wires: its gradients, whose reduce it must keep up with


def action_seconds(config: Config, *halves: Cost) -> float:
    """Seconds of an action, both of whose halves are under way if it is a pair.

    One slice works, then waits while its cover runs; with more, the others work meanwhile: nothing is faster than all
    the work, than all the wires, or than one slice alone. Of columns, all but the last travel behind the next one's
    product, and about half of the work is such products.
    """
    columns = expected_traffic.chunk_count(config.columns, config.hidden_size)

    def alone(half):
        left = max(half.wires / columns, half.wires - (1 - 1 / columns) * half.work / 2)
        return (half.work + max(left, half.cover)) / sizes.slice_count(config)

    return max(sum(half.work + half.cover for half in halves), sum(half.wires for half in halves), *map(alone, halves),
               *(max(half.copies, half.reduces) for half in halves))


def action_costs(config: Config, machine: Machine, at, keeps_up=False) -> dict[tuple[str, int], Cost]:
    """(kind of an action, chunk) -> its cost on a stage. Of split gradients only the head's stay together.
    keeps_up: with the sums of each microbatch's gradients, where they are summed one by one."""
    found, copied = {}, sizes.residual_bytes(config) / machine.host if expected_memory.offloads_to_host(config) else 0.0
    share, (every, _) = gradient_shares_of_chunks(config, at), data_parallel_seconds(config, machine, at)
    for number, chunk in enumerate(sizes.stage_model(config, at).chunks):
        dense, head, attention = (count / machine.products for count in forward_flops(config, at, chunk))
        reduces = share[number] * every if keeps_up else 0.0
        sums = expected_traffic.tensor_parallel_traffic(config, at, [chunk])
        up, down = (communication_seconds(config, machine, at, [one for one in sums if one.backward == backward])
                    / config.microbatches for backward in (False, True))
        again, copies = recomputed_flops(config, at, chunk) / machine.products, len(chunk.sublayers) * copied
        found |= {("forward", number): Cost(dense + head + attention, up, copies=copies),
                  ("backward", number): Cost(dense + head + 2 * attention, down, dense + head + again, copies, reduces),
                  ("input_backward", number): Cost(dense + head + 2 * attention, down, head + again, copies),
                  ("weight_backward", number): Cost(dense, reduces=reduces)}
    return found


def data_parallel_seconds(config: Config, machine: Machine, at) -> tuple[float, float]:
    """On the wires between replicas: (for each time that gradients are summed, for what else happens once a step)."""
    found = expected_traffic.once_per_step_traffic(config, at)
    sums, rest = (communication_seconds(config, machine, at, [one for one in found if one.backward == backward])
                  for backward in (True, False))
    return sums / sizes.gradient_reductions(config), rest


def gradient_shares_of_chunks(config: Config, at) -> list[float]:
    """Of a stage's gradients, about: each chunk's."""
    layers = [len(chunk.layers) for chunk in sizes.stage_model(config, at).chunks]
    return [one / sum(layers) for one in layers]


def step_seconds(config: Config, machine: Machine) -> dict[str, float]:
    """An optimizer step, in parts that add up to it."""
    stages = [sizes.mesh_at(config, stage) for stage in range(config.pp)]
    free, real = simulate_schedule(config, machine, [action_costs(config, machine, at) for at in stages])
    last = real
    if sizes.gradient_reductions(config) > 1:
        (last,) = simulate_schedule(config, machine, [action_costs(config, machine, at, keeps_up=True) for at in stages], messages=[True])
    ideal = simulation.busy_time(free)
    products, again = (config.microbatches * count / machine.products                # the same in any schedule
                       for count in max((stage_flops(config, at) for at in stages), key=sum))
    parts = {"products": products}
    if config.recompute_granularity != "none":
        parts["again"] = again
    if expected_memory.offloads_to_host(config):
        there = dataclasses.replace(config, checkpoint_in_cpu=False)
        parts["host copies"] = ideal - simulation.busy_time(
            *simulate_schedule(there, machine, [action_costs(there, machine, at) for at in stages], messages=(False,)))
    return {**parts, "tp wires": max(0.0, ideal - sum(parts.values())),
            "bubble": simulation.step_time(free) - ideal,
            "pp wires": simulation.step_time(real) - simulation.step_time(free),
            "dp wires": (simulation.step_time(last) - simulation.step_time(real)
                         + max(exposed_data_parallel_seconds(config, machine, at, row) for at, row in zip(stages, last))),
            "optimizer": max(optimizer_memory_traffic(config, at) for at in stages) / machine.memory}


def simulate_schedule(config: Config, machine: Machine, of_stages: list[dict], messages=(False, True)) -> tuple[list, ...]:
    """What each stage does when, in seconds: with messages that are free, and with such as take their time.
    of_stages: of each its costs; messages: whether they take time, one after the other."""
    message = communication_seconds(config, machine, sizes.mesh_at(config),
                           [Traffic("pp", "send", 1, sizes.residual_bytes(config))])

    @cache
    def seconds(stage, *whats):
        return action_seconds(config, *(of_stages[stage][what] for what in whats))

    def duration(stage, action):
        return seconds(stage, *((half.kind, half.chunk) for half in action.halves))

    return tuple(simulation.simulate(config.timetable, duration, message if real else 0.0) for real in messages)


def exposed_data_parallel_seconds(config: Config, machine: Machine, at, row) -> float:
    """Seconds by which the sums over replicas, and what else happens once a step, outlast the actions of a stage, whose
    times `row` has. The gradients of a chunk can travel from the begin of its last action on."""
    (behind, after), share = data_parallel_seconds(config, machine, at), gradient_shares_of_chunks(config, at)
    final = {half.chunk: begin for action, begin, _ in row for half in action.halves if half.kind != "forward"}
    travelled = 0.0
    for chunk, begin in sorted(final.items(), key=lambda item: item[1]):
        travelled = max(travelled, begin) + share[chunk] * behind
    return max(0.0, travelled - row[-1][2]) + after


def optimizer_memory_traffic(config: Config, at) -> float:
    """Read and written in a step: gradients zeroed; of the own part the norm, the scaling, the update (weights and
    moments read and written, gradients read), and of 16-bit weights the copy. In ZeRO-2 gradients are zeroed for each
    microbatch, and the own part of them added to what there is of it."""
    e, w, times = sizes.bytes_per_element(config), sizes.bytes_per_main_element(config), sizes.gradient_reductions(config)
    own = (1 + 2 + 3 + 2 * len(OPTIMIZERS[config.optimizer].moments)) * w + (w + e if e < w else 0)
    own += 3 * w * times if sizes.gradient_shards(config) > 1 else 0
    return sum(size for _, size in sizes.bucket_sizes(config, at)) * (w * times + own / sizes.optimizer_shards(config))


def mfu(config: Config, seconds: float, peak: float) -> float:
    """Model FLOPs of a step, 6 N + 12 L h s a token, as a part of what all devices could do at `peak` FLOP/s each."""
    return flops_per_token(config) * config.global_batch_size * config.seq_length / (seconds * peak * config.world_size)


# ---- this machine

def measure_machine(config: Config, mesh, most_rows=None) -> Machine:
    """The rates of a process while all others are as busy, each in an instant. All ranks call it together.

    products: an MLP forward and backward, on a slice (of it `most_rows` tokens at most) and this rank's part of the
    features; wires: sums of a slice's activation; memory: numbers that are read and written; host: copies of a slice's
    activation, where there are any.
    """
    dtype, device = config.params_dtype, mesh.device
    rows = min(sizes.tokens_per_microbatch(config) // sizes.slice_count(config), most_rows or sys.maxsize)
    h, ffn = config.hidden_size, config.ffn_hidden_size // config.tp
    x, up, down = (torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
                   for shape in ((rows, h), (ffn, h), (h, ffn)))
    sent, large = torch.zeros(rows, h, device=device, dtype=dtype), torch.zeros(2**22, device=device)

    def mlp():
        y = x + F.gelu(F.layer_norm(x, (h,)) @ up.t(), approximate="tanh") @ down.t()
        torch.autograd.grad(y.sum(), [x, up, down])

    memory = measure_rate(2 * large.nbytes, lambda: large.mul_(1.0), device)
    group = next((group for group in (mesh.tp_group, mesh.dp_group, mesh.pp_group) if group.size() > 1), None)
    wires = memory if group is None else measure_rate(expected_traffic.bytes_sent("all_reduce", sent.nbytes, group.size()),
                                              lambda: dist.all_reduce(sent, group=group), device)
    pinned = torch.empty_like(sent, device="cpu", pin_memory=True) if expected_memory.offloads_to_host(config) else None
    host = math.inf if pinned is None else measure_rate(sent.nbytes, lambda: pinned.copy_(sent, non_blocking=True), device)
    return Machine(products=measure_rate(3 * 2 * 2 * rows * h * ffn, mlp, device), near=wires, far=wires, latency=0.0,
                   per_host=config.world_size, memory=memory, host=host)


def require_memory(config: Config, device, local_world_size: int):
    """Raises UserError, before anything is allocated, where the run can't fit into this process's memory."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size
    config, most = dataclasses.replace(config, device=device.type), "--num-layers or --hidden-size"
    needed = expected_memory.average_state_bytes(config)
    if needed <= memory:                                       # half of it: right within a factor of two
        needed = expected_memory.fullest_rank_bytes(config) // 2
        most = "--micro-batch-size or --num-layers"
    require(needed <= memory,
            f"the fullest of {config.world_size} processes would need at least {needed / 1e9:,.0f} GB of memory, and "
            f"each has {memory / 1e9:,.0f} GB here; lower {most}, or give the model more processes (--tp, --pp)")


def estimate(config: Config, mesh) -> tuple[float, int]:
    """(seconds of a step, bytes of the fullest rank), from a look at this machine that takes a moment. All ranks call
    it together, and each gets the same. Right within a factor of two or so."""
    config = dataclasses.replace(config, device=mesh.device.type)
    seconds = sum(step_seconds(config, measure_machine(config, mesh, most_rows=128)).values())
    return slowest(seconds), expected_memory.fullest_rank_bytes(config)


def measure_rate(amount: float, work, device, times=5) -> float:
    """amount a second, when work() is done by all ranks at once, several times in a row."""
    seconds = []
    for _ in range(3):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(slowest(time.perf_counter() - begin))
    return amount * times / statistics.median(seconds)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
