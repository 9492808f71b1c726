"""Is ZeRO as fast as torch's sharded optimizers, and does it need as little memory?

A step is forward, backward, clipping and AdamW on --dp replicas, with --microbatches on each. These implementations,
called sides, run in turn with the same initial weights and tokens. The losses of their first steps must agree:

    zero-1      nanodomino: train.py's step; optimizer state is sharded
    zero-0      nanodomino: nothing is sharded
    zero-2      nanodomino: gradients are sharded, too, and reduced after each microbatch
    ddp-zero    torch: DistributedDataParallel around plain.py with ZeroRedundancyOptimizer, which gives each replica
                the optimizer state of some whole parameters. Gradients are reduced once, in the last microbatch
    ddp         torch: DistributedDataParallel with AdamW; nothing is sharded
    fsdp2       torch: fully_shard of each layer, which is ZeRO-3. Each layer's weights are gathered in forward, freed,
                and gathered again in backward. Gradients are reduced after each microbatch
    fsdp2-keep  torch: the same with reshard_after_forward=False, which corresponds to ZeRO-2: gathered weights are kept
                until backward

The columns of the table:

    step              the step's time on the slowest rank
    peak              peak memory of a rank. On CUDA: max_memory_allocated. On CPUs: by how much two steps raise the
                      peak resident memory (ru_maxrss) of a separate process. A tiny model runs in that process first,
                      so that loading libraries does not count
    state/parameter   bytes of parameters, gradients and optimizer state after a step, divided by the number of
                      parameters, on the rank with the most. A storage that several tensors share counts once
    formula           the expected value, with d replicas (1910.02054, sections 5.1 and 5.2, but with fp32 gradients):

                                             fp32        16-bit training
                                  zero-1     8 +  8/d    6 + 12/d
                                  zero-0    16          18
                                  zero-2     4 + 12/d    2 + 16/d
                                  ddp-zero   8 +  8/d    the same: torch's sides keep fp32 weights, under autocast
                                  ddp       16           the same
                                  fsdp2        16/d      the same

On CPUs each rank has one core, which also handles the rank's network traffic. ZeRO-2 saves memory only if --bucket-size
is small compared with the model.

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

import train
from benchmarks.common import (SAME, RandomTokens, Times, add_config_flags, bind_to_one_core, bytes_text, compare,
                               config_here, gathered, progress, ratio_text, ratios, shape_of, table)
from benchmarks.plain import Plain, adamw, mean_loss
from benchmarks.throughput import COMPARED_STEPS, OurTraining
from nanodomino.analysis.formulas import parameter_count, state_bytes_per_parameter
from nanodomino.analysis.hardware import peak_memory
from nanodomino.comm.world import LaunchInfo, find_device, keep_freed_memory, start_world
from nanodomino.config.config import Config
from nanodomino.errors import require
from nanodomino.mesh import make_mesh

MEASURED_STEPS = 2           # AdamW's moments exist only after the first step, so the second has the peak
TINY = dict(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8)
FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "data_parallel_size", "bucket_size", "dtype", "device")
ABOUT = {"zero-1": "ZeRO-1", "zero-0": "ZeRO-0", "zero-2": "ZeRO-2", "ddp-zero": "DDP, ZeroRedundancyOptimizer",
         "ddp": "DDP, AdamW", "fsdp2": "FSDP2", "fsdp2-keep": "FSDP2, weights kept"}


def add_flags(parser):
    add_config_flags(parser, FLAGS, data_parallel_size=2, num_layers=4, hidden_size=512, num_attention_heads=8,
                     seq_length=128, vocab_size=256, micro_batch_size=2)
    parser.add_argument("--microbatches", type=int, default=1, metavar="M",
                        help="microbatches per replica and step (default 1)")


def processes(flags) -> int:
    replicas = flags.data_parallel_size
    require(replicas >= 2, f"--dp must be at least 2, but is {replicas} (a single replica shards nothing); try 2")
    require(flags.microbatches >= 1, f"--microbatches must be at least 1, but is {flags.microbatches}; try 4")
    require(config_for(flags).dtype != "float16", "--dtype must not be float16, because the other implementations "
            "do not scale the loss; try --dtype bfloat16")
    return replicas


def config_for(flags, **changes) -> Config:
    """Return the Config of a step with --microbatches per replica. changes: values that replace flags, by name."""
    return config_here(Namespace(**vars(flags) | changes), flags.data_parallel_size,
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
            peaks[name] = max(gathered(peak_of_side(name, flags, launch, mesh)))
            bar.update()
    sides = {name: make(name, config, mesh) for name in ABOUT}
    times = compare({name: side.step for name, side in sides.items()}, max(flags.repeats, COMPARED_STEPS - 1), device)
    losses = {name: mean_over_replicas(side.losses[:COMPARED_STEPS]) for name, side in sides.items()}
    check_same_work(config, losses)
    states = {name: max(gathered(counted_bytes(side.tensors()))) for name, side in sides.items()}
    return report(flags, config, device, times, peaks, states, losses)


# ---- the sides

def make(name: str, config: Config, mesh):
    """Make a new model and optimizer for a side, and return the side. name: such as "zero-1" or "fsdp2"."""
    if name.startswith("zero"):
        return OurReplica(config, mesh, stage=int(name[-1]))
    return {"ddp-zero": DDP, "ddp": partial(DDP, sharded=False), "fsdp2": FSDP,
            "fsdp2-keep": partial(FSDP, reshard=False)}[name](config, mesh)


class OurReplica(OurTraining):
    """Trains with train.py's step. stage: the ZeRO stage, 0, 1 or 2."""

    def __init__(self, config, mesh, stage: int):
        super().__init__(dataclasses.replace(config, zero_stage=stage), mesh, RandomTokens(config, mesh.device))

    def tensors(self):
        """Yield this rank's parameters, gradients and optimizer state."""
        yield from self.model.parameters()
        yield from (bucket.own_grad for bucket in self.optimizer.buckets)
        yield from self.optimizer.state_tensors()


class TorchReplica:
    """Trains the plain model with nanoGPT's step. Subclasses set `network`, the wrapped model, and `optimizer`.

    They may also set `no_sync`, a function that returns a context manager. All microbatches but the last run inside it.
    DDP's no_sync() makes backward add to the gradients without an all-reduce.
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
        """Yield this rank's parameters, gradients and optimizer state. For a DTensor, yield its local shard."""
        for weight in self.model.parameters():
            yield from (local(weight), local(weight.grad))
        yield from state_tensors(getattr(self.optimizer, "optim", self.optimizer))


class DDP(TorchReplica):
    """Trains with DistributedDataParallel, which all-reduces buckets of gradients during backward.

    sharded: use ZeroRedundancyOptimizer. Two options that are off by default in torch are on here. Gradients are views
    of the buckets, which saves a second copy. With ZeroRedundancyOptimizer weights are views of buckets, too, so that a
    whole bucket is broadcast at once.
    """

    def __init__(self, config, mesh, sharded=True):
        super().__init__(config, mesh)
        if config.dtype == "bfloat16":
            self.autocast = partial(torch.autocast, mesh.device.type, torch.bfloat16)
        self.optimizer = adamw(self.model, config)
        if sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer      # takes seconds to import

            self.optimizer = ZeroRedundancyOptimizer(self.optimizer.param_groups, torch.optim.AdamW,
                                                     parameters_as_bucket_view=True, fused=True)
        self.network = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.no_sync = self.network.no_sync


class FSDP(TorchReplica):
    """Trains with FSDP2, which all-gathers each layer's weights for forward and reduce-scatters its gradients.

    reshard: free the gathered weights after forward and gather them again for backward.
    """

    def __init__(self, config, mesh, reshard=True):
        from torch.distributed.device_mesh import init_device_mesh           # takes seconds to import
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    """Yield the tensors of a torch optimizer's state on this rank."""
    for state in optimizer.state.values():
        yield from (local(tensor) for tensor in state.values())


def local(tensor):
    """Return a DTensor's local shard, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def counted_bytes(tensors) -> int:
    """Return the bytes of the tensors' storages. A storage that several tensors share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def formula_bytes(name: str, config: Config) -> float:
    """Return a side's expected bytes of state per parameter, from the table at the top of this file. Padding is not
    included.
    """
    whole, d = 4 * max(4, config.params_dtype.itemsize), config.dp     # whole: weight, gradient and AdamW's two moments
    torch_sides = {"ddp": whole, "ddp-zero": whole / 2 + whole / 2 / d, "fsdp2": whole / d, "fsdp2-keep": whole / d}
    return torch_sides.get(name) or state_bytes_per_parameter(dataclasses.replace(config, zero_stage=int(name[-1])))


def peak_of_side(name: str, flags, launch: LaunchInfo, mesh) -> int:
    """Train a few steps of one side, and return the peak bytes that it needs on this rank. Every rank must call it."""
    if mesh.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated(mesh.device)
        torch.cuda.reset_peak_memory_stats(mesh.device)
        train_few_steps(name, config_for(flags), mesh)
        return torch.cuda.max_memory_allocated(mesh.device) - before
    # The fork server has already imported this file, so it starts a process faster than a new interpreter would.
    # Forking this process instead would be unsafe, because it has threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=measure_peak, args=(sending, name, flags, launch), daemon=True)
    process.start()
    sending.close()
    peak = receiving.recv()                                    # raises EOFError if the process failed; it printed why
    process.join()
    return peak


def measure_peak(sending, name: str, flags, launch: LaunchInfo):
    """Run in a separate process: train, then send the increase of this process's peak resident memory in bytes."""
    torch.set_num_threads(1)
    keep_freed_memory()                                        # start_world() does the same for training
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size,
                            store=dist.PrefixStore(f"memory of {name}", store))
    mesh = make_mesh(1, flags.data_parallel_size, 1, torch.device("cpu"))
    train_few_steps(name, config_for(flags, **TINY), mesh)
    gc.collect()
    before = peak_memory(mesh.device)
    train_few_steps(name, config_for(flags), mesh)
    sending.send(peak_memory(mesh.device) - before)
    dist.barrier()                                             # other ranks may still communicate with this one
    dist.destroy_process_group()


def train_few_steps(name: str, config: Config, mesh):
    side = make(name, config, mesh)
    for _ in range(MEASURED_STEPS):
        side.step()


# ---- the report

def mean_over_replicas(losses: list[float]) -> list[float]:
    """Average each step's loss over the replicas. A torch side has its own replica's mean; a nanodomino side already
    has the mean of all replicas, so averaging does not change it.
    """
    mean = torch.tensor(losses, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


def check_same_work(config: Config, losses: dict[str, list[float]]):
    """Raise UserError if a side's losses differ from ddp's. losses: {side: losses of the first steps}."""
    tolerance = SAME[config.dtype]
    require(all(abs(loss - expected) <= tolerance * abs(expected) for name in losses      # false for NaN
                for loss, expected in zip(losses[name], losses["ddp"])),
            f"the losses of the first {COMPARED_STEPS} steps must agree to {tolerance:.0e} relative, but are {losses}, "
            "so the speeds can't be compared; this is a bug")


def report(flags, config, device, times: dict[str, Times], peaks, states, losses):
    """Return (text, record). peaks, states: {side: bytes on the rank with the most}."""
    count = parameter_count(config)
    ratio = {name: ratios(time, times["zero-1"]) for name, time in times.items()}
    speed_of_2 = ratios(times["fsdp2-keep"], times["zero-2"])
    per_parameter = {name: states[name] / count for name in ABOUT}
    expected = {name: formula_bytes(name, config) for name in ABOUT}
    rows = [[ABOUT[name], times[name], ratio_text(ratio[name]), bytes_text(peaks[name]), f"{per_parameter[name]:.2f}",
             f"{expected[name]:.2f}"] for name in ABOUT]
    how = ("max_memory_allocated" if device.type == "cuda" else "growth of a separate process's peak resident memory")
    text = "\n".join([
        f"dp {config.dp} on {device.type}, {os.cpu_count()} cores; {count:,} parameters, {config.num_layers} layers of "
        f"{config.hidden_size}, {config.dtype}, buckets of {config.bucket_size:,} elements; a replica's step is "
        f"{config.microbatches} x {config.micro_batch_size} x {config.seq_length} tokens",
        table(["", "step: median [min .. max]", "step / ZeRO-1's", "peak", "state/parameter", "formula"], rows),
        f"peak: {how}, on the rank with the most; state: bytes of parameters, gradients and optimizer state",
        f"speed of ZeRO-1 / DDP with ZeroRedundancyOptimizer: {ratio_text(ratio['ddp-zero'])}; speed of ZeRO-2 / FSDP2 "
        f"with weights kept: {ratio_text(speed_of_2)}; the losses of the first {COMPARED_STEPS} steps agree"])
    sides = {name: {"step_s": times[name].median, "step_over_zero_1": ratio[name].value,
                    "spread": ratio[name].spread, "peak_bytes": peaks[name],
                    "state_bytes": states[name], "bytes_per_parameter": per_parameter[name],
                    "formula": expected[name], "losses": losses[name]} for name in ABOUT}
    return text, {"question": "zero", "speed_over_ddp_zero": ratio["ddp-zero"].value,
                  "speed_over_fsdp2": ratio["fsdp2"].value, "speed_of_zero_2_over_fsdp2_keep": speed_of_2.value,
                  "sides": sides, "peak_is": how, "parameters": count, "dp": config.dp, **shape_of(config),
                  "bucket_size": config.bucket_size, "microbatches": config.microbatches, "device": device.type,
                  "cores": os.cpu_count(), "repeats": len(times["zero-1"].seconds)}
