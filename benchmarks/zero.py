"""Is ZeRO as fast as torch's sharded optimizers, and does it need as little memory?

A step is forward, backward, clipping and AdamW on --dp replicas, with --microbatches on each. These implementations,
called sides, run in turn with the same initial weights and tokens. The losses of their first steps must agree:

    zero-1      nanodomino: train.py's step; optimizer state is sharded
    zero-0      nanodomino: nothing is sharded
    zero-2      nanodomino: gradients are sharded, too, and reduced after each microbatch
    ddp-zero    torch: DistributedDataParallel around plain_model.py with ZeroRedundancyOptimizer, which gives each
                replica the optimizer state of some whole parameters. Gradients are reduced once, in the last microbatch
    fsdp2-keep  torch: fully_shard of each layer. Each layer's weights are gathered in forward and kept until backward
                (reshard_after_forward=False), which corresponds to ZeRO-2. Gradients are reduced after each microbatch

The columns of the table:

    step              the step's time on the slowest rank
    state/parameter   bytes of parameters, gradients and optimizer state after a step, divided by the number of
                      parameters, on the rank with the most. A storage that several tensors share counts once
                      With d replicas expect (1910.02054, sections 5.1 and 5.2, but with fp32 gradients): zero-1
                      8 + 8/d, zero-0 16, zero-2 4 + 12/d; in 16 bits 6 + 12/d, 18, 2 + 16/d. torch's sides keep fp32
                      weights, under autocast: ddp-zero 8 + 8/d, fsdp2-keep 16/d

On CPUs each rank has one core, which also handles the rank's network traffic. ZeRO-2 saves memory only if --bucket-size
is small compared with the model.

    python bench.py zero
    python bench.py zero --dtype bfloat16 --micro-batch-size 8
    python bench.py zero --num-layers 12 --bucket-size 1000000 --microbatches 4
"""

import dataclasses
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

import train
from benchmarks.plain_model import adamw
from benchmarks.runner import (Times, Training, about, add_config_flags, config_here, describe, entries, gathered, join,
                               ratios, table)
from benchmarks.throughput import COMPARED_STEPS, PlainTraining, plain, train_in_turn
from nanodomino.errors import require
from nanodomino.estimate.formulas import parameter_count
from nanodomino.estimate.rank import state_tensors
from nanodomino.zero import ZeroOptimizer

FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "micro_batch_size",
         "data_parallel_size", "bucket_size", "dtype", "device")


def add_flags(parser):
    add_config_flags(parser, FLAGS, data_parallel_size=2, num_layers=4, hidden_size=512, num_attention_heads=8,
                     seq_length=128, vocab_size=256, micro_batch_size=2)
    parser.add_argument("--microbatches", type=int, default=1, metavar="M",
                        help="microbatches per replica and step (default 1)")


def processes(flags) -> int:
    replicas = flags.data_parallel_size
    require(replicas >= 2, f"--dp must be at least 2, but is {replicas} (a single replica shards nothing); try 2")
    require(flags.microbatches >= 1, f"--microbatches must be at least 1, but is {flags.microbatches}; try 4")
    require(flags.dtype != "float16", "--dtype must not be float16, because the other implementations do not scale the "
            "loss; try --dtype bfloat16")
    flags.config = config_here(
        flags, replicas, slices=1, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, compile=False,
        lr_decay_style="constant", lr_warmup_fraction=0.0,
        global_batch_size=flags.micro_batch_size * flags.microbatches * replicas)
    return replicas


def answer(flags, launch):
    config, mesh = join(flags.config, launch, one_core=True)
    sides = {name: make(config, mesh) for name, make in SIDES.items()}
    times, losses = train_in_turn(config, sides, flags.repeats)
    states = {name: max(gathered(state_bytes(side.model, side.optimizer))) for name, side in sides.items()}
    return report(config, times, states, losses)


# ---- the sides

def ours(config, mesh, stage: int) -> Training:
    """Train with train.py's step. stage: the ZeRO stage, 0, 1 or 2."""
    return Training(dataclasses.replace(config, zero_stage=stage), mesh)


class DDP(PlainTraining):
    """Trains with DistributedDataParallel, which all-reduces buckets of gradients during backward.

    Two options that are off by default in torch are on here. Gradients are views of the buckets, which saves a second
    copy. ZeroRedundancyOptimizer also makes the weights views of buckets, so that it broadcasts a whole bucket at once.
    """

    def __init__(self, config, mesh):
        from torch.distributed.optim import ZeroRedundancyOptimizer          # takes seconds to import

        super().__init__(config, mesh, plain(config, train.model_builder(config, mesh)))
        self.optimizer = ZeroRedundancyOptimizer(self.optimizer.param_groups, torch.optim.AdamW,
                                                 parameters_as_bucket_view=True, fused=True)
        self.network = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.no_sync = self.network.no_sync


class FSDP(PlainTraining):
    """Trains with FSDP2, which all-gathers each layer's weights for forward and reduce-scatters its gradients."""

    def __init__(self, config, mesh):
        from torch.distributed.device_mesh import init_device_mesh           # takes seconds to import
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(config, mesh, plain(config, train.model_builder(config, mesh)))
        shard = partial(fully_shard, mesh=init_device_mesh(mesh.device.type, (config.dp,)), reshard_after_forward=False)
        inner, outer = {}, {}
        if config.dtype == "bfloat16":
            self.autocast = nullcontext                        # FSDP converts the weights itself
            inner = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            outer = dict(inner, output_dtype=torch.float32)            # logits
        network = self.model.model                             # without the loss, which stays in fp32
        for layer in network.layers.values():
            shard(layer, mp_policy=MixedPrecisionPolicy(**inner))
        shard(network, mp_policy=MixedPrecisionPolicy(**outer))
        self.optimizer = adamw(self.model, config)


SIDES = {**{f"zero-{stage}": partial(ours, stage=stage) for stage in (1, 0, 2)}, "ddp-zero": DDP, "fsdp2-keep": FSDP}


# ---- the report

def state_bytes(model, optimizer) -> int:
    """Return the bytes of this rank's parameters, gradients and optimizer state. Of a DTensor the local shard counts. A
    storage that several tensors share counts once."""
    if isinstance(optimizer, ZeroOptimizer):
        tensors = [tensor for held in state_tensors(model, optimizer).values() for tensor in held]
    else:
        weights, states = [*model.parameters()], getattr(optimizer, "optim", optimizer).state.values()
        tensors = [*weights, *(weight.grad for weight in weights), *(one for state in states for one in state.values())]
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in shards}.values())


def report(config, times: dict[str, Times], states, losses):
    """Return (text, record). states: {side: bytes on the rank with the most}"""
    count = parameter_count(config)
    slower = {name: ratios(time, times["zero-1"]) for name, time in times.items()}
    speeds = {"zero-1 / ddp-zero": slower["ddp-zero"], "zero-2 / fsdp2-keep": ratios(times["fsdp2-keep"],
                                                                                     times["zero-2"])}
    sides = {name: entries({"step": times[name], "step_over_zero_1": slower[name], "state_bytes": states[name],
                            "bytes_per_parameter": states[name] / count, "losses": losses[name]}) for name in SIDES}
    text = "\n".join([
        f"{count:,} parameters, buckets of {config.bucket_size:,} elements; {describe(config)}",
        table(["", "step: median [min .. max]", "step / zero-1's", "state/parameter"],
              [[name, times[name], slower[name], f"{states[name] / count:.2f}"] for name in sides]),
        *(f"speed of {name}: {speed}" for name, speed in speeds.items()),
        f"the losses of the first {COMPARED_STEPS} steps agree"])
    return text, {**speeds, "sides": sides, "parameters": count, "bucket_size": config.bucket_size, **about(config)}
