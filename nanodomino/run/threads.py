"""Chooses the number of threads on a CPU, by timing one of the model's own matmuls.

Threads that share a matmul wait for the slowest of them. On two idle cores a step of nano takes 190 ms with two threads
and 320 with one. If other programs use the cores, a step takes 17 to 25 s with two and 0.7 to 2 s with one.

The number also changes how sums are rounded. So a run records it, and keeps it when it resumes on the same layout.
"""

import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SECONDS, LARGEST = 0.3, 2**26         # seconds of all timings; multiplications of a timed matmul, 2 ms on one core


def choose_threads(config, device, record: dict | None = None, quiet=False) -> int | None:
    """Set and return torch's number of threads, or None on a GPU. OMP_NUM_THREADS decides if it is set, then `record`,
    the run's config.json. Otherwise it is 1 or all, whichever is faster. Says on stderr what was chosen and why."""
    most, reason = torch.get_num_threads(), "as before in this run"
    if device.type != "cpu" or most == 1 or os.environ.get("OMP_NUM_THREADS"):
        return most if device.type == "cpu" else None
    if record and record.get("world_size") == config.world_size and (record.get("cpu_threads") or 0) > 0:
        threads = min(record["cpu_threads"], most)
    else:
        one, all_ = time_matmuls(config, (1, most))
        threads = 1 if one <= all_ else most
        reason = f"four matmuls of a layer take {1000 * one:.2g} ms with 1 and {1000 * all_:.2g} ms with {most}"
    torch.set_num_threads(threads)
    if not quiet:
        print(f"{threads} of {most} threads: {reason}; OMP_NUM_THREADS=N sets another number, which rounds sums "
              "differently", file=sys.stderr, flush=True)
    return threads


def time_matmuls(config, numbers: tuple[int, ...]) -> list[float]:
    """Return the mean seconds of four matmuls of a microbatch, in turn for each number of threads. The first timing of
    each number starts the threads and does not count. A median would leave out the long waits for a busy core."""
    times, end = {threads: [] for threads in numbers}, time.perf_counter() + SECONDS
    weight = torch.ones(config.ffn_hidden_size // config.tp, config.hidden_size, dtype=config.params_dtype)
    rows = min(config.micro_batch_size * config.seq_length, max(LARGEST // weight.numel(), 1))
    x = torch.ones(rows, config.hidden_size, dtype=config.params_dtype)
    while len(times[1]) < 2 or time.perf_counter() < end:
        for threads in numbers:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            for _ in range(4):
                F.linear(x, weight)
            times[threads].append(time.perf_counter() - start)
    return [statistics.fmean(each[1:]) for each in times.values()]
