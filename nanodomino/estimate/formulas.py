"""The formulas that a student of distributed training should know by heart, and a machine as a few rates.

    b, s, h, ffn   samples of a microbatch, tokens of a sample, hidden size, width of the MLP
    t, d, m        tensor and data parallel sizes, microbatches of a step
    X              bytes of one activation [b, s, h], such as the output of a layer

    what                                            bytes                            source
    model state, 16-bit training                    6 + 12/d per parameter           1910.02054, sections 3.1 and 5.1,
    model state, fp32 training                      8 + 8/d per parameter            here with fp32 gradients and AdamW
      ZeRO-2, 16-bit; fp32                          2 + 16/d; 4 + 12/d               1910.02054, section 5.2
    activations of a GPT-2 layer and microbatch     4 X + (4 + 2 ffn/h) X/t          2205.05198, section 4; plus norm
      selective recomputation                       4 X + (3 + ffn/h) X/t            statistics and log-sum-exp
      full recomputation                            2 X
      sequence parallelism                          4 X becomes 4 X/t, 2 X 2 X/t     2205.05198, section 4.2.2
    microbatches alive on stage r of p              1F1B: min(m, p - r)              2104.04473, section 2.2

    what a rank launches                            collectives                      source
    tensor parallel, a layer and microbatch         2 + 2 all-reduces of X           1909.08053, section 3
      (forward + backward)
      sequence parallelism                          2 + 4 all-gathers, since each    2205.05198, section 4.2.2
                                                    sublayer gathers h again, and
                                                    2 + 2 reduce-scatters
      Domino with n slices                          n times as many, each 1/n        2409.15241, section 3
    a stage boundary and microbatch                 X forward, X back                2104.04473, section 2.2
    ZeRO-1, a step                                  per parameter 4 bytes reduce-    1910.02054, section 7
                                                    scattered, 2 all-gathered

    bubble of 1F1B on equal stages                  (p - 1)/m of the ideal time      2104.04473, section 2.2

A test compares these with a dry run (rank.py), which finds out all the rest. On a machine whose rates are known:

    an operation takes            the longer of FLOPs / rate and bytes / rate
    a collective takes            latency + bytes sent / the rate of the slowest link between its ranks

**Matmuls.** A GPU computes the result [m, n] in tiles, one tile on a multiprocessor at a time. So a matmul takes whole
waves of as many tiles as the GPU has multiprocessors, and the last wave may be nearly empty. Each element of a tile is
a sum of k products. The start of a tile takes as long as 160 more products. Small tiles load each number more often for
the same FLOPs, so they reach less of the peak. With few tiles, kernels also cut k and add up the parts. The fastest way
counts. TILES, START, KERNEL and ATTENTION resemble what cuBLAS and cuDNN are reported to reach on an H100.
"""

import math
import os
import re
import resource
import sys
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch

from nanodomino.settings.config import Config
from nanodomino.mesh import meta_mesh
from nanodomino.model import meta_model
from nanodomino.parallel import VocabParallelEmbedding

# Dense 16-bit peak FLOP/s of one GPU, from the vendors' data sheets.
PEAK_FLOPS = {"A10": 125e12, "A30": 165e12, "A40": 150e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12,
              "GH200": 989e12, "H100": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12,
              "H200 NVL": 835e12, "H800": 989e12, "L4": 121e12, "L40": 181e12, "L40S": 362e12,
              "RTX 3090": 71e12, "RTX 4090": 165e12}
# The dense fp8 peak of Ada, Hopper and Blackwell is twice the 16-bit peak; for an RTX 4090 both are with fp32 sums.
FP8_SPEEDUP, WITHOUT_FP8 = 2.0, {"A10", "A30", "A40", "A100", "A800", "RTX 3090"}
# (rows, columns, FLOP/s relative to the largest tile)
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.89), (64, 256, 0.83), (128, 64, 0.64), (64, 128, 0.64))
START = 160                      # the products per element that the start of a tile costs
KERNEL = 2e-6                    # seconds between the start of a GPU's kernel and its first full use of the GPU
# The share of the 16-bit peak that fused attention reaches: (forward, backward) by head size.
ATTENTION = {64: (0.40, 0.32), 128: (0.61, 0.47)}
# About what a CUDA context with kernels takes. NCCL allocates 10 MiB to receive into and 2 MiB to send from for each
# connection of a channel (github.com/NVIDIA/nccl/issues/1685). NVLink gets up to 24 channels.
CONTEXT_BYTES, CONNECTION_BYTES, CHANNELS = 512 * 2**20, 12 * 2**20, 24


def parameters_by_kind(config: Config) -> Counter:
    """Count the parameters of the whole model by their ParameterKind, as parameter_count() does."""
    count, padding = Counter(), (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    for module in meta_model(config).modules():
        for weight in module.parameters(recurse=False):
            count[weight.spec.kind] += weight.numel() - padding * isinstance(module, VocabParallelEmbedding)
    return count


def parameter_count(config: Config) -> int:
    """Count the parameters of the whole model. A tied matrix counts once; rows that pad the vocabulary do not count."""
    return sum(parameters_by_kind(config).values())


def active_parameter_count(config: Config) -> int:
    """Count the parameters that a token uses."""
    return round(sum(count * config.active_share(kind) for kind, count in parameters_by_kind(config).items()))


def flops_per_token(config: Config) -> float:
    """Return the training FLOPs per token: 6 N + 12 L n d s (PaLM, 2204.02311, appendix B; nanoGPT). N: active
    parameters without learned position embeddings; L: layers; n heads of size d. All pairs of tokens count, although
    a causal mask needs only half of them. Each layer behind the head multiplies by the head once more."""
    learned = config.position_embedding_type == "learned_absolute"
    parameters = active_parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    parameters += config.behind_head.layers * config.vocab_size * config.hidden_size
    windows = map(config.attention_window, range(config.num_layers + config.behind_head.layers))
    keys = sum(config.seq_length if window is None else min(window + 1, config.seq_length) for window in windows)
    return 6 * parameters + 12 * keys * config.num_attention_heads * config.kv_channels


def mfu(config: Config, seconds: float, peak: float) -> float:
    """Return the model FLOPs utilization: a step's FLOPs / those that all GPUs can do in `seconds`. peak: of a GPU."""
    return flops_per_token(config) * config.global_batch_size * config.seq_length / (seconds * peak * config.world_size)


def state_bytes_per_parameter(config: Config) -> float:
    """Return the bytes of model state that a rank holds per parameter in the matrices of layers, without padding."""
    element, shards = config.params_dtype.itemsize, config.dp * config.cp
    main = max(4, element)                                     # gradients, moments and master weights
    stored = len(config.optimizer_spec.moments) + (element < main)
    return (element + main / (shards if config.zero_stage == 2 else 1)
            + stored * main / (shards if config.zero_stage else 1))


def bytes_sent(kind: str, payload: float, ranks: int) -> float:
    """Return the bytes that each rank sends to the other `ranks` - 1 ranks, in a ring except for an all-to-all; 0 for
    other kinds, such as receive. payload: the bytes of the whole tensor, as in accounts.Launch."""
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0,
               **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), (ranks - 1) / ranks)}
    return factors.get(kind, 0.0) * payload


@dataclass(frozen=True)
class Gpu:
    """Figures from a GPU's data sheet."""
    memory: float                # bytes
    memory_rate: float           # bytes/s
    link: str                    # the link to the other GPUs of the host: NVLink or PCIe
    link_rate: float             # bytes/s over it, each way
    host_rate: float             # bytes/s to the host over PCIe, each way
    multiprocessors: int


# GPUs with bfloat16. NVLink each way is half of the data sheet's figure; PCIe x16 is 32 GB/s each way in generation 4,
# 64 GB/s in generation 5.
GPUS = {"A100": Gpu(80e9, 2.039e12, "NVLink", 300e9, 32e9, 108),
        "H100": Gpu(80e9, 3.35e12, "NVLink", 450e9, 64e9, 132),
        "H100 PCIe": Gpu(80e9, 2.0e12, "PCIe", 64e9, 64e9, 114),
        "H200": Gpu(141e9, 4.8e12, "NVLink", 450e9, 64e9, 132),
        "B200": Gpu(180e9, 8e12, "NVLink", 900e9, 64e9, 148),
        "A10": Gpu(24e9, 0.6e12, "PCIe", 32e9, 32e9, 72), "L40S": Gpu(48e9, 0.864e12, "PCIe", 32e9, 32e9, 142),
        "RTX 4090": Gpu(24e9, 1.008e12, "PCIe", 32e9, 32e9, 128)}


def find_peak_flops(config, device) -> float | None:
    """Return the peak FLOP/s of all GPUs of the run; None on a CPU, for an unknown GPU, and for other than 16 bits."""
    if device.type != "cuda" or config.params_dtype.itemsize != 2:
        return None
    device_name = torch.cuda.get_device_name(device)
    matches = [name for name in PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)]       # an A10G is not an A10
    return PEAK_FLOPS[max(matches, key=len)] * config.world_size if matches else None


@dataclass(frozen=True)
class Machine:
    """The rates that one process reaches."""
    matmul_rate: float           # FLOP/s of a large matmul in 16 bits
    intra_host_rate: float       # bytes/s sent to processes on the same host
    inter_host_rate: float       # bytes/s sent to other hosts
    latency: float               # seconds that each collective takes in addition to sending its bytes
    ranks_per_host: int
    memory_rate: float           # bytes/s of reads and writes
    host_copy_rate: float = math.inf         # bytes/s between a GPU and its host
    overlap_slowdown: float = 0.0            # share of the GPU that a collective in flight takes from compute
    peak: float = 0.0                        # FLOP/s of a GPU's data sheet in 16 bits; 0: not a GPU
    multiprocessors: int = 0                 # the GPU's; 0: matmuls of all shapes reach matmul_rate

    def operation_seconds(self, operation) -> float:
        """Return the seconds of an accounts.Operation."""
        computing = operation.flops / self.matmul_rate
        if operation.kind == "matmul" and self.multiprocessors:
            rate = self.matmul_rate * (FP8_SPEEDUP if operation.element_size == 1 else 1.0)
            computing = matmul_seconds(*operation.shape, rate, self.multiprocessors, self.memory_rate)
        elif operation.kind.startswith("attention") and self.peak:
            shares = ATTENTION[128 if operation.shape[0] >= 128 else 64]
            computing = operation.flops / (self.peak * shares[operation.kind == "attention backward"])
        return max(computing, operation.bytes / self.memory_rate) + (KERNEL if self.multiprocessors else 0.0)

    def collective_seconds(self, kind: str, bytes_: float, ranks: tuple) -> float:
        """Return the seconds of a collective. If its ranks are on several hosts, it runs at the rate between hosts,
        because a ring is as slow as its slowest link."""
        if len(ranks) == 1:
            return 0.0
        near = len({rank // self.ranks_per_host for rank in ranks}) == 1
        sent = bytes_sent(kind, bytes_, len(ranks))
        return self.latency + sent / (self.intra_host_rate if near else self.inter_host_rate)


@lru_cache(maxsize=65536)
def matmul_seconds(count, rows, columns, summed, rate, multiprocessors, memory_rate) -> float:
    """Return the seconds of `count` matmuls [rows, summed] x [summed, columns]. rate: FLOP/s of the largest tile."""
    best = math.inf
    for tile_rows, tile_columns, efficiency in TILES:
        tiles = count * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        for parts in (1, 2, 3, 4):
            waves = math.ceil(tiles * parts / multiprocessors)
            flops = 2 * tile_rows * tile_columns * (math.ceil(summed / parts) + START)
            adding = (parts > 1) * (KERNEL + 2 * parts * count * rows * columns * 4 / memory_rate)
            best = min(best, waves * flops * multiprocessors / (rate * efficiency) + adding)
    return best


def bytes_outside_torch(config: Config, stage: int) -> int:
    """Estimate the bytes of a GPU that torch's allocator does not count: the CUDA context and NCCL's buffers.

    In a ring each rank receives from one rank and sends to one, however many ranks there are. Messages between stages
    have a connection for each neighbour. Not counted: trees, in-network reduction, and all-to-alls, which connect each
    pair of ranks."""
    if config.device != "cuda":
        return 0
    few = min(config.pp, 2), min(config.dp, 2 * config.ep), config.tp        # fewer ranks, but the same rings
    rings = meta_mesh(*few, **config.mesh_options).rows | {"world": range(config.world_size)}
    if config.placement.folded or not config.words_at_end or 0 < stage < config.pp - 1:
        rings.pop("embedding", None)                           # it sends nothing
    channels = sum(config.thread_blocks.get(name) or CHANNELS for name, ranks in rings.items() if len(ranks) > 1)
    neighbours = sum(stage in pair for pair in config.placement.neighbours)
    return CONTEXT_BYTES + CONNECTION_BYTES * (channels + config.thread_blocks["pp"] * neighbours)


def memory_of_process(device, local_world_size: int) -> int:
    """Return the bytes that a process may use: of its GPU what is free, with its CUDA context, which exists already;
    or its part of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + CONTEXT_BYTES
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size


def peak_memory(device) -> int:
    """Return the peak memory in bytes: of torch's CUDA allocator or, on a CPU, of this whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
