"""Ends this process if its device waits forever for another rank. A thread watches the device.

gloo's collectives run on the host and raise if a peer is gone (rank_failure.py). NCCL's run on the device. The host
only enqueues them, and continues until it needs a result or the queue is full:

    host      enqueue enqueue enqueue   .tolist() .......................      no exception, no signal handler, no end
    device    [ work ][ all-reduce with a dead peer .....................

If a GPU dies, NCCL does not notice it on the other GPUs of the same host. So our thread checks the device every
POLL_INTERVAL seconds:

    stop signal, then no progress      ends it after STOP_GRACE      torchrun signals the other ranks when one has died,
                                       seconds                       and kills them soon after
    no progress                        ends it after --timeout       a peer hangs, or its whole host is gone

(A second stop signal ends the process at once on any device: signals.py.) torch's watchdog acts later and remains the
last resort: it waits a minute after an error, and its timeout is a minute longer than ours (comm/world.py).

Progress means that the device has reached a recorded event. Training records an event after each forward and each
backward of a microbatch, because a whole step of many microbatches can be in the queue. An empty queue counts as
progress too: once the pipeline stages are connected, a device with an empty queue waits only for its own host. So a
rank that is slow to read data does not blame its peers.
"""

import threading
import time
from collections import deque

import torch

from nanodomino.comm.world import LaunchInfo
from nanodomino.mesh import Mesh
from nanodomino.run.failures import report_and_exit

STOP_GRACE = 20.0        # seconds without progress after a stop signal; torchrun kills after 30
POLL_INTERVAL = 0.5      # seconds


class Watchdog:
    """A context manager that watches a GPU until its block ends or `finished` is set. A CPU has no queue of work, so
    there is nothing to watch."""

    def __init__(self, launch: LaunchInfo, mesh: Mesh, timeout: float):
        self.launch, self.device, self.timeout = launch, mesh.device, timeout
        self.queue = torch.cuda.current_stream(mesh.device) if mesh.device.type == "cuda" else None
        self.events, self.last_progress = deque(), time.monotonic()
        self.context = {}                                      # step, signals and hosts, which rank_failure.py reports
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self.queue is not None:
            self.thread.start()
        return self

    def __exit__(self, *error):
        self.finished.set()

    def mark(self, *_):
        """Enqueue an event, whose completion counts as progress. Ignores the arguments that on_action passes."""
        if self.queue is not None:
            self.events.append(self.queue.record_event())

    def watch(self):
        torch.cuda.set_device(self.device)           # a thread starts on GPU 0, where a query would allocate memory
        while not self.finished.wait(POLL_INTERVAL):
            if text := self.find_hang():
                error = RuntimeError(text)
                error.__dict__.update(self.context)
                report_and_exit(self.launch, error)

    def find_hang(self) -> str | None:
        """Return an error message if the device seems to wait for a lost peer, else None. Call this again and again."""
        now, signals = time.monotonic(), self.context.get("signals")
        while self.events and self.events[0].query():
            self.events.popleft()
            self.last_progress = now
        if self.queue.query():
            self.last_progress = now
        idle = now - self.last_progress
        stopping = now - max(self.last_progress, signals.received_at) if signals and signals.number else 0.0
        if idle > self.timeout or stopping > STOP_GRACE:
            return f"timed out waiting for the device, which has made no progress for {idle:.0f} seconds"
        return None
