"""Eight processes that live as long as the test session. They form a world of any size up to eight in milliseconds.

Starting a process, importing torch and joining a group takes seconds; a test of a small model takes milliseconds. So
the processes start once, at the first test that needs them, and each call gives some of them a *fresh* process group:

    the test                              worker 0 ... worker world_size - 1
    pool.run(function, x, world_size=4)
        -- call: names, arguments --->    set RANK ..., join a new gloo group
                                          result = function(x)
        <-- outcome ------------------    the result, or a traceback and its time
        -- release ------------------>    leave the group, reset what a test may have changed
        <-- free ---------------------    ready for the next call
    [result of rank 0, of rank 1, ...]

A rank that leaves its group closes its sockets, and a neighbour that still reads from them would see an error that no
real run has. So all ranks stay until the last one is done. If a rank fails or is late, the pool kills all workers, and
starts new ones at the next call.

- `function`, arguments and results are pickled, so `function` must stand at the top level of a module. Tensors arrive
  on the CPU, without an autograd graph.
- Each worker has one torch thread. Random seeds differ between ranks but not between runs, so code that relies on equal
  seeds without setting them fails.
- An `assert` in a worker is plain Python's and shows no values. Return the numbers and assert in the test.
"""

import contextlib
import faulthandler
import gc
import io
import math
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.fork_server import LOOPBACK, context_with_imports

START_TIMEOUT = 300.0  # seconds to start all workers on a busy machine
GRACE = 10.0  # seconds after the time-out of a call, in which gloo reports its own on a busy machine
LEAVE_TIMEOUT = 10.0  # seconds to leave a group
RELEASE, FREE = "release", "free"


class WorkerError(RuntimeError):
    """A rank raised, its process died, or it did not return in time. The message shows the first failure in full."""


class Failure(NamedTuple):
    moment: float            # time.monotonic(), one clock for all processes of a machine
    text: str


class TensorPickler(pickle.Pickler):
    """Pickles a tensor as its elements, so that a view takes its own bytes only. torch.save takes far longer."""

    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        elements = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return rebuild_tensor, (elements.numpy(), value.dtype, value.shape)


def rebuild_tensor(elements, dtype, shape):
    return torch.from_numpy(elements).view(dtype).view(shape)


def pack(value) -> bytes:
    TensorPickler(buffer := io.BytesIO()).dump(value)
    return buffer.getvalue()


# ---- in a worker

def worker_main(rank, connection, store_port, device):
    """Answer calls until the test session closes the pipe."""
    if device == "cuda" and rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
        torch.cuda.init()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session handles Ctrl-C and closes the pool
    os.environ.setdefault(*LOOPBACK)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    gc.freeze()  # garbage collection skips what is imported by now
    try:
        while True:
            restore_defaults(rank)
            connection.send(FREE)
            answer(*connection.recv(), rank, connection, store)
    except (EOFError, ConnectionError):
        pass  # the session has ended, or has given the call up


def restore_defaults(rank):
    """Reset the process-wide state that a test may have changed."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports torch's compiler, so ask first
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.manual_seed(1000 + rank)


def answer(packed, world_size, timeout, number, rank, connection, store):
    """Run a call in a fresh group, send its outcome, and leave the group when the session releases all ranks. The
    number separates this call's keys in the store from other calls'."""
    environment, names = dict(os.environ), ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, world_size, world_size))))
    faulthandler.dump_traceback_later(timeout + 1, file=sys.__stderr__)
    try:
        function, arguments = pickle.loads(packed)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_initialized() else "gloo"
        dist.init_process_group(backend, store=dist.PrefixStore(f"call-{number}", store), rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=timeout))
        outcome = pack(function(*arguments))
    except BaseException as error:  # SystemExit too
        frames = error.__traceback__.tb_next  # without this function's own frame
        outcome = Failure(time.monotonic(), "".join(traceback.format_exception(type(error), error, frames)))
    faulthandler.cancel_dump_traceback_later()
    connection.send(outcome)
    assert connection.recv() == RELEASE
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # the group's sockets close with its last reference, which may be in a cycle
    gc.freeze()  # modules that the call imported too (the first optimizer step imports 800)
    os.environ.clear()
    os.environ.update(environment)


# ---- in the session

class Pool:
    """`size` workers, started by the first `run`, and again by the first `run` after they had to be killed."""

    def __init__(self, size=8, device="cpu"):
        self.size, self.device = size, device
        self.calls = 0
        self.processes = []
        self.connections = []

    def run(self, function, *args, world_size=8, timeout=300):
        """Call function(*args) on ranks 0 to world_size - 1 of a fresh gloo group. Returns the results by rank.

        `timeout`: seconds for the call, not counting the start of the workers.
        Raises WorkerError if a rank raises, dies or is not back in time.
        """
        if self.device == "cuda" and world_size > torch.cuda.device_count():
            pytest.skip(f"{world_size} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
        ranks, packed = range(world_size), pack((function, args))
        self.start()
        self.calls += 1
        try:
            outcomes = self.exchange(ranks, (packed, world_size, timeout, self.calls), timeout + GRACE)
            raise_failures(function, world_size, outcomes)
            if self.exchange(ranks, RELEASE, LEAVE_TIMEOUT) != dict.fromkeys(ranks, FREE):
                self.close()
        except BaseException:  # KeyboardInterrupt too: the workers are in an unknown state
            self.close()
            raise
        return [pickle.loads(outcomes[rank]) for rank in ranks]

    def start(self):
        """Start all workers unless they run already. They inherit sys.path, so they find the tests' modules."""
        if self.processes:
            return
        context = context_with_imports()        # forks take a tenth of the time of eight imports
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=worker_main, daemon=True,
                                          args=(rank, theirs, self.store.port, self.device))
                process.start()
                theirs.close()  # so that a worker's death closes the pipe
                self.processes.append(process)
                self.connections.append(ours)
            raise_failures(worker_main, self.size, self.receive(range(self.size), START_TIMEOUT))
        except BaseException:
            self.close()
            raise

    def close(self):
        """Kill the workers, busy or not. The next `run` starts new ones."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.connections, self.store = [], [], None

    def exchange(self, ranks, message, timeout):
        """Send a message to these ranks and return their answers, as receive() does."""
        for rank in ranks:
            with contextlib.suppress(ConnectionError):  # a dead worker: `receive` reports it
                self.connections[rank].send(message)
        return self.receive(ranks, timeout)

    def receive(self, ranks, timeout):
        """Return the message of each rank, or those that arrived until a rank failed or the time was over."""
        messages, deadline = {}, time.monotonic() + timeout
        while len(messages) < len(ranks) and not any(isinstance(message, Failure) for message in messages.values()):
            rank_of = {self.connections[rank]: rank for rank in ranks if rank not in messages}
            arrived = multiprocessing.connection.wait(rank_of, max(0.0, deadline - time.monotonic()))
            if not arrived:
                break
            for connection in arrived:
                rank = rank_of[connection]
                try:
                    messages[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE)
                    # The time of death is unknown, but failures that others report came after it.
                    messages[rank] = Failure(-math.inf, f"the process died, exit code {self.processes[rank].exitcode} "
                                             "(minus a number: by that signal)\n")
        return messages


def raise_failures(function, world_size, outcomes):
    """Raise the first failure of a call, or name the ranks that did not return. Return if there are none."""
    function = getattr(function, "func", function)       # of a functools.partial
    name = f"{function.__module__}.{function.__qualname__}"
    failures = [(outcome.moment, rank, outcome.text) for rank, outcome in outcomes.items()
                if isinstance(outcome, Failure)]
    if failures:
        _, rank, text = min(failures)
        raise WorkerError(f"rank {rank} of {world_size} failed in {name}\n\n{text}")
    if late := sorted({*range(world_size)} - outcomes.keys()):
        raise WorkerError("\n".join(f"rank {rank} of {world_size} had not finished {name} and was killed"
                                    for rank in late))
