"""Runs the benchmarks: starts their processes, times alternatives in turn, prints tables.

Each question of bench.py is a module in this folder with three functions:

    add_flags(parser)                       adds the question's flags; --repeats is added for it
    processes(flags) -> int                 returns the number of processes, and may add to the flags what answer()
                                            needs; raises UserError if a flag is wrong
    answer(flags, launch) -> (text, dict)   runs on every process; rank 0 prints the text, then a JSON line: entries()
                                            of the dict, the question, --repeats and the number of cores. The exit code
                                            is 1 if the dict has a "failed" that is not empty

A module that times nothing sets ROUNDS = False and gets no --repeats. If a question needs several processes, `python
bench.py QUESTION` starts them and waits. Under torchrun, bench.py is already one of the processes and starts no others.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from benchmarks.slow_network import exit_on_signals, slow_wire
from nanodomino.comm.device import choose_kernels, find_device
from nanodomino.comm.world import LaunchInfo, read_launch_environment, start_world
from nanodomino.data import Batch
from nanodomino.domino import Domino
from nanodomino.errors import UserError, counted, require
from nanodomino.estimate.stages import require_memory
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.settings.config import Config
from nanodomino.settings.flags import Parser, add_flags, check_range, flag_settings
from nanodomino.settings.rules import check_needs
from nanodomino.zero import ZeroOptimizer

MOST_PROCESSES = 64      # that bench.py starts itself
BENCH = Path(__file__).resolve().parent.parent / "bench.py"


def main(questions, text: str, arguments: list[str]) -> int:
    """Run bench.py's command line and return the exit code. text: what `bench.py --help` prints."""
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            return print(text) or 0
        require(arguments[0] in questions, f"there is no question '{arguments[0]}'; try one of {', '.join(questions)}")
        question = importlib.import_module(f"benchmarks.{arguments[0]}")
        flags = parse(question, arguments)
        launch_info = read_launch_environment()
        world_size = question.processes(flags)
        if world_size > 1 and not launch_info.launched:
            rate = getattr(flags, "wire", None)
            return start_processes(arguments, world_size, slow_wire(rate, world_size) if rate else nullcontext())
        require(launch_info.world_size == world_size,
                f"bench.py {arguments[0]} needs {counted(world_size, 'process')} with these flags, but torchrun has "
                f"started {launch_info.world_size}; run it without torchrun, or with torchrun --nproc_per_node "
                f"{world_size}")
        bind_to(cores_of(launch_info.local_rank, launch_info.local_world_size))
        text, record = question.answer(flags, launch_info)
        if launch_info.rank == 0:
            print(text + (f"\n{TOO_NOISY}: {WHAT_IS_TOO_NOISY}" if TOO_NOISY in text else ""))
            print(json.dumps({"question": arguments[0], **entries(record), "cores": os.cpu_count(),
                              "repeats": getattr(flags, "repeats", None)}), flush=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return 1 if record.get("failed") else 0
    except UserError as error:
        time.sleep(10 * bool(int(os.environ.get("RANK") or 0)))        # rank 0 prints it, and its end ends the others
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(question, arguments: list[str]) -> argparse.Namespace:
    """Parse a question's flags. question: its module; arguments: its name, then the flags. Raises UserError."""
    parser = Parser(f"python bench.py {arguments[0]}", usage=f"python bench.py {arguments[0]} [flags]",
                    description=question.__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    if getattr(question, "ROUNDS", True):
        parser.add_argument("--repeats", type=int, default=7, metavar="N",
                            help="timed rounds, after one untimed warm-up round (default 7)")
    question.add_flags(parser)
    flags = parser.parse_args(arguments[1:])
    unset = argparse.Namespace(**dict.fromkeys(vars(flags)))       # argparse sets no default where there is a value
    flags.given = [name for name, value in vars(parser.parse_args(arguments[1:], unset)).items() if value is not None]
    check_range("--repeats", getattr(flags, "repeats", 1))
    return flags


# The settings of train.py that a question can offer as flags.
CONFIG_FLAGS = ("global_batch_size", "optimizer", "dtype", "device", "fp8_format", *(
    setting.name for setting in flag_settings(Config) if "--fp8-format" in setting.metadata["needs"]), *(
    setting.name for setting in flag_settings(Config, "The model", "The layout")))


def add_config_flags(parser, names=CONFIG_FLAGS, **defaults):
    """Add the train.py flags called `names`. defaults: default values that replace train.py's, by name."""
    add_flags(parser, [setting for setting in flag_settings(Config) if setting.name in names], **defaults)


def config_of(flags, world_size: int, **settings) -> Config:
    """Return the resolved Config of the parsed `flags`. settings: values that the question fixes. Raises UserError."""
    given = {name: getattr(flags, name) for name in CONFIG_FLAGS if hasattr(flags, name)}
    config = Config(**given, **settings).resolve(world_size)
    check_needs(config, getattr(flags, "given", ()))
    return config.with_vocabulary(config.vocab_size)


def config_here(flags, world_size: int, **settings) -> Config:
    """Return config_of(). Also raises UserError if this machine lacks memory or can't run that many processes."""
    launch = read_launch_environment()
    require(launch.launched or world_size <= MOST_PROCESSES,
            f"bench.py starts at most {MOST_PROCESSES} processes, but these flags need {world_size}; lower --tp, --pp "
            "or --dp, or start the processes with torchrun")
    config = config_of(flags, world_size, **settings)
    if launch.rank == 0 and (config.device == "cpu" or not torch.cuda.is_available()):
        require_memory(train, config, torch.device("cpu"), launch.local_world_size if launch.launched else world_size)
    return config


ABOUT = ("tp pp dp cp ep slices columns zero_stage schedule virtual_stages sequence_parallel cp_comm_type "
         "recompute_granularity checkpoint_in_cpu fp8_format model num_layers hidden_size num_attention_heads "
         "seq_length vocab_size micro_batch_size global_batch_size microbatches dtype device compile").split()


def about(config: Config) -> dict:
    """Return the layout, the memory options and the sizes of the model for the JSON line."""
    return {name: getattr(config, name) for name in ABOUT}


def describe(config: Config) -> str:
    """Return the same in one line, to be printed above a table."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about(config).items()
                     if value not in (None, False, "none"))


# ---- processes

def start_processes(arguments: list[str], world_size: int, wire) -> int:
    """Start `world_size` processes of bench.py, wait for them, and return the first nonzero exit code, or 0. If one
    fails, the others are ended. Each gets the environment variables that torchrun would set.

    wire: a context manager that yields for each rank what starts it there (see slow_wire()), or None"""
    with exit_on_signals(), wire as places, reserve_port() as reserved:
        processes = []
        try:
            for rank, (prefix, more) in enumerate(places or [([], {})] * world_size):
                environment = dict(
                    RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=reserved.getsockname()[1],
                    OMP_NUM_THREADS=len(cores_of(rank, world_size)))
                processes.append(subprocess.Popen(
                    [*prefix, sys.executable, str(BENCH), *arguments], stdout=None if rank == 0 else subprocess.DEVNULL,
                    env=os.environ | {name: str(value) for name, value in environment.items()} | more))
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
    return next((code for code in codes if code), 0)


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free TCP port of this host while it is open. The kernel gives this port to no
    process that asks for any free port. A server can still listen on it, because both sockets allow reuse."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def cores_of(rank: int, world_size: int) -> list[int]:
    """Return the cores for one process: an equal share. If there are fewer cores than processes, some share a core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = len(cores) // world_size
    return cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]]


def bind_to(cores: list[int]):
    """Bind this process to these cores, with one thread per core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def join(config: Config, launch: LaunchInfo, one_core=False) -> tuple[Config, Mesh]:
    """Join the process groups. Return the Config with its device, and the mesh, whose device is this process's own.
    one_core: bind this process to a single core, if the device is the CPU"""
    device = find_device(config, launch)
    if one_core and device.type == "cpu":
        bind_to(cores_of(0, 1)[:1])
    start_world(launch, device)
    return with_mesh(config, device)


def with_mesh(config: Config, device: torch.device, mesh: Mesh | None = None) -> tuple[Config, Mesh]:
    """Choose the kernels. Return the Config with its device, and the mesh of all ranks of a world that has started.
    mesh: one of the same layout, to be used again; nothing frees a mesh's communicators before the process ends."""
    config = dataclasses.replace(config, device=device.type).with_device(device)
    choose_kernels(config, device)
    return config, mesh or make_mesh(config.pp, config.dp, config.tp, device, **config.mesh_options,
                                     thread_blocks=config.thread_blocks)


def gathered(value) -> list:
    """Return a list of every rank's value, in rank order. Every rank must call it."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


# ---- work

class RandomTokens:
    """Stands in for data.TokenDataset with one global batch of random tokens, the same at every step. With
    --reset-position-ids or --reset-attention-mask, token 0 ends a document."""

    def __init__(self, config: Config, device=torch.device("cpu")):
        shape = (config.global_batch_size, config.seq_length + 1)
        self.device, self.prepare = device, partial(config.prepare_batch, end_of_text=0)
        self.tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def batch(self, first_sample, microbatch, dp_rank, dp, micro_batch_size, global_batch_size, shuffle=True) -> Batch:
        first = dp_rank * (global_batch_size // dp) + microbatch * micro_batch_size
        rows = self.tokens[first:first + micro_batch_size].clone()     # with its own memory, like TokenDataset's rows
        return Batch.from_rows(rows, list(range(first, first + micro_batch_size)), None, self.device, self.prepare)

    def batches(self, config: Config) -> list[Batch]:
        """Return the microbatches of the first replica."""
        return [self.batch(0, i, 0, config.dp, config.micro_batch_size, config.global_batch_size)
                for i in range(config.microbatches)]


class Training:
    """Trains nanodomino's model with train.py's train_step, as train.py builds it and warms it up, on random tokens."""

    def __init__(self, config: Config, mesh: Mesh, **trace):
        self.config, self.mesh, self.tokens, self.losses = config, mesh, RandomTokens(config, mesh.device), []
        self.model = train.model_builder(config, mesh)
        self.optimizer = ZeroOptimizer(self.model, config, mesh, **trace)
        self.stage = Domino(self.model, config.slices, config.columns, config.compiler, **trace)
        train.warm_up(self.stage, self.optimizer, config, mesh)

    def step(self):
        result = train.train_step(len(self.losses) + 1, self.stage, self.optimizer, self.tokens, self.config, self.mesh)
        self.losses.append(result.loss)


# ---- alternatives in turn

# Alternatives do the same work if their losses and gradient norms differ by at most this much, relative to the value.
# In 16 bit the alternatives round at different points, and plain torch also sums gradients in 16 bit.
SAME = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2.5e-3}


def require_same_work(config: Config, what: str, values: dict[str, list[float]]):
    """Raise UserError if the alternatives' values differ from the first one's. values: {alternative: such as losses}"""
    first, tolerance = next(iter(values)), SAME[config.dtype]
    for name, found in values.items():
        require(all(abs(value - expected) <= tolerance * max(abs(expected), 1e-30)          # false for NaN
                    for value, expected in zip(found, values[first])),
                f"the {what} of {name} are {found}, and those of {first} {values[first]}; they must agree to "
                f"{tolerance:.0e} relative, so the times can't be compared; this is a bug")


def in_turn(alternatives: dict, repeats: int, run) -> dict[str, list]:
    """Call run(function) for each function of {name: function} in `repeats` rounds, after a warm-up round that does not
    count. Return {name: what run() returned in each round}.

    Each round calls every function once, in a new random order. In a fixed order, a function would always run after the
    same other function, whose leftovers in memory and caches could make it faster or slower."""
    found, shuffled = {name: [] for name in alternatives}, random.Random(0)    # one seed: all ranks draw the same order
    hidden = True if dist.is_initialized() and dist.get_rank() else None       # None: shown if stderr is a terminal
    with tqdm(total=(repeats + 1) * len(alternatives), disable=hidden, leave=False, dynamic_ncols=True,
              bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]") as bar:
        for round_ in range(1, repeats + 2):
            for name in shuffled.sample(list(alternatives), len(alternatives)):
                bar.set_description_str(f"round {round_} of {repeats + 1}: {name}")
                found[name].append(run(alternatives[name]))
                bar.update()
    return {name: results[1:] for name, results in found.items()}


def compare(alternatives: dict, repeats: int, device=torch.device("cpu")) -> dict[str, "Times"]:
    """Time each function of {name: function}; see in_turn(). Every rank must call it."""
    times = in_turn(alternatives, repeats, partial(timed, device))
    return {name: Times(tuple(seconds)) for name, seconds in times.items()}


def timed(device, function) -> float:
    """Call the function on all ranks at once. Return the seconds that it takes on the slowest rank."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    function()
    synchronize()
    return max(gathered(time.perf_counter() - start))


# ---- figures and noise

# A figure is too noisy to tell if one of these, relative to its `size`, is exceeded:
NOISY = 0.5                  # the interquartile range of its rounds; with up to three rounds their whole range
BEYOND = 0.05                # how far its median is outside of the possible range
TOO_NOISY = "too noisy to tell"
WHAT_IS_TOO_NOISY = ("the interquartile range of the rounds (with up to three rounds, their whole range) is more than "
                     f"{NOISY:.0%} of a ratio or {100 * NOISY:.0f} percentage points of a share, or their median is "
                     "impossible, such as a share above 100%; try a larger model, more --repeats or a quieter machine")


@dataclass(frozen=True)
class Figure:
    """Holds a ratio or a share that was measured in several rounds. least, most: the smallest and the largest possible
    value. size: what noise is compared with; by default the median. A share can be close to 0, so shares use 1."""
    rounds: tuple[float, ...]
    least: float = 0.0
    most: float = math.inf
    size: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def value(self) -> float | None:
        """The median of the rounds, or None if it is too noisy to tell."""
        median, size, span = self.median, self.size or self.median, max(self.rounds) - min(self.rounds)
        if len(self.rounds) > 3:                               # three rounds or fewer have no useful quartiles
            lower, _, upper = statistics.quantiles(self.rounds, n=4)
            span = upper - lower
        possible = self.least - BEYOND * size <= median <= self.most + BEYOND * size
        return median if possible and span <= NOISY * size else None

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.rounds), max(self.rounds)

    def __format__(self, form: str) -> str:
        """Return for example '0.98 [0.93 .. 1.02]': the value or "too noisy to tell", then the smallest and the largest
        round. form: the format of each number, by default '.2f'."""
        (least, most), form = self.spread, form or ".2f"
        value = TOO_NOISY if self.value is None else format(self.value, form)
        return f"{value} [{least:{form}} .. {most:{form}}]"

    def record(self, name: str) -> dict:
        """Return the entries of the JSON line for a figure called `name`."""
        return {name: self.value, f"{name}_spread": self.spread}


class Times(Figure):
    """Holds the measured seconds of one alternative: one value per round, in the order of the rounds."""

    def __format__(self, form: str) -> str:
        return f"{seconds_text(self.median)} [{' .. '.join(map(seconds_text, self.spread))}]"

    def record(self, name: str) -> dict:
        return {f"{name}_s": self.median}


def ratios(numerator: Times, denominator: Times, **possible) -> Figure:
    """Divide two alternatives' times round by round, since the load of the machine was similar within a round.
    possible: the Figure's `least`, `most` or `size`."""
    return Figure(tuple(above / below for above, below in zip(numerator.rounds, denominator.rounds)), **possible)


def entries(record: dict) -> dict:
    """Return the record with plain numbers: NAME and NAME_spread for a Figure, NAME_s for Times."""
    return {key: entry for name, value in record.items()
            for key, entry in (value.record(name) if isinstance(value, Figure) else {name: value}).items()}


# ---- printing

def table(head: list[str], rows: list[list]) -> str:
    """Return a text table: the first column is left-aligned, the others are right-aligned."""
    columns = [[*map(format, column)] for column in zip(head, *rows)]
    widths = [max(map(len, column)) for column in columns]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
             for row in zip(*columns)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def seconds_text(seconds: float) -> str:
    """Format 0.0123 as '12.3 ms' and 1.5 as '1.500 s'."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def bytes_text(count: float) -> str:
    """Format 12345678 as '12.3 MB' (1 MB is 10^6 bytes)."""
    power = min(int(math.log10(max(count, 1)) // 3), 4)
    return f"{count / 1000 ** power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
