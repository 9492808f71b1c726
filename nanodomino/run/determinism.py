"""Chooses kernels and threads so that a run repeats bit by bit, and checks that all copies of a parameter are equal.

**Kernels.** A kernel whose thread blocks add to the same number in no fixed order may round differently each time it
runs. Torch's strict mode replaces such kernels, or raises an error where it has no other kernel. Its warn-only mode
would keep the backward of flash and of memory-efficient attention, and cuDNN's attention.

**Attention.** On an H100 torch prefers cuDNN's attention to flash attention. With an attention bias, the backward of
cuDNN's attention can return NaN if the sequence length modulo 128 is 64 (github.com/pytorch/pytorch/issues/196678).
Attention within documents and generation use flash attention anyway: torch's version 2, or version 3 if its package is
installed. Deterministic mode stays with version 2, because gradients of version 3 may not always have the same bits
(github.com/Dao-AILab/flash-attention/issues/2244).

**Threads.** On a CPU, threads that share a matmul wait for the slowest of them. A step of nano took 190 ms with two
threads and 320 with one on two idle cores, but 17 to 25 s and 0.7 to 2 s on two busy cores. The number also changes how
sums are rounded. So a run records it, and keeps it when it resumes.

**Copies.** Every parameter has a copy on each replica (dp); an expert has copies only on the replicas that hold it
(expert_dp). A parameter that is not sharded (norms, row-parallel biases, positions) has a copy on each tensor-parallel
rank too (tp). A tied embedding has one on the first and one on the last stage. The copies stay equal because

    over dp        with ZeRO, one owner updates each part and all-gathers it      equal by construction
                   without, each replica applies the same gradients               equal if kernels are deterministic
    two stages     both add the same two gradients                                equal if addition is deterministic
    over tp        each rank computes the same gradient from the same numbers     equal if kernels are deterministic
                   (with sequence parallelism, the ranks sum the same parts)      (equal if addition is deterministic)

torch.compile can break the equality over tp: it may benchmark kernels on each rank separately, and two ranks may choose
kernels whose sums differ in the last bit. From then on the ranks train slightly different models, which no loss shows.
So the compiler is asked to choose kernels deterministically, and the copies are compared at each checkpoint.
"""

import os
import sys
from collections import defaultdict
from importlib.util import find_spec

import torch
import torch.distributed as dist

from nanodomino.comm.world import capability_of
from nanodomino.settings.config import Config
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer

BUSY = 0.75              # load average per core
CHUNK = 1 << 20          # elements converted to int64 at once
INTEGER_TYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16}       # keys: bytes per element
MAX_NAMED = 3            # parameters named in the message


def choose_kernels(config: Config, device: torch.device):
    """Tell torch which kernels it may choose. Call this before the first matmul, because cuBLAS reads its variable only
    once."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.uses_attention_bias))
    if can_use_flash_attention_3(config, device):
        torch.nn.attention.activate_flash_attention_impl("FA3")
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # else each torch.empty() launches a kernel
    if config.compile and config.tp > 1:
        from torch._inductor import config as inductor                   # imported here: it loads the whole compiler

        if hasattr(inductor, "deterministic"):                           # older versions of torch lack the option
            inductor.deterministic = True


def can_use_flash_attention_3(config: Config, device: torch.device) -> bool:
    """Return whether this run uses FlashAttention 3: its package is installed, and torch can call it on this GPU."""
    return (device.type == "cuda" and capability_of(device)[0] == 9 and not config.deterministic_mode
            and hasattr(torch.nn.attention, "activate_flash_attention_impl")         # older versions of torch lack it
            and find_spec("flash_attn_interface") is not None)


def tf32_in_words(config: Config, device: torch.device) -> str:
    """Say if the matrix units of the GPU stay idle, because training is in fp32 and torch does not round to TF32 by
    default. Otherwise return ''."""
    idle = (device.type == "cuda" and config.params_dtype == torch.float32
            and torch.get_float32_matmul_precision() == "highest")
    return ", fp32 matmuls without TF32 (--bf16 is many times as fast)" * idle


def choose_threads(device, record: dict | None = None, quiet=False) -> int | None:
    """Set and return torch's number of threads, or None on a GPU. OMP_NUM_THREADS decides if it is set, then `record`,
    the run's config.json. Otherwise busy cores get 1 thread, idle cores all. Says on stderr what was chosen and why."""
    most, reason = torch.get_num_threads(), "as before in this run"
    if device.type != "cpu" or most == 1 or os.environ.get("OMP_NUM_THREADS"):
        return most if device.type == "cpu" else None
    threads = min((record or {}).get("cpu_threads") or 0, most)
    if threads < 1:
        load, cores = os.getloadavg()[0], os.cpu_count()
        threads, reason = 1 if load > BUSY * cores else most, f"the load average is {load:.1f} on {cores} cores"
    torch.set_num_threads(threads)
    if not quiet:
        print(f"{threads} of {most} threads: {reason}; OMP_NUM_THREADS=N sets another number, which rounds sums "
              "differently", file=sys.stderr, flush=True)
    return threads


# ---- copies of a parameter

@torch.no_grad()
def checksum(weight) -> torch.Tensor:
    """Return an exact checksum of a tensor's bits and their order, as an int64 scalar on its device."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for bits in weight.detach().reshape(-1).view(INTEGER_TYPES[weight.element_size()]).split(CHUNK):
        factors = torch.arange(1, 2 * len(bits), 2, device=weight.device)      # odd: then no bit is lost modulo 2^64
        total = 31 * total + (bits.to(torch.int64) * factors).sum()
    return total


def local_copies(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh):
    """Yield (name, shard, partition, tensor) for each tensor of this rank that may have a copy on another rank. Tensors
    on two ranks are copies if name, shard and partition are equal. shard: this rank's index on each axis over which the
    parameter is cut. partition: this rank's ZeRO partition for master weights, else None. Master weights are included
    if the weights have 16 bits, because rounding can hide their drift for a while."""
    for name, weight in model.named_parameters():
        shard = tuple(mesh.axis(axis)[1] for axis in weight.spec.kind.shards)
        bucket = optimizer.bucket_of[weight]
        yield name, shard, None, weight
        start = bucket.offsets[weight] - bucket.own_offset
        master = bucket.master[max(start, 0):max(start + weight.numel(), 0)]
        if bucket.master is not bucket.own_weights and len(master):
            yield f"the master of {name}", shard, bucket.partition, master


def drift_warning(model: GPT, optimizer: ZeroOptimizer, mesh: Mesh) -> str:
    """Return a warning that names the parameters whose copies differ, and their ranks; "" if all copies are equal. All
    ranks must call this together, and get the same text."""
    *keys, tensors = zip(*local_copies(model, optimizer, mesh))
    checksums = torch.stack([checksum(tensor) for tensor in tensors]).tolist()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (list(zip(*keys)), checksums))
    ranks_by_value = defaultdict(lambda: defaultdict(list))    # {(name, shard, partition): {checksum: ranks}}
    for rank, (keys, checksums) in enumerate(gathered):
        for key, value in zip(keys, checksums):
            ranks_by_value[key][value].append(rank)
    drifted = {name: " and ".join(f"rank {', '.join(map(str, ranks))}" for ranks in by_value.values())
               for (name, *_), by_value in ranks_by_value.items() if len(by_value) > 1}
    if not drifted:
        return ""
    more = f", and {len(drifted) - MAX_NAMED} more" if len(drifted) > MAX_NAMED else ""
    named = "; ".join(f"{name} differs between {ranks}" for name, ranks in list(drifted.items())[:MAX_NAMED])
    return (f"copies of parameters have drifted apart ({named}{more}), so the ranks train slightly different models; "
            "a run resumed from this checkpoint has equal copies again; try --deterministic-mode or --no-compile")
