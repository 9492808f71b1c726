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

import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from benchmarks.runner import (Times, about, add_config_flags, bytes_text, config_here, gathered, in_turn, join, ratios,
                               table, timed)
from benchmarks.slow_network import exit_on_signals
from nanodomino.checkpoint.format import verify
from nanodomino.checkpoint.load import checkpoints_of, restore
from nanodomino.checkpoint.save import Saver
from nanodomino.comm.world import from_rank_0
from nanodomino.errors import require
from nanodomino.estimate.formulas import parameter_count
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer


def add_flags(parser):
    parser.add_argument("--processes", type=int, default=2, metavar="N",
                        help="processes in total; --processes divided by --dp is the tensor-parallel size (default 2)")
    add_config_flags(parser, ("num_layers", "hidden_size", "num_attention_heads", "data_parallel_size", "zero_stage"),
                     num_layers=8, hidden_size=512, num_attention_heads=8, data_parallel_size=1)


def processes(flags) -> int:
    require(flags.processes >= 1, f"--processes must be at least 1, but is {flags.processes}; try 2")
    tp = flags.processes // max(flags.data_parallel_size, 1)
    flags.config = config_here(flags, flags.processes, tensor_model_parallel_size=max(tp, 1),
                               pipeline_model_parallel_size=1, vocab_size=257)
    return flags.processes


def answer(flags, launch):
    config, mesh = join(flags.config, launch)
    model = GPT(config, mesh)
    optimizer = ZeroOptimizer(model, config, mesh)
    for bucket in optimizer.buckets:                          # an update creates the moments, which are saved too
        bucket.own_grad.normal_()
    optimizer.update(0.0, 1.0, 1.0)
    optimizer.updates = 1

    # a signal leaves no folder behind
    with exit_on_signals(), tempfile.TemporaryDirectory() if launch.rank == 0 else nullcontext() as folder:
        folder = Path(from_rank_0(folder))
        saver, steps = Saver(folder, mesh, keep_last=1), iter(range(1, flags.repeats + 2))

        def save_and_resume(_):
            """Return the slowest rank's seconds: until a save was complete, until training went on, of a resume."""
            stall = timed(mesh.device, partial(saver.save, next(steps), model, optimizer, config))
            rest = timed(mesh.device, saver.wait)
            require(not (failure := saver.failure()), failure)
            newest = checkpoints_of(folder)[0]
            resume = timed(mesh.device, lambda: (verify(newest), restore(newest, model, optimizer, mesh)))
            return stall + rest, stall, resume

        rounds = in_turn({"save and resume": None}, flags.repeats, save_and_resume)["save and resume"]
        size = sum(file.stat().st_size for file in checkpoints_of(folder)[0].iterdir())
        copied = max(gathered(sum(values.nbytes for values in saver.copies.values())))        # waits for all ranks
    times = {name: Times(seconds) for name, seconds in zip(("synchronous", "stall", "resume"), zip(*rounds))}
    share = ratios(times["stall"], times["synchronous"], most=1.0)
    text = "\n".join([
        f"{parameter_count(config):,} parameters on dp {config.dp} x tp {config.tp}, ZeRO stage {config.zero_stage}; "
        f"checkpoint of {bytes_text(size)} in {folder.parent}; the busiest rank copies {bytes_text(copied)}",
        table(["", "median [min .. max]"], [*map(list, times.items())]), f"stall / synchronous: {share:.1%}"])
    return text, dict(parameters=parameter_count(config), **about(config), bytes=size, copied_bytes=copied,
                      stall_share=share, **times)
