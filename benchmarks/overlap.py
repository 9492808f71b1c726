"""How much of tensor parallelism's communication does Domino hide?

A step is forward and backward of --microbatches on --tp ranks, without the optimizer. These alternatives run in turn,
with the same weights and tokens:

    blocking    the GPT of model.py, with autograd: waits for each collective right after launching it
    megatron    domino.py with one slice: forward waits for each all-reduce; in backward, weight gradients hide it
    domino      domino.py with --slices and --columns
    whole       domino without sequence parallelism; only if --sequence-parallel is given
    paired      domino with the schedule `paired`: one microbatch's backward and the next one's forward take turns;
                needs at least two microbatches
    apart       domino with backward split into two actions, input gradients and weight gradients: shows what the split
                costs
    compute     domino without its collectives; its results are wrong, but it computes as much
    wires       domino's collectives without the computation
    dtensor     plain.py, whose layers torch splits with ColwiseParallel and RowwiseParallel; each rank holds the whole
                embedding and head

With --compile (the default on CUDA) all alternatives but blocking and dtensor are compiled. So then compare domino
with megatron.

Three figures are printed for domino and for paired. A name stands for the seconds of that alternative, d for those of
domino or paired:

    hidden      1 - (d - compute) / wires: the share of the communication time that computation hides. If communication
                takes longer than computation, only compute / wires of it can be hidden
    bound       d / max(compute, wires): the time relative to the ideal, in which the shorter of the two is hidden
                entirely. 1 is perfect
    speed-up    blocking / d and megatron / d

    python bench.py overlap                         over the loopback, or between GPUs
    sudo python bench.py overlap --wire 500mbit     over a slow network between the ranks (slow_network.py)
    sudo python bench.py overlap --wire 700mbit --microbatches 8
    python bench.py overlap --ideal-wire            one rank on a wire that costs no processor time (ideal_overlap.py)
    python bench.py overlap --ideal-wire --ep 2 --num-experts 8           the all-to-alls of experts
    python bench.py overlap --tp 8 --model gpt3-13b --num-layers 4 --dtype bfloat16 --micro-batch-size 4   on eight GPUs

On CPUs each rank has one core. The core also handles the rank's network traffic, so computation slows down while a
collective is in flight. Therefore a fourth figure is printed: the processor time of compute plus that of wires.
"""

import os
import statistics
import time
from argparse import BooleanOptionalAction
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import ideal_overlap
from benchmarks.common import (GPT2, SAME, Figure, RandomTokens, Times, add_config_flags, bind_to_one_core, bytes_text,
                               compare, config_here, ratio_text, ratios, seconds_text, shape_of, table)
from benchmarks.plain import Plain, mean_loss
from benchmarks.single_stage import domino_step, split_backward_timetable
from benchmarks.slow_network import INTERFACE
from nanodomino.analysis.machine import slowest
from nanodomino.comm.scatter_and_gather import all_gather, reduce_scatter
from nanodomino.comm.trace import Trace
from nanodomino.comm.world import find_device, start_world
from nanodomino.domino import Domino
from nanodomino.errors import require
from nanodomino.files import write_file
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.overlap.flight import result_of
from nanodomino.overlap.sequence_parallel import ReplicatedResidual
from nanodomino.plot.svg import check_output
from nanodomino.schedules.placement_and_messages import timetable
from nanodomino.timeline.draw import gather, picture
from nanodomino.zero import ZeroOptimizer

FLAGS = ("tensor_model_parallel_size", "slices", "columns", "sequence_parallel", "model", "num_layers", "hidden_size",
         "ffn_hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "vocab_size", "dtype", "device",
         "num_experts", "expert_model_parallel_size", "moe_router_topk", "moe_ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "context_parallel_size", "cp_comm_type")
IDEAL_LENGTH = 64     # tokens per sample on the ideal wire, where one process runs all alternatives
SMALL = dict(num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, micro_batch_size=8, vocab_size=257)


def add_flags(parser):
    add_config_flags(parser, FLAGS, tensor_model_parallel_size=None, slices=2, columns=1, model=None,
                     micro_batch_size=SMALL["micro_batch_size"])
    parser.add_argument("--compile", action=BooleanOptionalAction, help="use torch.compile (default: on CUDA only)")
    parser.add_argument("--wire", metavar="RATE", help="rate of a slow link between the ranks, such as 500mbit; "
                                                       "needs root and iproute2 (default: the loopback)")
    parser.add_argument("--ideal-wire", action="store_true",
                        help="run one rank on an ideal wire, whose collectives cost no processor time "
                             "(ideal_overlap.py); needs no root and no second core")
    parser.add_argument("--latency", type=float, default=0.0, metavar="US",
                        help="latency of each message on the ideal wire, in microseconds (default 0)")
    parser.add_argument("--microbatches", type=int, metavar="M",
                        help="microbatches per step (default 1; on the ideal wire 8)")
    parser.add_argument("--timeline", type=Path, metavar="PICTURE.svg",
                        help="also draw a step of megatron, domino and paired, one above the other")


def processes(flags) -> int:
    ep, cp = flags.expert_model_parallel_size, flags.context_parallel_size
    tp = flags.tensor_model_parallel_size = flags.tensor_model_parallel_size or (1 if ep > 1 or cp > 1 else 2)
    require(max(tp, ep, cp) >= 2,
            f"--tp must be at least 2, but is {tp} (a single rank does not communicate); try 2")
    require(flags.ideal_wire or not flags.num_experts, "--num-experts needs --ideal-wire; add it")
    require(flags.ideal_wire or cp == 1, "--cp needs --ideal-wire; add it")
    require(not flags.ideal_wire or flags.wire is None, "--ideal-wire and --wire exclude each other; leave one out")
    require(not flags.ideal_wire or flags.device != "cuda", "--ideal-wire needs --device cpu, because its clock counts "
            "processor time; add --device cpu, or leave --ideal-wire out")
    require(flags.ideal_wire or not flags.latency, "--latency needs --ideal-wire; add it, or leave --latency out")
    require(0 <= flags.latency <= 1e6, f"--latency must be from 0 to 1000000 us, but is {flags.latency}; try 10")
    if flags.microbatches is None:
        flags.microbatches = 8 if flags.ideal_wire else 1
    require(flags.microbatches >= 1, f"--microbatches must be at least 1, but is {flags.microbatches}; try 8")
    config_for(flags)
    require(not flags.timeline or (flags.timeline.parent.is_dir() and not flags.timeline.is_dir()),
            f"--timeline {flags.timeline} must be a file in an existing folder; make the folder, or choose another "
            "name")
    if flags.timeline:
        check_output(flags.timeline)
    return 1 if flags.ideal_wire else tp


def config_for(flags):
    """Return the Config of a step. Raises UserError.

    Missing flags are filled in from the preset of --model or, without --model, from SMALL.
    """
    if flags.model is None:
        flags.model = "nano"
        if flags.ideal_wire:
            flags.seq_length = flags.seq_length or IDEAL_LENGTH
        for name, size in SMALL.items():
            if getattr(flags, name) is None:
                setattr(flags, name, size)
    flags.vocab_size = flags.vocab_size or (SMALL["vocab_size"] if flags.model == "nano" else GPT2)
    ep, cp = flags.expert_model_parallel_size, flags.context_parallel_size
    return config_here(flags, flags.tensor_model_parallel_size * ep * cp,
                       global_batch_size=flags.micro_batch_size * flags.microbatches * ep,
                       pipeline_model_parallel_size=1, data_parallel_size=ep,
                       disable_bias_linear=True if flags.num_experts else None)


def answer(flags, launch):
    config = config_for(flags)
    if flags.ideal_wire:
        config = replace(config, compile=bool(flags.compile)).with_device(torch.device("cpu"))
        return ideal_overlap.report(flags, config)
    device = find_device(config, launch)
    config = replace(config, compile=flags.compile).with_device(device)
    bind_to_one_core(device)
    require(flags.wire is None or device.type == "cpu",
            "--wire needs --device cpu, because GPUs communicate by NCCL, which would bypass the slow link; add "
            "--device cpu, or leave --wire out")
    require(flags.wire is None or os.environ.get("GLOO_SOCKET_IFNAME") == INTERFACE,
            "--wire needs a network namespace for each process, but torchrun makes none; run bench.py without torchrun")
    start_world(launch, device)
    mesh = make_mesh(1, 1, config.tp, device)
    tokens = RandomTokens(config, device)
    batches = [tokens.batch(0, i, 0, 1, config.micro_batch_size, config.global_batch_size)
               for i in range(config.microbatches)]

    alternatives, collectives = prepare(config, mesh, batches)
    times = compare(alternatives, flags.repeats, device)
    if flags.timeline:
        draw(flags.timeline, config, mesh, batches)
    cores = None if device.type == "cuda" else statistics.median(
        slowest(sum(processor_seconds(alternatives[name]) for name in ("compute", "wires"))) for _ in range(3))
    return report(flags, config, times, collectives, device, cores)


def processor_seconds(step) -> float:
    """Run step() and return the processor time of all threads, gloo's included."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


# ---- the alternatives

def prepare(config, mesh, batches):
    """Return the alternatives as {name: function that runs a step}, and the list of domino's collectives. Runs a step
    of each alternative. Raises UserError if their losses differ.
    """
    model = GPT(config, mesh)
    ZeroOptimizer(model, config, mesh)                         # gives each parameter its main_grad
    compiler = config.compiler
    megatron, domino = Domino(model, 1, 1, compiler), Domino(model, config.slices, config.columns, compiler)
    split_backward = split_backward_timetable(len(batches))
    whole = Domino(model, config.slices, config.columns, compiler)
    whole.ops.stream = ReplicatedResidual(mesh.tp_group)
    compute = without_collectives(Domino(model, config.slices, config.columns, compiler))
    plain = dtensor_model(config, mesh)
    steps = {"blocking": lambda: blocking_step(model, batches),
             "megatron": lambda: domino_step(megatron, batches),
             "domino": lambda: domino_step(domino, batches),
             "whole": lambda: domino_step(whole, batches),
             "paired": lambda: domino_step(domino, batches, timetable("paired", 1, len(batches))),
             "apart": lambda: domino_step(domino, batches, split_backward),
             "dtensor": lambda: dtensor_step(plain, batches)}
    if len(batches) == 1:
        del steps["paired"]                                    # there is no next forward
    if not config.sequence_parallel:
        del steps["whole"]
    losses = {name: step() for name, step in steps.items()}
    worst = max(abs(loss - losses["blocking"]) for loss in losses.values())
    require(worst <= SAME[config.dtype] * abs(losses["blocking"]),
            f"the alternatives' losses must be equal, but are {losses}, so their times can't be compared; this is a "
            "bug")
    collectives = collectives_of(Domino(model, config.slices, config.columns), batches)
    wires = CollectivesOnly(collectives, max(2, config.slices * config.columns), mesh)
    return {**steps, "compute": lambda: domino_step(compute, batches), "wires": wires.run}, collectives


def blocking_step(model: GPT, batches) -> float:
    """Run a step with autograd, and return the mean loss."""
    means = []
    for batch in batches:
        losses = model(batch.tokens, batch.positions, batch.labels)
        losses.sum().backward()
        means.append(losses.mean())
    return torch.stack(means).mean().item()


def draw(path: Path, config, mesh, batches):
    """Record a step of megatron, domino and paired, and draw the three on one time scale, as an SVG file."""
    model, recordings = GPT(config, mesh), []
    ZeroOptimizer(model, config, mesh)
    settings = [(1, 1, "1f1b"), (config.slices, config.columns, "1f1b"), (config.slices, config.columns, "paired")]
    for slices, columns, schedule in settings if len(batches) > 1 else settings[:2]:
        trace = Trace(mesh.device)
        stage = Domino(model, slices, columns, trace=trace)
        for step in range(3):                                  # two steps warm up; the third is drawn
            trace.take()                                       # forgets the previous step
            dist.barrier()
            with trace.span("step", step=step):
                domino_step(stage, batches, timetable(schedule, 1, len(batches)))
        if recording := gather(trace, mesh):
            recordings.append(replace(recording, caption=f"slices {slices}, columns {columns}"
                                                  + (", paired" if schedule == "paired" else "")))
    if recordings:
        write_file(path, picture(recordings).encode())


def dtensor_model(config, mesh) -> Plain:
    """Return the plain model with the same initial weights as GPT. torch splits each layer's four matrices over the
    ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    unsplit = GPT(config, replace(mesh, tp=1, tp_rank=0))          # all weights, on every rank
    model = Plain(config).to(mesh.device, config.params_dtype).load(unsplit.state_dict())
    ranks = init_device_mesh(mesh.device.type, (config.tp,))
    for layer in model.layers.values():
        parallelize_module(layer.attention, ranks, {"qkv": ColwiseParallel(), "dense": RowwiseParallel()})
        parallelize_module(layer.mlp, ranks, {"dense_h_to_4h": ColwiseParallel(), "dense_4h_to_h": RowwiseParallel()})
    return model


def dtensor_step(model: Plain, batches) -> float:
    """Run a step of the DTensor model, and return the mean loss."""
    means = []
    for batch in batches:
        means.append(mean_loss(model(batch.tokens), batch.labels))
        means[-1].backward()
    return torch.stack(means).mean().item()


def without_collectives(stage: Domino) -> Domino:
    """Change a stage so that it runs the same computation in the same order, but no collectives. Return the stage."""
    stage.ops.launch = lambda slice, site, flight: flight
    stage.ops.wait = lambda slice, site, flights: result_of(flights)
    return stage


def collectives_of(stage: Domino, batches) -> list[tuple]:
    """Run a step and list its collectives in launch order, as (kind, elements, dtype), for example ("all_reduce", 4096,
    torch.float32).
    """
    collectives, launch = [], stage.ops.launch

    def recorded_launch(slice, site, flight):
        if flight.kind:
            collectives.append((flight.kind, flight.sent.numel(), flight.sent.dtype))
        return launch(slice, site, flight)

    stage.ops.launch = recorded_launch
    domino_step(stage, batches)
    return collectives


class CollectivesOnly:
    """Runs the collectives of a step, on tensors of zeros and without computation. At most `depth` are in flight."""

    def __init__(self, collectives, depth, mesh):
        self.collectives, self.depth, self.group = collectives, depth, mesh.tp_group
        largest = max(count * dtype.itemsize for _, count, dtype in collectives)
        self.buffers = [torch.zeros(largest, dtype=torch.uint8, device=mesh.device) for _ in range(depth)]

    def run(self):
        works = []
        send = {"all_reduce": lambda tensor: dist.all_reduce(tensor, group=self.group, async_op=True),
                "reduce_scatter": lambda tensor: reduce_scatter(tensor, self.group)[0],
                "all_gather": lambda tensor: all_gather(
                    tensor, tensor.chunk(self.group.size())[self.group.rank()], self.group)}
        for i, (kind, count, dtype) in enumerate(self.collectives):
            if i >= self.depth:
                works[i - self.depth].wait()
            works.append(send[kind](self.buffers[i % self.depth][:count * dtype.itemsize].view(dtype)))
        for work in works[-self.depth:]:
            work.wait()


# ---- the report

def figures_of(times: dict[str, Times]) -> tuple[float, dict[str, Figure]]:
    """Return the share of the communication that computation could hide, and {name: Figure} for domino and paired."""
    compute, wires = times["compute"], times["wires"]
    hideable, figures = min(1.0, ratios(compute, wires).median), {}
    ideal = Times(tuple(map(max, compute.seconds, wires.seconds)))
    for name, prefix in (("domino", ""), ("paired", "paired_")):
        if name in times:
            hidden = tuple(1 - (step - computing) / sending for step, computing, sending
                           in zip(times[name].seconds, compute.seconds, wires.seconds))
            figures |= {f"{prefix}hidden": Figure(hidden, most=hideable, size=1.0),
                        f"{prefix}bound_ratio": ratios(times[name], ideal, least=1.0),
                        f"{prefix}speedup": ratios(times["blocking"], times[name]),
                        f"{prefix}megatron_ratio": ratios(times["megatron"], times[name])}
    return hideable, figures


def report(flags, config, times, collectives, device, cores: float | None):
    """Return (text, record). cores: the processor time that a rank needs for computation and network, in seconds."""
    hideable, figures = figures_of(times)
    about = {"blocking": "autograd", "megatron": "one slice", "dtensor": "torch's DTensor",
             "domino": f"slices {config.slices}, columns {config.columns}", "compute": "domino without collectives",
             "paired": "domino, forwards and backwards overlap", "apart": "domino, backward split in two",
             "wires": "domino's collectives only", "whole": "domino without --sequence-parallel"}
    rows = [[name, about[name], time, ratio_text(ratios(times["blocking"], time))] for name, time in times.items()]
    sent = sum(count * dtype.itemsize for _, count, dtype in collectives)
    if "whole" in times:
        figures["whole_ratio"] = ratios(times["domino"], times["whole"])
    wire = f"a link of {flags.wire}" if flags.wire else {"cpu": "the loopback", "cuda": "the GPUs' links"}[device.type]
    text = "\n".join([
        f"tp {config.tp} on {device.type}, over {wire}; {os.cpu_count()} cores; hidden {config.hidden_size}, "
        f"{config.num_layers} layers, {config.microbatches} x batch {config.micro_batch_size} x {config.seq_length}, "
        f"{config.dtype}, "
        f"{'compiled' if config.compile else 'not compiled'}; "
        f"forward and backward, {len(collectives)} collectives of {bytes_text(sent)} in total",
        table(["", "", "median [min .. max]", "speed-up over blocking"], rows),
        *(f"{name} hides {figures[prefix + 'hidden']:.0%} of the communication (1 - ({name} - compute) / wires); "
          f"at most {hideable:.0%} could be hidden; bound {figures[prefix + 'bound_ratio']:.2f} x max(compute, wires); "
          f"speed-up {figures[prefix + 'speedup']:.2f} over blocking, {figures[prefix + 'megatron_ratio']:.2f} over "
          "megatron" for name, prefix in (("domino", ""), ("paired", "paired_")) if name in times),
        *([f"a core needs {seconds_text(cores)} for its rank's computation and network traffic, which share it: "
           f"{cores / max(times['compute'].median, times['wires'].median):.2f} x max(compute, wires); no schedule is "
           "faster"] if cores else []),
        *(["sequence parallelism: domino's time / whole's: " + ratio_text(figures["whole_ratio"])]
          if "whole" in times else [])])
    names = {"blocking": "blocking_s", "megatron": "megatron_s", "domino": "domino_s", "paired": "paired_s",
             "apart": "apart_s", "dtensor": "dtensor_s", "whole": "whole_s", "compute": "no_comm_s", "wires": "comm_s"}
    record = {"question": "overlap", "core_s": cores, **{names[name]: time.median for name, time in times.items()},
              **{name: figure.value for name, figure in figures.items()},
              "spread": {name: figure.spread for name, figure in figures.items()}, "hideable": hideable,
              "wire": flags.wire, "device": device.type, "cores": os.cpu_count(), "tp": config.tp,
              "slices": config.slices, "columns": config.columns,
              "sequence_parallel": config.sequence_parallel, "model": config.model, "compile": config.compile,
              **shape_of(config), "microbatches": config.microbatches, "collectives": len(collectives),
              "bytes": sent, "repeats": flags.repeats}
    return text, record
