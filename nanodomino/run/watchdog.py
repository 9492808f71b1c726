"""A device that waits for ever, and the thread that ends its process.

That nobody waits for ever (launch.py) gloo sees to by itself: its collectives are the host's work, and raise. NCCL's
are the device's. The host only puts them into its queue, and goes on until it needs a number or the queue is full:

    host      put put put put   .tolist() ...............................      no error, no signal handler, no end
    device    [ work ][ all-reduce, whose neighbour is dead .............

A dead GPU says nothing to another of its host; where a connection to another host was closed, NCCL notices, and torch's
own watchdog then aborts the process without a word of ours. So a thread looks at the device from outside:

    NCCL reports an error           ends at once
    told to stop, and no progress   ends in GRACE seconds     torchrun tells the others so when a rank has died; a
                                                              moment later it would kill them
    no progress                     ends in --timeout         somebody hangs, or a whole host is gone

(A second signal ends at once on any device: launch.StopSignal.) All come before torch's watchdog does: having found an
error it waits for a minute, and its time-out is a minute longer than ours (mesh.py). It stays as it is: it is the end
of whoever is not watched, and of us should we fail.

Progress is a mark that the device comes to. Training puts one into its queue after each forward and backward, since a
step may be of many microbatches, all of them in the queue. A device with an empty queue waits for its own host, and for
nobody else, once the first messages have been exchanged (pipeline.py): a rank that reads slowly is what the others wait
for, and must not call them silent.
"""

import threading
import time
from collections import deque
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanodomino.comm.world import LaunchInfo
from nanodomino.mesh import Mesh
from nanodomino.run.failure import report_and_exit

GRACE = 20.0             # seconds without progress, once told to stop; torchrun's patience is 30
LOOK = 0.5               # seconds between two looks


@contextmanager
def connection_timeout(launch: LaunchInfo, timeout: float):
    """While it lasts, this process ends if the others can't be reached: they may take `timeout` seconds to come, and as
    many to connect; torch, which tries again and again, some more. gloo would wait for a connection five times as long.
    """
    timer = threading.Timer(2 * timeout + GRACE, report_and_exit, (launch, RuntimeError(
        f"timed out connecting to the others, after {timeout:.0f} seconds; is GLOO_SOCKET_IFNAME the interface between "
        "the hosts, and does a firewall let them through?")))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class HostQueue:
    """What a CPU has been asked to do and has not done yet: nothing. Stands in for a GPU's stream, and for a mark in
    it."""

    def query(self) -> bool:
        return True

    def record_event(self):
        return HostQueue()


class Watchdog:
    """A context manager: while it lasts, this process ends if its device waits for ever."""

    def __init__(self, launch: LaunchInfo, mesh: Mesh, timeout: float):
        self.launch, self.timeout = launch, timeout
        self.queue = torch.cuda.current_stream(mesh.device) if mesh.device.type == "cuda" else HostQueue()
        groups = (dist.group.WORLD, mesh.tp_group, mesh.dp_group, mesh.pp_group, mesh.embedding_group)
        backends = [group._get_backend(mesh.device) for group in groups if group]
        self.backends = [backend for backend in backends if backend.name() == "nccl"]            # gloo's raise instead
        self.marks, self.moved = deque(), time.monotonic()
        self.about = {}                                        # for whoever reports the end: step, signals
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look, name="watch", daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()

    def mark(self, *_):
        """Progress is made when the device has come to here. As pipeline.run's on_action."""
        self.marks.append(self.queue.record_event())

    def look(self):
        while not self.over.wait(LOOK):
            if text := self.lost():
                error = RuntimeError(text)
                error.__dict__.update(self.about)
                report_and_exit(self.launch, error)

    def lost(self) -> str | None:
        """What tells that the neighbours are lost, if anything does. Called again and again."""
        for backend in self.backends:
            if (state := backend.get_error().name) != "SUCCESS":
                return f"NCCL reports {state}: a connection was closed by peer, or a collective has failed"
        now, signals = time.monotonic(), self.about.get("signals")
        while self.marks and self.marks[0].query():
            self.marks.popleft()
            self.moved = now
        if self.queue.query():
            self.moved = now
        told = now - max(self.moved, signals.received_at) if signals and signals.number else 0.0
        if now - self.moved > self.timeout or told > GRACE:
            return f"timed out waiting for the device, which has made no progress for {now - self.moved:.0f} seconds"
        return None
