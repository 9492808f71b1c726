"""Chooses kernels so that a run repeats bit by bit, and checks that all copies of a parameter are equal.

**Kernels.** A kernel whose thread blocks add to the same number in no fixed order may round differently each time it
runs. Torch's strict mode replaces such kernels, or raises an error where it has no other kernel. Its warn-only mode
would keep the backward of flash and of memory-efficient attention, and cuDNN's attention.

**Attention.** On an H100 torch prefers cuDNN's attention to flash attention. With an attention bias, the backward of
cuDNN's attention can return NaN if the sequence length modulo 128 is 64 (github.com/pytorch/pytorch/issues/196678).
Gradients of FlashAttention 3 may not always have the same bits (github.com/Dao-AILab/flash-attention/issues/2244).

**Copies.** Every parameter has a copy on each replica (dp), an expert only on the replicas that hold it (expert_dp). A
parameter that is not sharded has a copy on each tensor-parallel rank too (tp). A tied embedding has one on the first
and one on the last stage. The copies stay equal because

    over dp        with ZeRO, one owner updates each part and all-gathers it      equal by construction
                   without, each replica applies the same gradients               equal if kernels are deterministic
    two stages     both add the same two gradients                                equal if addition is deterministic
    over tp        each rank computes the same gradient from the same numbers     equal if kernels are deterministic

torch.compile can break the equality over tp: it may benchmark kernels on each rank separately, and choose kernels whose
sums differ in the last bit. From then on the ranks train slightly different models, which no loss shows. So the
compiler is asked to choose kernels deterministically, and the copies are compared at each checkpoint.
"""

import os
from collections import defaultdict
from importlib.util import find_spec

import torch
import torch.distributed as dist

from nanodomino.comm.world import capability_of
from nanodomino.settings.config import Config
from nanodomino.mesh import Mesh
from nanodomino.model import GPT


def choose_kernels(config: Config, device: torch.device):
    """Tell torch which kernels it may choose. Call this before the first matmul, because cuBLAS reads its variable only
    once."""
    torch.backends.cuda.enable_cudnn_sdp(not (config.deterministic_mode or config.uses_attention_bias))
    if (device.type == "cuda" and capability_of(device)[0] == 9 and not config.deterministic_mode
            and find_spec("flash_attn_interface")):
        torch.nn.attention.activate_flash_attention_impl("FA3")          # for attention within documents
    if config.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")      # 8 buffers of 4096 KiB
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False      # else each torch.empty() launches a kernel
    if config.compile and config.tp > 1:
        from torch._inductor import config as inductor                   # imported here: it loads the whole compiler

        inductor.deterministic = True


def tf32_in_words(config: Config, device: torch.device) -> str:
    """Say if the matrix units of the GPU stay idle, because training is in fp32 and torch does not round to TF32 by
    default. Otherwise return ''."""
    idle = (device.type == "cuda" and config.params_dtype == torch.float32
            and torch.get_float32_matmul_precision() == "highest")
    return ", fp32 matmuls without TF32 (--bf16 is many times as fast)" * idle


def drift_warning(model: GPT, mesh: Mesh) -> str:
    """Return a warning that names the parameters whose copies differ in a bit, and their ranks; "" if all copies are
    equal. All ranks must call this together, and get the same text."""
    own = {(name, *(mesh.axis(axis)[1] for axis in weight.spec.kind.shards)): int(torch.hash_tensor(weight.detach()))
           for name, weight in model.named_parameters()}
    everyone, ranks_by_hash = [None] * dist.get_world_size(), defaultdict(lambda: defaultdict(list))
    dist.all_gather_object(everyone, own)                      # {(name, shard): hash} of each rank
    for rank, hashes in enumerate(everyone):
        for copy, value in hashes.items():
            ranks_by_hash[copy][value].append(str(rank))
    drifted = []
    for (name, *_), by_hash in ranks_by_hash.items():
        groups = [f"rank {', '.join(ranks)}" for ranks in by_hash.values()]
        drifted += [f"{name} differs between {' and '.join(groups)}"] * (len(groups) > 1)
    more = f", and {len(drifted) - 3} more" * (len(drifted) > 3)
    return bool(drifted) * (
        f"copies of parameters have drifted apart ({'; '.join(drifted[:3])}{more}), so the ranks train slightly "
        "different models; a run resumed from this checkpoint has equal copies again; try --deterministic-mode or "
        "--no-compile")
