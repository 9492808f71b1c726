"""What do 2, 4, 8 processes gain over one?

A world is the set of all processes of a run. Worlds of 1, 2, 4 ... processes run full training steps, one world after
another. Each process has its own core (or GPU) while there are enough. Two layouts and two kinds of scaling are
measured:

    dp       data parallel
    tp       tensor parallel (Domino with two slices)

    weak     --global-batch-size samples per process: ideally a step takes as long as on one process
    strong   --global-batch-size samples in total: ideally twice the processes take half the time

    speed-up     tokens/s of N processes / tokens/s of one. The two do not run at the same time, so every round of N
                 processes is compared with every round of one process
    efficiency   speed-up / N

Processes that share a core gain nothing. With more processes than cores, the figures only show what the layout costs.

    python bench.py scaling                       worlds of 1, 2, 4, 8
    python bench.py scaling --processes 4         only one world; also under torchrun and on several hosts
"""

import dataclasses
import json
import tempfile
from argparse import Namespace

import torch

from benchmarks.common import (Figure, RandomTokens, Times, about, add_config_flags, compare, config_here, cores_of,
                               describe, join, ratio_text, start_processes, table)
from benchmarks.throughput import OurTraining
from nanodomino.errors import counted, require
from nanodomino.mesh import make_mesh

FLAGS = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size",
         "micro_batch_size", "global_batch_size", "dtype", "device")
SUPERLINEAR = 1.2            # N caches can speed up by a little more than N; a figure beyond N x 1.2 is noise
VARIANTS = [(layout, scaling) for layout in ("dp", "tp") for scaling in ("weak", "strong")]


def add_flags(parser):
    add_config_flags(parser, FLAGS, num_layers=4, vocab_size=257, micro_batch_size=4, global_batch_size=8)
    parser.add_argument("--max-processes", type=int, default=8, metavar="N", help="the largest world (default 8)")
    parser.add_argument("--processes", type=int, metavar="N",
                        help="measure only a world of N processes (default: 1, 2, 4, ... in turn)")


def processes(flags) -> int:
    for name in ("processes", "max_processes"):
        count = getattr(flags, name)
        require(count is None or count >= 1, f"--{name.replace('_', '-')} must be at least 1, but is {count}; try 2")
    for world_size in [flags.processes] if flags.processes else worlds(flags):
        for variant in VARIANTS:
            settle(flags, world_size, *variant)
    return flags.processes or 1


def worlds(flags) -> list[int]:
    """Return the numbers of processes: 1, 2, 4, ... up to --max-processes."""
    return [2 ** i for i in range(flags.max_processes.bit_length())]


def settle(flags, world_size, layout, scaling):
    """Return the Config of a variant. Raises UserError if the model or the batch can't be split over the processes."""
    samples = flags.global_batch_size * (world_size if scaling == "weak" else 1)
    dp, tp = (world_size, 1) if layout == "dp" else (1, world_size)
    micro_batch_size = min(flags.micro_batch_size, max(samples // dp, 1))
    changed = vars(flags) | {"global_batch_size": samples, "micro_batch_size": micro_batch_size}
    return config_here(Namespace(**changed), world_size, data_parallel_size=dp, tensor_model_parallel_size=tp,
                     pipeline_model_parallel_size=1, lr_decay_style="constant", lr_warmup_fraction=0.0)


def answer(flags, launch):
    return measure(flags, launch) if flags.processes else compare_worlds(flags)


# ---- one world

def measure(flags, launch):
    """Return (text, record) of this world, with seconds and tokens/s of each variant."""
    configs = {"_".join(variant): settle(flags, launch.world_size, *variant) for variant in VARIANTS}
    device = join(configs["dp_weak"], launch, one_core=True)[1].device
    times = compare({name: training(config, device) for name, config in configs.items()}, flags.repeats, device,
                    about=f"world of {launch.world_size}, ")
    rows, variants = [], {}
    for name, config in configs.items():
        speed = config.global_batch_size * config.seq_length / times[name].median
        variants[name] = {"step_s": times[name].median, "tokens_per_s": speed, "seconds": times[name].seconds}
        rows.append([name.replace("_", " "), config.global_batch_size, times[name], f"{speed:,.0f}"])
    text = table([f"{launch.world_size} processes", "samples", "step: median [min .. max]", "tokens/s"], rows)
    return text, {"processes": launch.world_size, "variants": variants}


def training(config, device):
    """Return a function that runs one step of train.py on random tokens."""
    return OurTraining(config, make_mesh(config.pp, config.dp, config.tp, device), RandomTokens(config, device)).step


# ---- all worlds

def compare_worlds(flags):
    """Start worlds of 1, 2, 4, ... processes and return (text, record)."""
    config, units, sizes = settle(flags, 1, *VARIANTS[0]), len(cores_of(0, 1)), worlds(flags)
    if gpus := torch.cuda.device_count() if config.device != "cpu" else 0:       # NCCL allows one process per GPU
        units, sizes = gpus, [size for size in sizes if size <= gpus]
    config = dataclasses.replace(config, device="cuda" if gpus else "cpu")
    records = [start(flags, size) for size in sizes]
    # On one process all variants are the same, so their rounds are pooled.
    alone = [second for variant in records[0]["variants"].values() for second in variant["seconds"]]
    rows, figures = [], {}
    for name in records[0]["variants"]:
        mine = [record["variants"][name] for record in records]
        gains = [speedup(world["seconds"], alone, size, size if name.endswith("weak") else 1)
                 for world, size in zip(mine, sizes)]
        figures[name] = dict(step_s=[world["step_s"] for world in mine],
                             tokens_per_s=[world["tokens_per_s"] for world in mine],
                             speedup=[gain.value for gain in gains], speedup_spread=[gain.spread for gain in gains],
                             efficiency=[gain.value and gain.value / size for gain, size in zip(gains, sizes)])
        rows += [[name.replace("_", " "), size, Times(tuple(world["seconds"])), f"{world['tokens_per_s']:,.0f}",
                  ratio_text(gain), "" if gain.value is None else f"{gain.value / size:.0%}"]
                 for world, gain, size in zip(mine, gains, sizes)]
    text = "\n".join([
        f"{describe(config)}; {flags.global_batch_size} samples per process (weak) or in total (strong)",
        table(["", "processes", "step: median [min .. max]", "tokens/s", "speed-up", "efficiency"], rows),
        f"this machine has {counted(units, 'GPU' if gpus else 'core')}"
        + (f"; more than {units} processes share cores and gain nothing" if sizes[-1] > units else "")])
    return text, {"processes": sizes, **figures, **about(config)}


def speedup(seconds: list[float], alone: list[float], world_size: int, work: int) -> Figure:
    """Return the speed-up in tokens/s of a world over a single process.

    seconds, alone: seconds of each round of the world and of the single process. work: the samples in a step of the
    world, relative to the single process.
    """
    return Figure(tuple(work * single / many for single in alone for many in seconds), most=SUPERLINEAR * world_size)


def start(flags, world_size) -> dict:
    """Start a world of processes that measures itself; return rank 0's record. Raises UserError if it fails."""
    arguments = ["scaling", "--processes", str(world_size), "--repeats", str(flags.repeats)]
    for name in FLAGS:
        if getattr(flags, name) is not None:
            arguments += ["--" + name.replace("_", "-"), str(getattr(flags, name))]
    with tempfile.TemporaryFile("w+") as output:
        code = start_processes(arguments, world_size, output=output)
        require(code == 0, f"a world of {counted(world_size, 'process')} ended with exit code {code}; see its message "
                "above")
        output.seek(0)
        return json.loads(output.read().splitlines()[-1])
