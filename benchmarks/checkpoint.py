"""What does a checkpoint cost, and how long does resuming take?

    synchronous   the whole save: copy, write, flush, checksum, read back, rename
    stall         the part of the save that training waits for: the copy to host memory. The rest overlaps the next
                  steps
    resume        verifying every byte of the checkpoint, then loading model and optimizer

Replicas hold the same values, so they share the work: with --dp N each rank copies and writes about 1/N of the values.
The benchmark also prints the bytes that the busiest rank copies. It writes into the system's folder for temporary
files; to measure another disk, set TMPDIR to a folder on it.

    python bench.py checkpoint --processes 2 --dp 2
"""

import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.runner import (Times, about, add_config_flags, bytes_text, config_here, gathered, join, progress,
                               ratios, slowest, synchronize_ranks, table)
from nanodomino.checkpoint.format import verify
from nanodomino.checkpoint.load import checkpoints_of, restore
from nanodomino.checkpoint.save import Saver
from nanodomino.comm.world import from_rank_0
from nanodomino.errors import UserError, require
from nanodomino.estimate.formulas import parameter_count
from nanodomino.model import GPT
from nanodomino.settings.config import Config
from nanodomino.zero import ZeroOptimizer


def add_flags(parser):
    parser.add_argument("--processes", type=int, default=2, metavar="N",
                        help="processes in total; --processes divided by --dp is the tensor-parallel size (default 2)")
    add_config_flags(parser, ("num_layers", "hidden_size", "num_attention_heads", "data_parallel_size", "zero_stage"),
                     num_layers=8, hidden_size=512, num_attention_heads=8, data_parallel_size=1)


def processes(flags) -> int:
    require(flags.processes >= 1, f"--processes must be at least 1, but is {flags.processes}; try 2")
    settle(flags)
    return flags.processes


def settle(flags) -> Config:
    """Return the Config, with tp = processes / dp. Raises UserError if that layout is impossible."""
    dp = flags.data_parallel_size
    return config_here(flags, flags.processes, tensor_model_parallel_size=max(flags.processes // max(dp, 1), 1),
                     pipeline_model_parallel_size=1, vocab_size=257)


def answer(flags, launch):
    config, mesh = join(settle(flags), launch)
    model = GPT(config, mesh)
    optimizer = ZeroOptimizer(model, config, mesh)
    for bucket in optimizer.buckets:                          # an update creates the moments, which are saved too
        bucket.own_grad.normal_()
    optimizer.update(0.0, 1.0, 1.0)
    optimizer.updates = 1

    folder = Path(from_rank_0(tempfile.mkdtemp() if launch.rank == 0 else None))
    try:
        saver = Saver(folder, mesh, keep_last=1)
        measured, size, largest = measure(saver, model, optimizer, flags.repeats + 1)
    finally:
        synchronize_ranks(mesh.device)
        if launch.rank == 0:
            shutil.rmtree(folder)
    times = {name: Times(tuple(seconds[1:])) for name, seconds in measured.items()}
    share = ratios(times["stall"], times["synchronous"], most=1.0)
    copied = max(gathered(sum(values.nbytes for values in saver.copies.values())))
    text = (f"{parameter_count(config):,} parameters on dp {config.dp} x tp {config.tp}, ZeRO stage "
            f"{config.zero_stage}; checkpoint of {bytes_text(size)} in {folder.parent}; the busiest rank copies "
            f"{bytes_text(copied)}, the largest file has {bytes_text(largest)}\n"
            + table(["", "median [min .. max]"], [*map(list, times.items())])
            + f"\nstall / synchronous: {share:.1%}")
    return text, dict(parameters=parameter_count(config), **about(config), bytes=size, copied_bytes=copied,
                      largest_file_bytes=largest, **{f"{name}_s": time.median for name, time in times.items()},
                      **share.record("stall_share"))


def measure(saver: Saver, model: GPT, optimizer: ZeroOptimizer, rounds: int) -> tuple[dict[str, list[float]], int, int]:
    """Save and resume in each round. Return (seconds, bytes of a checkpoint, bytes of its largest file).

    seconds: under "synchronous", "stall" and "resume", the slowest rank's time in each round. Raises UserError if a
    checkpoint can't be written.
    """
    device, measured = saver.mesh.device, {"synchronous": [], "stall": [], "resume": []}
    with progress(rounds) as bar:
        for step in range(1, rounds + 1):
            bar.set_description_str(f"round {step} of {rounds}: save")
            synchronize_ranks(device)
            start = time.perf_counter()
            saver.save(step, model, optimizer, model.config)
            measured["stall"].append(slowest(time.perf_counter() - start))
            saver.wait()
            if failure := saver.failure():
                raise UserError(failure)
            measured["synchronous"].append(slowest(time.perf_counter() - start))
            bar.set_description_str(f"round {step} of {rounds}: resume")
            start = time.perf_counter()
            newest = checkpoints_of(saver.run_dir)[0]
            sizes = [(newest / name).stat().st_size for name in verify(newest)["files"]]
            restore(newest, model, optimizer, saver.mesh)
            measured["resume"].append(slowest(time.perf_counter() - start))
            bar.update()
    return measured, sum(sizes), max(sizes)
