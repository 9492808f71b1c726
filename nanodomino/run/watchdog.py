"""A thread that ends this process if its device waits forever.

gloo's collectives run on the host and raise if a peer is gone (rank_failure.py). NCCL's run on the device. The host
only enqueues them, and continues until it needs a number or the queue is full:

    host      enqueue enqueue enqueue   .tolist() .......................      no exception, no signal handler, no end
    device    [ work ][ all-reduce with a dead peer .....................

A dead GPU tells the other GPUs of its host nothing. If a connection to another host closes, NCCL notices, and torch's
own watchdog aborts the process without a message of ours. So a thread checks the device every POLL_INTERVAL seconds:

    NCCL reports an error              ends the process at once
    stop signal, then no progress      ends it after STOP_GRACE      torchrun signals the other ranks when one has died,
                                       seconds                       and kills them soon after
    no progress                        ends it after --timeout       a peer hangs, or its whole host is gone

(A second stop signal ends the process at once on any device: signals.py.) All of this happens before torch's watchdog
acts: it waits a minute after an error, and its timeout is a minute longer than ours (comm/world.py). It remains as the
last resort.

Progress means that the device has reached a recorded event. Training records an event after each forward and backward
of a microbatch, because a step can consist of many microbatches, all of them enqueued. A device whose queue is empty
waits only for its own host, once the pipeline stages are connected: a rank that is slow to read data makes its peers
wait, and must not blame them.
"""

import threading
import time
from collections import deque
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo
from nanodomino.mesh import Mesh
from nanodomino.run.rank_failure import report_and_exit

STOP_GRACE = 20.0        # seconds without progress after a stop signal; torchrun kills after 30
POLL_INTERVAL = 0.5      # seconds


@contextmanager
def end_unless_connected(launch: LaunchInfo, timeout: float):
    """End this process if the block does not finish: ranks may take `timeout` seconds to start, and as many to connect.

    The grace on top is for torch, which retries. Without this, gloo would wait five times as long for a connection.
    """
    timer = threading.Timer(2 * timeout + STOP_GRACE, report_and_exit, (launch, RuntimeError(
        f"timed out connecting to the other ranks after {timeout:.0f} seconds; is GLOO_SOCKET_IFNAME the interface "
        "between the hosts, and does a firewall let the ranks connect?")))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class NoStream:
    """Stands in for a CUDA stream, and for an event in it, if the device is the CPU: there is never work left."""

    def query(self) -> bool:
        return True

    def record_event(self):
        return NoStream()


class Watchdog:
    """A context manager that watches the device until its block ends or `finished` is set."""

    def __init__(self, launch: LaunchInfo, mesh: Mesh, timeout: float):
        self.launch, self.timeout = launch, timeout
        self.queue = torch.cuda.current_stream(mesh.device) if mesh.device.type == "cuda" else NoStream()
        groups = (dist.group.WORLD, mesh.tp_group, mesh.dp_group, mesh.pp_group, mesh.embedding_group)
        backends = [group._get_backend(mesh.device) for group in groups if group]
        self.nccl_backends = [backend for backend in backends if backend.name() == "nccl"]
        self.events, self.last_progress = deque(), time.monotonic()
        self.context = {}                                      # attributes for the error: step, signals
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="watchdog", daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.finished.set()

    def mark(self, *_):
        """Enqueue an event; reaching it is progress. Takes and ignores the arguments of pipeline.run's on_action."""
        self.events.append(self.queue.record_event())

    def watch(self):
        while not self.finished.wait(POLL_INTERVAL):
            if text := self.find_hang():
                error = RuntimeError(text)
                error.__dict__.update(self.context)
                report_and_exit(self.launch, error)

    def find_hang(self) -> str | None:
        """Return an error message if the device waits for a lost peer. Must be called repeatedly."""
        for backend in self.nccl_backends:
            if (state := backend.get_error().name) != "SUCCESS":
                return f"NCCL reports {state}: a connection was closed by peer, or a collective has failed"
        now, signals = time.monotonic(), self.context.get("signals")
        while self.events and self.events[0].query():
            self.events.popleft()
            self.last_progress = now
        if self.queue.query():
            self.last_progress = now
        idle, stopping = now - self.last_progress, 0.0
        if signals and signals.number:
            stopping = now - max(self.last_progress, signals.received_at)
        if idle > self.timeout or stopping > STOP_GRACE:
            return f"timed out waiting for the device, which has made no progress for {idle:.0f} seconds"
        return None
