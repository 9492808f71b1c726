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
real run has. So all ranks stay until the last one is done. If a rank fails, closed sockets are the quickest way to wake
the others out of their collectives, so then all ranks are released at once. If a rank is not back GRACE seconds later,
the pool kills its workers, and starts new ones at the next call.

- `function`, arguments and results are pickled, so `function` must stand at the top level of a module. Tensors arrive
  on the CPU, without an autograd graph.
- Each worker has one torch thread. Random seeds differ between ranks but not between runs, so code that relies on equal
  seeds without setting them fails.
- An `assert` in a worker is plain Python's and shows no values. Return the numbers and assert in the test.
"""

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
from support.fork_server import context_with_imports

START_TIMEOUT = 300.0  # seconds to start all workers on a busy machine
GRACE = 3.0  # seconds that the other ranks have to return after one has failed
LEAVE_TIMEOUT = 10.0  # seconds to leave a group


class WorkerError(RuntimeError):
    """A rank raised, its process died, or it did not return in time. The message shows the first failure in full."""


class Call(NamedTuple):
    """What to run, and in which world. `number` separates this call's keys in the store from other calls'."""
    packed: bytes            # (function, arguments)
    world_size: int
    timeout: float
    number: int


class Failure(NamedTuple):
    moment: float            # time.monotonic(), one clock for all processes of a machine
    text: str


RELEASE, FREE = "release", "free"


# ---- what is sent

class TensorPickler(pickle.Pickler):
    """Pickles a tensor as elements, dtype and shape, so that a view takes its own bytes only, not its storage's."""

    def reducer_override(self, value):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        elements = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return rebuild_tensor, (elements, value.dtype, value.shape, type(value) is torch.nn.Parameter)


def rebuild_tensor(elements, dtype, shape, is_parameter):
    flat = torch.frombuffer(bytearray(elements), dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return torch.nn.Parameter(tensor) if is_parameter else tensor


def pack(value):
    buffer = io.BytesIO()
    TensorPickler(buffer).dump(value)
    return buffer.getvalue()


# ---- in a worker

def worker_main(rank, connection, store_port, device):
    """Answer calls until the test session closes the pipe."""
    if device == "cuda" and rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
        torch.cuda.init()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session handles Ctrl-C and closes the pool
    # Without an interface gloo resolves the host's own name, which fails on some machines.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    gc.freeze()  # garbage collection skips what is imported by now
    try:
        while True:
            restore_defaults(rank)
            connection.send(FREE)
            answer(connection.recv(), rank, connection, store)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the session has ended


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


def answer(call, rank, connection, store):
    """Run a call in a fresh group, send its outcome, and leave the group when the session releases all ranks."""
    environment = dict(os.environ)
    faulthandler.dump_traceback_later(call.timeout + 1, file=sys.__stderr__)
    try:
        outcome = run_in_group(call, rank, store)
    except BaseException as error:  # SystemExit too: the worker must survive it
        frames = error.__traceback__.tb_next  # without this function's own frame
        outcome = Failure(time.monotonic(), "".join(traceback.format_exception(type(error), error, frames)))
        del error, frames
    faulthandler.cancel_dump_traceback_later()
    connection.send(outcome)
    assert connection.recv() == RELEASE
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # the group's sockets close with its last reference, which may be in a cycle
    gc.freeze()  # modules that the call imported too (the first optimizer step imports 800)
    os.environ.clear()
    os.environ.update(environment)


def run_in_group(call, rank, store):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(call.world_size), LOCAL_WORLD_SIZE=str(call.world_size))
    function, arguments = pickle.loads(call.packed)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_initialized() else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(f"call-{call.number}", store), rank=rank,
                            world_size=call.world_size, timeout=timedelta(seconds=call.timeout))
    return pack(function(*arguments))


# ---- in the session

class Pool:
    """`size` workers, started by the first `run`, and again by the first `run` after they had to be killed."""

    def __init__(self, size=8, device="cpu"):
        self.size, self.device = size, device
        self.calls = 0
        self.processes = []
        self.connections = []

    def run(self, function, *args, world_size=8, timeout=120):
        """Call function(*args) on ranks 0 to world_size - 1 of a fresh gloo group. Returns the results by rank.

        `timeout`: seconds for the call, not counting the start of the workers.
        Raises WorkerError if a rank raises, dies or is not back in time.
        """
        if self.device == "cuda" and world_size > torch.cuda.device_count():
            pytest.skip(f"{world_size} ranks need as many GPUs, and there are {torch.cuda.device_count()}")
        ranks, packed = range(world_size), pack((function, args))
        self.start()
        self.calls += 1
        call = Call(packed, world_size, timeout, self.calls)
        try:
            for rank in ranks:
                self.send(rank, call)
            outcomes = self.gather_outcomes(ranks, timeout + GRACE)
            if len(outcomes) < world_size or not self.wait_until_free(ranks, LEAVE_TIMEOUT):
                self.close()
        except BaseException:  # such as KeyboardInterrupt: the workers are in an unknown state
            self.close()
            raise
        raise_failures(f"{function.__module__}.{function.__qualname__}", world_size, outcomes)
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
            if not self.wait_until_free(range(self.size), START_TIMEOUT):
                raise RuntimeError("the pool's workers did not start: see their messages on standard error")
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

    def gather_outcomes(self, ranks, timeout):
        """Return outcomes by rank: all of them, or what arrived before the time-out or GRACE after a failure. Release
        all ranks after a failure, or when all are done."""
        outcomes, released, deadline = {}, False, time.monotonic() + timeout
        while len(outcomes) < len(ranks):
            arrived = self.receive([rank for rank in ranks if rank not in outcomes], deadline)
            if not arrived:
                break
            outcomes.update(arrived)
            failed = any(isinstance(outcome, Failure) for outcome in arrived.values())
            if not released and (failed or len(outcomes) == len(ranks)):
                for rank in ranks:
                    self.send(rank, RELEASE)
                released, deadline = True, min(deadline, time.monotonic() + GRACE)
        return outcomes

    def send(self, rank, message):
        try:
            self.connections[rank].send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a dead worker: `receive` reports it

    def receive(self, ranks, deadline):
        """Return the messages that arrived from `ranks`, at least one; an empty dict if the deadline passes."""
        rank_of = {self.connections[rank]: rank for rank in ranks}
        messages = {}
        for connection in multiprocessing.connection.wait(rank_of, max(0.0, deadline - time.monotonic())):
            rank = rank_of[connection]
            try:
                messages[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(GRACE)
                exit_code = self.processes[rank].exitcode
                # The time of death is unknown, but failures that others report came after it.
                messages[rank] = Failure(-math.inf,
                                         f"the process died, exit code {exit_code} (minus a number: by that signal)\n")
        return messages

    def wait_until_free(self, ranks, timeout):
        """Wait for FREE from every rank. Returns False if a rank has died or the time is over."""
        deadline, busy = time.monotonic() + timeout, set(ranks)
        while busy:
            messages = self.receive(busy, deadline)
            if not messages or any(message != FREE for message in messages.values()):
                return False
            busy -= messages.keys()
        return True


def raise_failures(name, world_size, outcomes):
    """Raise what went wrong in a call, the first failure in full and on top. Return if nothing did."""
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    first, *later = sorted(failures, key=lambda rank: failures[rank].moment) or [None]
    lines = [f"rank {first} of {world_size} failed in {name}\n\n{failures[first].text}"] if failures else []
    lines += [f"rank {rank} failed after it: {failures[rank].text.splitlines()[-1]}" for rank in later]
    lines += [f"rank {rank} of {world_size} had not finished {name} and was killed"
              for rank in range(world_size) if rank not in outcomes]
    if lines:
        raise WorkerError("\n".join(lines))
