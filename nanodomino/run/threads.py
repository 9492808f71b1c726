"""Chooses the number of threads on a CPU.

Threads that share a matmul wait for the slowest of them. On two idle cores a step of nano takes 190 ms with two threads
and 320 with one. If other programs use the cores, a step takes 17 to 25 s with two and 0.7 to 2 s with one.

The number also changes how sums are rounded. Therefore a run records it, and keeps it when it resumes.
"""

import os
import sys

import torch

BUSY = 0.75                           # load average per core


def choose_threads(device, record: dict | None = None, quiet=False) -> int | None:
    """Set and return torch's number of threads, or None on a GPU. OMP_NUM_THREADS decides if it is set, then `record`,
    the run's config.json. Otherwise busy cores get 1 thread, idle cores all. Says on stderr what was chosen and why."""
    most, reason = torch.get_num_threads(), "as before in this run"
    if device.type != "cpu" or most == 1 or os.environ.get("OMP_NUM_THREADS"):
        return most if device.type == "cpu" else None
    threads = min((record or {}).get("cpu_threads") or 0, most)
    if threads < 1:
        load, cores = os.getloadavg()[0], os.cpu_count()
        threads, reason = 1 if load > BUSY * cores else most, f"the load average is {load:.1f} on {cores} cores"
    torch.set_num_threads(threads)
    if not quiet:
        print(f"{threads} of {most} threads: {reason}; OMP_NUM_THREADS=N sets another number, which rounds sums "
              "differently", file=sys.stderr, flush=True)
    return threads
