"""Predicts the seconds of a training step from a few rates, each of which can be looked up or measured.

The prediction is the sum of the parts below, named as in the JSON that `bench.py plan` prints:

    products     the matmuls of the busiest stage
    element-wise the bytes that its norms, residuals, rotations, activation functions and losses read and write, divided
                 by a rate. Left out if the matmuls' rate was measured with such work included
    again        the recomputation in backward. Like weight gradients, this can hide communication
    host copies  copying activations to the host and back. Only the time by which the copies outlast an action's
                 compute and communication counts
    tp wires     tensor, context and expert parallel communication that nothing hides. With several slices, an action
                 takes the longest of three times: all its compute, all its communication, or one slice's compute +
                 communication (2409.15241, section 3). Communication in flight slows compute down
                 (Machine.overlap_slowdown), which counts here too. A pair does the work of both its halves, and the
                 slices of both take turns. If a schedule splits input and weight gradients, the weight gradients hide
                 nothing. Of context parallelism, the weight gradient of W2 hides the first collective in backward;
                 the others are hidden only by other slices
    bubble       the idle time of the busiest stage, from a simulation of the schedule with each stage's own times. For
                 1F1B on equal stages it is (p - 1)/m of the busy time (2104.04473, section 2.2)
    pp wires     the time that messages between stages add to the simulated step. In 1F1B on equal stages nothing
                 hides them, because a stage that waits for a message has no other action to run
    dp wires     gradient reduction that is still in flight after the stage's last action, and the all-gather of the
                 weights. Both are exposed. In ZeRO-2 a backward takes at least as long as its reductions, because
                 only a few of them may be in flight
    optimizer    the bytes that the update reads and writes, divided by the memory's rate

The prediction leaves out Python, kernel launches, the lower efficiency of narrow and of sliced matmuls, and waits for
slower ranks. Experts are assumed to be chosen equally often.
"""

import dataclasses
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.analysis import expected_memory, expected_traffic, sizes
from nanodomino.analysis.context_parallel import gathers_keys, keys_per_token
from nanodomino.analysis.expected_traffic import Traffic
from nanodomino.analysis.hardware import FP8_SPEEDUP
from nanodomino.analysis.sizes import flops_per_token, fp8_matrices, query_and_key_bytes
from nanodomino.analysis.sublayer_memory import activated_features, activation_bytes
from nanodomino.config.config import Config
from nanodomino.errors import require
from nanodomino.layers.moe import MoE
from nanodomino.mesh import Mesh
from nanodomino.model import Chunk
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules import simulation


@dataclass(frozen=True)
class Machine:
    """The rates that one process reaches."""
    matmul_rate: float           # FLOP/s
    intra_host_rate: float       # bytes/s sent to processes on the same host
    inter_host_rate: float       # bytes/s sent to other hosts
    latency: float               # seconds that each collective takes in addition to sending its bytes
    ranks_per_host: int
    memory_rate: float           # bytes/s of reads and writes
    host_copy_rate: float = math.inf         # bytes/s between a GPU and its host
    elementwise_rate: float = math.inf       # bytes/s of element-wise work; infinite if matmul_rate includes that work
    overlap_slowdown: float = 0.0            # share of the GPU that a collective in flight takes from compute


# ---- the model

def communication_seconds(config: Config, machine: Machine, mesh: Mesh, found: list[Traffic]) -> float:
    """Return the seconds that these collectives and sends take one after another.

    If a group spans several hosts, it communicates at the rate between hosts: a ring is as slow as its slowest link.
    """
    seconds = 0.0
    for traffic in found:
        ranks, hosts = ranks_and_hosts(mesh, traffic.group, machine.ranks_per_host)
        rate = machine.intra_host_rate if hosts == 1 else machine.inter_host_rate
        if ranks > 1 and traffic.kind != "receive":
            sent = expected_traffic.bytes_sent(traffic.kind, traffic.bytes, ranks)
            seconds += traffic.calls * machine.latency + sent / rate
    return seconds


@lru_cache(maxsize=4096)
def ranks_and_hosts(mesh: Mesh, group: str, ranks_per_host: int) -> tuple[int, int]:
    """Count the ranks of this rank's process group, and the hosts that they are on."""
    ranks = set(sizes.group_ranks(mesh, group))
    return len(ranks), len({rank // ranks_per_host for rank in ranks})


def forward_flops(config: Config, mesh: Mesh, chunk: Chunk) -> tuple[float, float, float]:
    """Return the forward FLOPs of a microbatch in a chunk: (the layers' weights, the head, attention). On GPUs a
    FLOP in fp8 counts half, because it takes half the time.

    Each of a rank's experts computes k/E of the rank's own tokens, and as many tokens of each other ep rank.
    Attention has two matmuls without weights, q k^T and the product with v. All pairs of tokens count, although a
    causal mask needs only half of them. If c ranks share a sample, each computes 1/c of the scores. A depth of
    multi-token prediction adds its merge, of which every rank computes all rows that it holds, and another pass
    through the head.
    """
    n, heads = sizes.tokens_per_microbatch(config), config.num_attention_heads * config.kv_channels
    matrices, _ = matrix_elements(chunk, sizes.expert_share(config) * config.ep, fp8_speedup(config))
    head = config.head_uses * config.hidden_size * sizes.local_vocab_size(config, mesh) if chunk.post_process else 0
    matrices += chunk.post_process * config.mtp_num_layers * 2 * config.hidden_size ** 2 / config.sequence_shards
    return 2 * n * matrices, 2 * n * head, len(chunk.layers) * 4 * n * config.seq_length * heads / config.tp


@lru_cache(maxsize=4096)
def matrix_elements(chunk: Chunk, experts: float, fp8_speedup: float) -> tuple[float, float]:
    """Count the elements of the layers' matrices: (all, those that full recomputation multiplies by again). Of this
    rank's experts it counts only the share `experts`, and of matrices in fp8 the share 1 / fp8_speedup."""
    in_fp8 = set(fp8_matrices(chunk))
    return (sum(weight.numel() * (experts if "ep" in weight.spec.kind.shards else 1)
                / (fp8_speedup if weight in in_fp8 else 1)
                for layer in chunk.layers for weight in layer.parameters() if weight.dim() > 1),
            sum(sublayer.inside().restored_elements / (fp8_speedup if sublayer.fp8 else 1)
                for sublayer in chunk.sublayers))


def fp8_speedup(config: Config) -> float:
    """Return how many times as fast a matmul is in fp8 as in 16 bits. CPUs have no fp8, so it counts as 1 there."""
    return FP8_SPEEDUP if config.device == "cuda" else 1.0


def fp8_bytes(config: Config, chunk: Chunk) -> tuple[float, float]:
    """Estimate the bytes that fp8 reads and writes in a chunk for a microbatch: (forward, backward). 0 without fp8.

    To convert a tensor, a GPU reads it twice, for its largest number and for its values, and writes 1 byte per number.
    Forward converts the inputs of the matmuls. With tensorwise scales backward converts the gradients and attention's
    output, and transposes all operands of weight gradients in 8 bits. With rowwise scales it converts the gradients
    twice and the inputs again. The product of a weight gradient is written and read, before it is added to main_grad.
    """
    e, x, (q, k) = sizes.bytes_per_element(config), sizes.hidden_bytes(config), query_and_key_bytes(config)
    before, after = activation_bytes(config, config.ffn_hidden_size)
    convert, transpose, forward, backward = 2 + 1 / e, 2 / e, 0.0, 0.0
    for sublayer in (sublayer for sublayer in chunk.sublayers if sublayer.fp8):
        inputs, gradients, again = x + after, x + before, 0.0
        if sublayer.attends:
            inputs, gradients, again = x + q / config.tp, x + (q + 2 * k) / config.tp, q / config.tp
        forward += convert * inputs
        if config.fp8_recipe == "rowwise":
            backward += convert * (2 * gradients + inputs)
        else:
            backward += convert * (gradients + again) + transpose * (inputs + gradients)
    products = sum(2 * 4 * weight.numel() for weight in fp8_matrices(chunk)) * sizes.slice_count(config)
    return forward, backward + products


def elementwise_bytes(config: Config, mesh: Mesh, chunk: Chunk) -> tuple[float, float, float]:
    """Estimate the bytes that a microbatch's element-wise work in a chunk reads and writes: (forward, backward,
    recomputed in backward).

    Each operation reads its inputs and writes its outputs once, as after torch.compile. In forward, residual + norm
    reads x and y and writes x' and h; RoPE or the norm of q and k rewrites both; the activation function reads and
    writes the MLP's wide tensors; cross entropy reads the logits twice. Experts sort their k X of rows four times: to
    send, by expert, back, and by token. Backward does the same with gradients, and the activation function reads its
    input again. Without sequence parallelism every tp rank repeats residual + norm. A depth of multi-token prediction
    normalizes two tensors and joins them, which moves as much as the norms of a layer. With context parallelism the
    keys and values of all ranks are copied in the order in which attention reads them, or what an all-to-all exchanges
    is copied before and after it.
    """
    x, layers, dropped = sizes.residual_bytes(config), len(chunk.layers), GRANULARITIES[config.recompute_granularity]
    q, k = (size / config.tp for size in query_and_key_bytes(config))
    copied = layers * 2 * (2 * k * keys_per_token(config) if gathers_keys(config) else 2 * (2 * q + 2 * k))
    copied *= config.cp > 1
    rotated = layers * 2 * (q + k) * (config.rope or config.qk_layernorm)
    before, after = activation_bytes(config, sum(activated_features(config, type(layer.mlp)) for layer in chunk.layers))
    experts = sum(isinstance(layer.mlp, MoE) for layer in chunk.layers)
    sorted_rows = experts * 4 * 2 * config.moe_router_topk * sizes.hidden_bytes(config)
    logits = merged = 0
    if chunk.post_process:
        words = sizes.local_vocab_size(config, mesh)
        logits = 2 * config.head_uses * sizes.bytes_per_element(config) * sizes.tokens_per_microbatch(config) * words
        merged = config.mtp_num_layers * 2 * 4 * x
    converted, converted_back = fp8_bytes(config, chunk)
    return (layers * 2 * 4 * x + rotated + copied + before + after + sorted_rows + merged + logits + converted,
            layers * 2 * 4 * x + rotated + copied + 2 * before + after + sorted_rows + merged + logits + converted_back,
            (rotated + copied + before + after) * ("activation" in dropped) + layers * 2 * 2 * x * ("h" in dropped))


def recomputed_flops(config: Config, mesh: Mesh, chunk: Chunk) -> float:
    """Return the FLOPs that backward recomputes for a microbatch in a chunk.

    Selective recomputation repeats attention's own matmuls, full recomputation also the column-parallel matmuls.
    """
    *_, attention = forward_flops(config, mesh, chunk)
    _, columns = matrix_elements(chunk, 1.0, fp8_speedup(config))
    dropped = GRANULARITIES[config.recompute_granularity]
    return attention * ("activation" in dropped) + 2 * sizes.tokens_per_microbatch(config) * columns * ("h" in dropped)


def stage_flops(config: Config, mesh: Mesh) -> tuple[float, float]:
    """Return a microbatch's FLOPs on a stage: (forward plus backward, recomputed)."""
    chunks = sizes.stage_chunks(config, mesh)
    return (3 * sum(sum(forward_flops(config, mesh, chunk)) for chunk in chunks),
            sum(recomputed_flops(config, mesh, chunk) for chunk in chunks))


@dataclass(frozen=True)
class Cost:
    """The seconds of an action, or of half a pair, in parts that may overlap."""
    compute: float               # compute that produces a collective's input or needs its result
    communication: float = 0.0   # the collectives of tensor, context and expert parallelism
    independent: float = 0.0     # compute that no collective waits for: weight gradients, recomputation
    copies: float = 0.0          # copies between GPU and host
    reduces: float = 0.0         # gradient reductions over dp; the action takes at least as long
    slowing: float = 0.0         # how much longer compute takes while the collectives are in flight
    exchanges: float = 0.0       # the part of communication that columns do not cut: the all-to-alls of experts
    places: float = 0.0          # the part of communication between ranks that share samples
    covered: float = 0.0         # the part of `places` that independent compute hides


def action_seconds(config: Config, *halves: Cost) -> float:
    """Return the seconds of an action, or of a pair if two halves are given.

    A slice computes and launches a collective. While the collective is in flight, the slice does independent compute,
    and other slices compute too. So an action takes as long as all its compute, all its communication, or one slice
    alone, whichever is longest; and no less than its copies and reductions. The independent compute that runs during
    a collective of context parallelism can't hide other collectives.
    With several columns, each column's collective but the last overlaps the next column's matmul. The formula assumes
    that half of the compute is in such matmuls.
    """
    columns = expected_traffic.column_count(config.columns, config.hidden_size)

    def one_slice(half):
        cut = half.communication - half.exchanges - half.places
        waiting = half.exchanges + max(cut / columns, cut - (1 - 1 / columns) * half.compute / 2)
        return (half.compute + half.places + max(waiting, half.independent - half.covered)) / sizes.slice_count(config)

    return max(sum(half.compute + half.independent + half.slowing for half in halves),
               sum(half.communication for half in halves), *map(one_slice, halves),
               *(max(half.copies, half.reduces) for half in halves))


def action_costs(config: Config, machine: Machine, mesh: Mesh, keeps_up=False) -> dict[tuple[str, int], Cost]:
    """Return {(kind of action, chunk): its cost} on a stage.

    If backward is split, input_backward also has the head's weight gradient, which is never deferred.
    keeps_up: count the reduction of each microbatch's gradients, which ZeRO-2 does during the microbatch's backward.
    """
    found, copied = {}, 0.0
    if expected_memory.offloads_to_host(config):
        copied = sizes.residual_bytes(config) / machine.host_copy_rate
    shares = chunk_shares(config, mesh)
    each_reduction = data_parallel_seconds(config, machine, mesh)[0] if keeps_up else 0.0
    for number, chunk in enumerate(sizes.stage_chunks(config, mesh)):
        dense, head, attention = (count / machine.matmul_rate for count in forward_flops(config, mesh, chunk))
        shared = expected_traffic.context_parallel_traffic(config, mesh, [chunk])
        tensor, context, experts = ([communication_seconds(config, machine, mesh, [
            collective for collective in traffic if collective.backward == is_backward]) / config.microbatches
            for is_backward in (False, True)] for traffic in (
                expected_traffic.tensor_parallel_traffic(config, mesh, [chunk]), shared,
                expected_traffic.expert_parallel_traffic(config, mesh, [chunk])))
        forward, backward = map(sum, zip(tensor, context, experts))
        first = communication_seconds(config, machine, mesh, [one for one in shared if one.backward][:1])
        row = 2 * config.hidden_size * config.num_attention_heads * config.kv_channels / config.tp       # per token
        covered = min(first / config.microbatches, len(chunk.layers) * row * sizes.tokens_per_microbatch(config)
                      / machine.matmul_rate)
        moved, moved_back, again = (size / machine.elementwise_rate for size in elementwise_bytes(config, mesh, chunk))
        recomputed = recomputed_flops(config, mesh, chunk) / machine.matmul_rate + again
        copies, reduces = len(chunk.sublayers) * copied, shares[number] * each_reduction
        # Attention has no weights, so both of its matmuls in backward are for input gradients.
        gradients = dense + head + 2 * attention + moved_back
        slow, slow_back = (machine.overlap_slowdown * seconds for seconds in (forward, backward))
        found |= {("forward", number): Cost(dense + head + attention + moved, forward, copies=copies, slowing=slow,
                                            exchanges=experts[0], places=context[0]),
                  ("backward", number): Cost(gradients, backward, dense + head + recomputed, copies, reduces,
                                             slow_back, experts[1], context[1], covered),
                  ("input_backward", number): Cost(gradients, backward, head + recomputed, copies, slowing=slow_back,
                                                   exchanges=experts[1], places=context[1]),
                  ("weight_backward", number): Cost(dense, reduces=reduces)}
    return found


def data_parallel_seconds(config: Config, machine: Machine, mesh: Mesh) -> tuple[float, float]:
    """Return (seconds of one gradient reduction, seconds of the step's final communication).

    The final communication follows the reductions: the all-gather of the weights and a few small all-reduces.
    """
    found = expected_traffic.optimizer_traffic(config, mesh)
    reductions, rest = (communication_seconds(config, machine, mesh, [traffic for traffic in found
                                                                      if traffic.backward == backward])
                        for backward in (True, False))
    return reductions / sizes.gradient_reductions(config), rest


def chunk_shares(config: Config, mesh: Mesh) -> list[float]:
    """Return each chunk's share of the stage's layers, which is about its share of the stage's gradients."""
    layers = [len(chunk.layers) for chunk in sizes.stage_chunks(config, mesh)]
    return [count / sum(layers) for count in layers]


@sizes.linear_in_microbatches(16)
def step_seconds(config: Config, machine: Machine) -> dict[str, float]:
    """Return {part of a step: seconds}. The top of this file explains the parts."""
    stages = [sizes.mesh_at(config, stage) for stage in range(config.pp)]
    free, real = simulate_schedule(config, machine, [action_costs(config, machine, mesh) for mesh in stages])
    final = real
    if sizes.gradient_reductions(config) > 1:
        costs = [action_costs(config, machine, mesh, keeps_up=True) for mesh in stages]
        (final,) = simulate_schedule(config, machine, costs, messages=(True,))
    ideal = simulation.busy_time(free)
    busiest = max(stages, key=lambda mesh: sum(stage_flops(config, mesh)))
    products, again = (config.microbatches * flops / machine.matmul_rate             # the same in any schedule
                       for flops in stage_flops(config, busiest))
    parts = {"products": products}
    if machine.elementwise_rate < math.inf:
        moved = [elementwise_bytes(config, busiest, chunk) for chunk in sizes.stage_chunks(config, busiest)]
        forward, backward, recomputed = (config.microbatches * sum(counts) / machine.elementwise_rate
                                         for counts in zip(*moved))
        parts["element-wise"], again = forward + backward, again + recomputed
    if config.recompute_granularity != "none":
        parts["again"] = again
    if expected_memory.offloads_to_host(config):
        on_gpu = dataclasses.replace(config, checkpoint_in_cpu=False)
        costs = [action_costs(on_gpu, machine, mesh) for mesh in stages]
        (without,) = simulate_schedule(on_gpu, machine, costs, messages=(False,))
        parts["host copies"] = ideal - simulation.busy_time(without)
    return {**parts, "tp wires": max(0.0, ideal - sum(parts.values())),
            "bubble": simulation.step_time(free) - ideal,
            "pp wires": simulation.step_time(real) - simulation.step_time(free),
            "dp wires": (simulation.step_time(final) - simulation.step_time(real)
                         + max(exposed_data_parallel_seconds(config, machine, mesh, row)
                               for mesh, row in zip(stages, final))),
            "optimizer": max(optimizer_memory_traffic(config, mesh) for mesh in stages) / machine.memory_rate}


def simulate_schedule(config: Config, machine: Machine, costs_of_stages: list[dict], messages=(False, True)) -> tuple:
    """Simulate the schedule once for each entry of `messages`: True if messages take time, False if they are free.

    costs_of_stages: action_costs() of each stage. Returns one result per entry: for each stage a list of (action,
    start, end), in seconds.
    """
    message = communication_seconds(config, machine, sizes.mesh_at(config),
                                    [Traffic("pp", "send", 1, sizes.residual_bytes(config))])

    @cache
    def seconds(stage, *keys):
        return action_seconds(config, *(costs_of_stages[stage][key] for key in keys))

    def duration(stage, action):
        return seconds(stage, *((half.kind, half.chunk) for half in action.halves))

    return tuple(simulation.simulate(config.timetable, duration, message if real else 0.0) for real in messages)


def exposed_data_parallel_seconds(config: Config, machine: Machine, mesh: Mesh, row) -> float:
    """Return the seconds that a stage spends on gradient reduction and final communication after its last action.

    row: the stage's list of (action, start, end). The reduction of a chunk's gradients starts together with the chunk's
    last backward, because each bucket is reduced as soon as its gradients are ready.
    """
    (reduction, after), shares = data_parallel_seconds(config, machine, mesh), chunk_shares(config, mesh)
    last_start = {half.chunk: start for action, start, _ in row for half in action.halves if half.kind != "forward"}
    reduced = 0.0
    for chunk, start in sorted(last_start.items(), key=lambda item: item[1]):
        reduced = max(reduced, start) + shares[chunk] * reduction
    return max(0.0, reduced - row[-1][2]) + after


def optimizer_memory_traffic(config: Config, mesh: Mesh) -> float:
    """Return the bytes that a rank's optimizer reads and writes in a step.

    The rank zeroes all of its gradients. Of its own shard it reads the gradients for the norm, then reads and writes
    them to scale them. The update reads the gradients, and reads and writes weights and moments. In 16-bit training the
    master weights are then read to write the 16-bit weights. ZeRO-2 zeroes and accumulates gradients for every
    microbatch. fp8 reads each matrix four times to write it and its transpose in 8 bits.
    """
    e, w = sizes.bytes_per_element(config), sizes.bytes_per_main_element(config)
    times = sizes.gradient_reductions(config)
    own = (1 + 2 + 3 + 2 * len(OPTIMIZERS[config.optimizer].moments)) * w + (w + e if e < w else 0)
    own += 3 * w * times if sizes.gradient_shards(config) > 1 else 0
    chunks = sizes.stage_chunks(config, mesh)
    converted = sum(weight.numel() for chunk in chunks for weight in fp8_matrices(chunk))
    return (4 * e + 2) * converted + sum(size * (w * times + own / sizes.optimizer_shards(config, kind.replicas))
                                         for kind, size in sizes.bucket_sizes(config, mesh))


def mfu(config: Config, seconds: float, peak: float) -> float:
    """Return the model FLOPs utilization: the FLOPs of a step (flops_per_token) divided by those that all GPUs could do
    in `seconds`. peak: FLOP/s of one GPU."""
    return flops_per_token(config) * config.global_batch_size * config.seq_length / (seconds * peak * config.world_size)


# ---- this machine

def measure_machine(config: Config, mesh: Mesh, most_rows=sys.maxsize) -> Machine:
    """Briefly measure the rates that each process reaches while all of them are busy. Every rank must call it.

    Matmuls: forward and backward of an MLP with this rank's part of the features, on one slice (at most `most_rows`
    tokens). Communication: all-reduces of that slice's activation. Memory: an in-place multiplication. Host: copies of
    the activation from the GPU.
    """
    dtype, device = config.params_dtype, mesh.device
    rows = min(sizes.tokens_per_microbatch(config) // sizes.slice_count(config), most_rows)
    h, ffn = config.hidden_size, config.ffn_hidden_size // config.tp
    x, up, down = (torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
                   for shape in ((rows, h), (ffn, h), (h, ffn)))
    sent, large = torch.zeros(rows, h, device=device, dtype=dtype), torch.zeros(2**22, device=device)

    def mlp():
        y = x + F.gelu(F.layer_norm(x, (h,)) @ up.t(), approximate="tanh") @ down.t()
        torch.autograd.grad(y.sum(), [x, up, down])

    memory = measure_rate(2 * large.nbytes, lambda: large.mul_(1.0), device)
    network, host = memory, math.inf
    group = next((group for group in (mesh.tp_group, mesh.dp_group, mesh.pp_group) if group.size() > 1), None)
    if group is not None:
        network = measure_rate(expected_traffic.bytes_sent("all_reduce", sent.nbytes, group.size()),
                               lambda: dist.all_reduce(sent, group=group), device)
    if expected_memory.offloads_to_host(config):
        pinned = torch.empty_like(sent, device="cpu", pin_memory=True)
        host = measure_rate(sent.nbytes, lambda: pinned.copy_(sent, non_blocking=True), device)
    return Machine(matmul_rate=measure_rate(3 * 2 * 2 * rows * h * ffn, mlp, device), intra_host_rate=network,
                   inter_host_rate=network, latency=0.0, ranks_per_host=config.world_size, memory_rate=memory,
                   host_copy_rate=host)


def memory_of_process(device, local_world_size: int) -> int:
    """Return the bytes of a process's GPU, or its part of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size


def with_two_slices(config: Config, device, local_world_size: int) -> Config:
    """Return the Config with two samples per microbatch, so that each slice's all-reduce is hidden by the other slice.

    Only a default of one sample changes: --micro-batch-size, --slices and --columns are kept as given. The run must
    surely fit into memory (the estimate may be too low by a factor of 2), and there must be enough microbatches to keep
    the pipeline's bubble small.
    """
    two = dataclasses.replace(config, micro_batch_size=2, slices=2, columns=1)
    if (config.tp == 1 or config.micro_batch_size > 1 or {"micro_batch_size", "slices", "columns"} & {*config.given}
            or config.global_batch_size % (2 * config.dp) or config.pp > 1 and two.microbatches < 4 * config.pp):
        return config
    needed = expected_memory.fullest_rank_bytes(dataclasses.replace(two, device=device.type))
    return two if 2 * needed <= memory_of_process(device, local_world_size) else config


def require_memory(config: Config, device, local_world_size: int):
    """Raise UserError if the run can't fit into the memory of a process. Call it before allocating anything."""
    memory = memory_of_process(device, local_world_size)
    config, remedy = dataclasses.replace(config, device=device.type), "--num-layers or --hidden-size"
    needed = expected_memory.average_state_bytes(config)
    if needed <= memory:                                       # halved: the estimate is not too high by more than that
        needed = expected_memory.fullest_rank_bytes(config) // 2
        remedy = "--micro-batch-size or --num-layers"
    require(needed <= memory,
            f"the fullest of {config.world_size} processes would need at least {needed / 1e9:,.1f} GB of memory, and "
            f"each has {memory / 1e9:,.1f} GB here; lower {remedy}, or give the model more processes (--tp, --pp)")


def estimate(config: Config, mesh: Mesh) -> tuple[float, int]:
    """Estimate (seconds of a step, peak bytes of the fullest rank), within a factor of 2. Every rank must call it."""
    config = dataclasses.replace(config, device=mesh.device.type)
    seconds = sum(step_seconds(config, measure_machine(config, mesh, most_rows=128)).values())
    return slowest(seconds), expected_memory.fullest_rank_bytes(config)


def measure_rate(amount: float, work, device, times=5) -> float:
    """Return the rate of work() on the slowest rank while all ranks run it: the median of three measurements.

    amount: what one call of work() does, for example its FLOPs or bytes. times: calls per measurement.
    """
    seconds = []
    for _ in range(3):
        synchronize_ranks(device)
        start = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(slowest(time.perf_counter() - start))
    return amount * times / statistics.median(seconds)


def synchronize_ranks(device):
    """Wait for the GPU, then for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def slowest(seconds: float) -> float:
    """Return the largest value that any rank passes."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
