"""Is ZeRO as fast and as small as torch's sharded optimizers?

A step is forward, backward, clipping and AdamW on --dp replicas with --microbatches each. These sides run in turn, from
the same weights and on the same tokens; the losses of the first steps must agree:

    zero-1      nanodomino: train.py's step, optimizer state sharded
    zero-0      nanodomino: nothing sharded
    zero-2      nanodomino: gradients sharded too, and reduced after each microbatch
    ddp-zero    torch: DistributedDataParallel around plain.py with ZeroRedundancyOptimizer, which shards by whole
                parameters; gradients are reduced with the last microbatch
    ddp         torch: DistributedDataParallel with AdamW, nothing sharded
    fsdp2       torch: fully_shard of each layer (ZeRO-3): weights are gathered in forward and again in backward;
                gradients are reduced after each microbatch
    fsdp2-keep  torch: the same with reshard_after_forward=False, FSDP2's ZeRO-2: gathered weights are kept for backward

    step    seconds of the slowest rank
    peak    peak memory of a rank. On a CPU: the largest growth of the resident memory (ru_maxrss) of a separate
            process, in which a tiny model has run before, so that libraries are loaded. On CUDA: max_memory_allocated
    state   bytes per parameter of parameters, gradients and optimizer state after a step, on the rank with the most,
            counted in the tensors' storages; beside it the formula: ZeRO-1 8 + 8/d, in 16-bit training 6 + 12/d;
            ZeRO-2 4 + 12/d and 2 + 16/d (1910.02054, sections 5.1 and 5.2, here with fp32 gradients); torch, with fp32
            weights under autocast: ddp-zero 8 + 8/d, ddp 16, fsdp2 16/d

On CPUs each rank has one core, which also handles its network traffic. For ZeRO-2 choose --bucket-size small compared
with the model.

    python bench.py zero
    python bench.py zero --dtype bfloat16 --micro-batch-size 8
    python bench.py zero --num-layers 12 --bucket-size 1000000 --microbatches 4
"""

import dataclasses
import gc
import multiprocessing
import os
from argparse import Namespace
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import train
from benchmarks.common import (SAME, RandomTokens, Times, add_config_flags, bind_to_one_core, bytes_text, compare,
                               config_of, gathered, progress, ratio_text, ratios, shape_of, table)
from benchmarks.plain import Plain, adamw, mean_loss
from benchmarks.throughput import COMPARED_STEPS, OurTraining
from nanodomino.analysis import expected_memory
from nanodomino.analysis.hardware import peak_memory
from nanodomino.analysis.sizes import parameter_count
from nanodomino.comm.world import LaunchInfo, find_device, keep_freed_memory, start_world
from nanodomino.config.config import Config
from nanodomino.errors import require
from nanodomino.mesh import make_mesh

MEASURED_STEPS = 2           # for the peak: AdamW's moments exist after the first step
TINY = dict(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8)
FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "data_parallel_size", "bucket_size", "dtype", "device")
ABOUT = {"zero-1": "ZeRO-1", "zero-0": "ZeRO-0", "zero-2": "ZeRO-2", "ddp-zero": "DDP, ZeroRedundancyOptimizer",
         "ddp": "DDP, AdamW", "fsdp2": "FSDP2", "fsdp2-keep": "FSDP2, weights kept"}


def add_flags(parser):
    add_config_flags(parser, FLAGS, data_parallel_size=2, num_layers=4, hidden_size=512, num_attention_heads=8,
                     seq_length=128, vocab_size=256, micro_batch_size=2)
    parser.add_argument("--microbatches", type=int, default=1, metavar="M",
                        help="microbatches of a replica per step (default 1)")


def processes(flags) -> int:
    replicas = flags.data_parallel_size
    require(replicas >= 2, f"--dp must be at least 2, but is {replicas}: with a single replica nothing is sharded")
    require(flags.microbatches >= 1, f"--microbatches must be at least 1, but is {flags.microbatches}; try 4")
    require(config_for(flags).dtype != "float16", "torch's sides have no loss scaling, so --dtype must not be float16; "
            "try bfloat16")
    return replicas


def config_for(flags, **changes) -> Config:
    """Return the Config of a step with --microbatches per replica."""
    return config_of(Namespace(**vars(flags) | changes), flags.data_parallel_size,
                     global_batch_size=flags.micro_batch_size * flags.microbatches * flags.data_parallel_size, slices=1,
                     tensor_model_parallel_size=1, pipeline_model_parallel_size=1, train_iters=10**6,
                     lr_decay_style="constant", lr_warmup_fraction=0.0)


def answer(flags, launch):
    config = config_for(flags)
    device = find_device(config, launch)
    bind_to_one_core(device)
    start_world(launch, device)
    mesh = make_mesh(1, config.dp, 1, device)
    peaks = {}
    with progress(len(ABOUT)) as bar:
        for name in ABOUT:
            bar.set_description_str(f"memory: {name}")
            peaks[name] = max(gathered(peak_of_its_own(name, flags, launch, mesh)))
            bar.update()
    sides = {name: make(name, config, mesh) for name in ABOUT}
    times = compare({name: side.step for name, side in sides.items()}, max(flags.repeats, COMPARED_STEPS - 1), device)
    losses = {name: mean_over_replicas(side.losses[:COMPARED_STEPS]) for name, side in sides.items()}
    check_same_work(config, losses)
    states = {name: max(gathered(counted_bytes(side.tensors()))) for name, side in sides.items()}
    return report(flags, config, device, times, peaks, states, losses)


# ---- the sides

def make(name: str, config: Config, mesh):
    """Return a side with a new model and optimizer."""
    if name.startswith("zero"):
        return OurReplica(config, mesh, stage=int(name[-1]))
    return {"ddp-zero": DDP, "ddp": partial(DDP, sharded=False), "fsdp2": FSDP,
            "fsdp2-keep": partial(FSDP, reshard=False)}[name](config, mesh)


class OurReplica(OurTraining):
    """Trains with train.py's step."""

    def __init__(self, config, mesh, stage: int):
        super().__init__(dataclasses.replace(config, zero_stage=stage), mesh, RandomTokens(config, mesh.device))

    def tensors(self):
        """Yield the parameters, gradients and optimizer state."""
        yield from self.model.parameters()
        yield from (bucket.own_grad for bucket in self.optimizer.buckets)
        yield from self.optimizer.state_tensors()


class TorchReplica:
    """Trains with nanoGPT's step. Subclasses set `network`, `optimizer` and `no_sync`. no_sync() is the context in
    which all microbatches but the last run: backward does not reduce gradients in it.
    """

    def __init__(self, config, mesh):
        self.config, self.losses, self.no_sync = config, [], nullcontext
        tokens = RandomTokens(config, mesh.device)
        self.batches = [tokens.batch(0, i, mesh.dp_rank, mesh.dp, config.micro_batch_size, config.global_batch_size)
                        for i in range(config.microbatches)]
        self.model = Plain(config).load(train.model_builder(config, mesh).state_dict()).to(mesh.device)
        self.model.to(torch.promote_types(config.params_dtype, torch.float32))
        self.autocast = nullcontext

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in self.batches:
            with nullcontext() if batch is self.batches[-1] else self.no_sync():
                with self.autocast():
                    loss = mean_loss(self.network(batch.tokens), batch.labels) / len(self.batches)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip_grad)
        self.optimizer.step()
        self.losses.append(total.item())

    def tensors(self):
        """Yield the parameters, gradients and optimizer state; of DTensors the local shards."""
        for weight in self.model.parameters():
            yield from (local(weight), local(weight.grad))
        yield from state_tensors(getattr(self.optimizer, "optim", self.optimizer))


class DDP(TorchReplica):
    """All-reduces gradients in buckets during backward. Gradients are views of these buckets; with
    ZeroRedundancyOptimizer, weights are views of buckets of their own. Both options need less memory and fewer messages
    than torch's defaults.
    """

    def __init__(self, config, mesh, sharded=True):
        super().__init__(config, mesh)
        if config.dtype == "bfloat16":
            self.autocast = partial(torch.autocast, mesh.device.type, torch.bfloat16)
        self.optimizer = adamw(self.model, config)
        if sharded:
            self.optimizer = ZeroRedundancyOptimizer(self.optimizer.param_groups, torch.optim.AdamW,
                                                     parameters_as_bucket_view=True, fused=True)
        self.network = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.no_sync = self.network.no_sync


class FSDP(TorchReplica):
    """Gathers a layer's weights for forward and, with `reshard`, again for backward; reduce-scatters gradients."""

    def __init__(self, config, mesh, reshard=True):
        super().__init__(config, mesh)
        replicas, inner, outer = init_device_mesh(mesh.device.type, (config.dp,)), {}, {}
        if config.dtype == "bfloat16":
            inner = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outer = dict(inner, output_dtype=torch.float32)            # logits
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=replicas, mp_policy=MixedPrecisionPolicy(**inner), reshard_after_forward=reshard)
        fully_shard(self.model, mesh=replicas, mp_policy=MixedPrecisionPolicy(**outer), reshard_after_forward=reshard)
        self.network, self.optimizer = self.model, adamw(self.model, config)


# ---- memory

def state_tensors(optimizer):
    for state in optimizer.state.values():
        yield from (local(tensor) for tensor in state.values())


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def counted_bytes(tensors) -> int:
    """Return the bytes of these tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def formula_bytes(name: str, config: Config) -> float:
    """Return the expected bytes of state per parameter, without padding."""
    whole, d = 4 * max(4, config.params_dtype.itemsize), config.dp
    torchs = {"ddp": whole, "ddp-zero": whole / 2 + whole / 2 / d, "fsdp2": whole / d, "fsdp2-keep": whole / d}
    return torchs.get(name) or (
        expected_memory.state_bytes_per_parameter(dataclasses.replace(config, zero_stage=int(name[-1]))))


def peak_of_its_own(name: str, flags, launch: LaunchInfo, mesh) -> int:
    """Measure the peak bytes that this rank needs for one side. Collective over all ranks."""
    if mesh.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(mesh.device)
        torch.cuda.reset_peak_memory_stats(mesh.device)
        some_steps(name, config_for(flags), mesh)
        return torch.cuda.max_memory_allocated(mesh.device) - before
    # A fork server that has imported this file starts the process: faster than a new interpreter, and safe, unlike a
    # fork of this process with its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=measure_peak, args=(sending, name, flags, launch), daemon=True)
    process.start()
    sending.close()
    peak = receiving.recv()                                    # EOFError if the process has failed; it has printed why
    process.join()
    return peak


def measure_peak(sending, name: str, flags, launch: LaunchInfo):
    """Send the largest growth of this process's resident memory. Runs in a separate process."""
    torch.set_num_threads(1)
    keep_freed_memory()                                        # as in training
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size,
                            store=dist.PrefixStore(f"memory of {name}", store))
    mesh = make_mesh(1, flags.data_parallel_size, 1, torch.device("cpu"))
    some_steps(name, config_for(flags, **TINY), mesh)
    gc.collect()
    before = peak_memory(mesh.device)
    some_steps(name, config_for(flags), mesh)
    sending.send(peak_memory(mesh.device) - before)
    dist.barrier()                                             # no rank leaves while another still sends
    dist.destroy_process_group()


def some_steps(name: str, config: Config, mesh):
    side = make(name, config, mesh)
    for _ in range(MEASURED_STEPS):
        side.step()


# ---- the report

def mean_over_replicas(losses: list[float]) -> list[float]:
    """Average over the replicas. torch's sides have the mean over a replica's tokens, nanodomino's over all tokens."""
    mean = torch.tensor(losses, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


def check_same_work(config: Config, losses: dict[str, list[float]]):
    """Raise UserError if the sides' losses differ."""
    tolerance = SAME[config.dtype]
    require(all(abs(loss - expected) <= tolerance * abs(expected) for name in losses      # false for NaN
                for loss, expected in zip(losses[name], losses["ddp"])),
            f"the losses of the first {COMPARED_STEPS} steps differ by more than {tolerance:.0e} relative, {losses}, "
            "so the speeds can't be compared; this is a bug")


def report(flags, config, device, times: dict[str, Times], peaks, states, losses):
    """Return (text, record)."""
    count = parameter_count(config)
    ratio = {name: ratios(time, times["zero-1"]) for name, time in times.items()}
    speed_of_2 = ratios(times["fsdp2-keep"], times["zero-2"])
    per_parameter = {name: states[name] / count for name in ABOUT}
    expected = {name: formula_bytes(name, config) for name in ABOUT}
    rows = [[ABOUT[name], times[name], ratio_text(ratio[name]), bytes_text(peaks[name]), f"{per_parameter[name]:.2f}",
             f"{expected[name]:.2f}"] for name in ABOUT]
    how = ("max_memory_allocated" if device.type == "cuda" else "growth of the resident memory of a separate process")
    text = "\n".join([
        f"dp {config.dp} on {device.type}, {os.cpu_count()} cores; {count:,} parameters, {config.num_layers} layers of "
        f"{config.hidden_size}, {config.dtype}, buckets of {config.bucket_size:,}; a step of a replica is "
        f"{config.microbatches} x {config.micro_batch_size} x {config.seq_length} tokens",
        table(["", "step: median [min .. max]", "step / ZeRO-1's", "peak", "state/parameter", "formula"], rows),
        f"peak: {how}, on the rank with the most; state: bytes of parameters, gradients and optimizer state",
        f"ZeRO-1's speed / ZeroRedundancyOptimizer's: {ratio_text(ratio['ddp-zero'])}; ZeRO-2's / FSDP2's with weights "
        f"kept: {ratio_text(speed_of_2)}; the losses of the first {COMPARED_STEPS} steps agree"])
    sides = {name: {"step_s": times[name].median, "step_over_zero_1": ratio[name].value,
                    "spread": ratio[name].spread, "peak_bytes": peaks[name],
                    "state_bytes": states[name], "bytes_per_parameter": per_parameter[name],
                    "formula": expected[name], "losses": losses[name]} for name in ABOUT}
    return text, {"question": "zero", "speed_over_ddp_zero": ratio["ddp-zero"].value,
                  "speed_over_fsdp2": ratio["fsdp2"].value, "speed_of_zero_2_over_fsdp2_keep": speed_of_2.value,
                  "sides": sides, "peak_is": how, "parameters": count, "dp": config.dp, **shape_of(config),
                  "bucket_size": config.bucket_size, "microbatches": config.microbatches, "device": device.type,
                  "cores": os.cpu_count(), "repeats": len(times["zero-1"].seconds)}
