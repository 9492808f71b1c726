"""Ranks as threads of one process, with a stand-in for torch.distributed that makes mistakes visible.

Only one thread runs at a time. It runs until it must wait for another rank; then the next rank that can continue takes
its turn. So every run is the same, and if no rank can continue, that is known at once: nothing hangs.

    collectives    The n-th call of a rank on a group meets the n-th call of each other rank. If they differ, an error
                   names the ranks and the calls.
    in flight      From its launch until wait(), the result of a collective or receive is filled with NaN. Code that
                   writes to it, or to a tensor being sent, gets an error.
    messages       A send ends only when its receive is posted, as with large messages. Between two ranks, messages are
                   carried out in the order in which they were posted, and those of one batch together, as with NCCL.
    the end        Each launch needs a wait(), and each call its partners; otherwise an error names the rank and call.
    the clock      With a wire, a virtual clock per rank advances by the FLOPs of each matmul. Each group has one wire,
                   which carries one collective at a time. wait() advances the clock to the end of that transfer.
"""

import ctypes
import math
import threading
import time
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace

import torch
import torch.distributed
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 2.0            # CPU seconds for one run. Checks need milliseconds; an endless loop needs all.


class RankError(Exception):
    """A mistake in the use of collectives or messages, which torch.distributed would answer with a hang or silence."""


class Deadlock(RankError):
    """No rank can continue: each waits for a call of another one, or has ended."""


class Endless(Exception):
    """The run took more than LIMIT seconds of CPU time."""


class Stopped(BaseException):
    """Ends the other ranks' threads after one rank has failed."""


class FlopClock(TorchDispatchMode):
    """Advances a rank's virtual clock by the FLOPs of each matmul."""

    def __init__(self, world, rank):
        super().__init__()
        self.world, self.rank = world, rank

    @classmethod
    def _should_skip_dynamo(cls):
        return False                       # otherwise torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            self.world.clock[self.rank] += 2 * result.numel() * args[-2].shape[-1]
        return result


class Message:
    """A posted send or receive. It is done when it has met its counterpart."""

    def __init__(self, kind, rank, peer, tensor):
        self.kind, self.rank, self.peer, self.tensor = kind, rank, peer, tensor
        self.copy, self.done = tensor.detach().clone(), False

    def __str__(self):
        return f"{'isend to' if self.kind == 'isend' else 'irecv from'} rank {self.peer}"

    def finish(self):
        if self.kind == "irecv":
            self.tensor.data.copy_(self.copy)
        elif not torch.equal(self.tensor.detach(), self.copy):
            raise RankError(f"rank {self.rank} changes a tensor while its {self} is in flight")


class Work:
    """What an asynchronous call returns."""

    def __init__(self, world, rank, call, finish, is_ready):
        self.world, self.rank, self.call, self.finish, self.is_ready = world, rank, call, finish, is_ready
        self.waited = False
        world.works[rank].append(self)

    def wait(self):
        if not self.waited:
            self.world.wait_until(self.is_ready, self.call)
            self.waited = True
            self.finish()
        return True


def on_ranks(size):
    """Decorate a program of one rank. The decorated one runs on `size` fake ranks and returns all results."""
    return lambda program: wraps(program)(lambda module: World(size).run(lambda: program(module)))


class World:
    """`World(size).run(function)` calls function() on each rank and returns the results.

    wire: virtual seconds per byte of a collective, where one FLOP takes one second. After the run, clock[rank] is the
    time at which a rank ended, and exposed[rank] is the part of it that the rank waited for the wire."""

    def __init__(self, size, wire=0.0):
        self.size, self.wire = size, wire
        self.turn, self.current, self.failure = threading.Condition(), 0, None
        self.waits = {}                                                # {rank: (can it continue?, its call)}
        self.ended, self.results = set(), [None] * size
        self.works, self.posted = [[] for _ in range(size)], [[] for _ in range(size)]   # posted: batches of messages
        self.collectives, self.counts, self.wire_free = {}, {}, {}     # wire_free: when each group's wire is free
        self.clock, self.exposed, self.carried = [0.0] * size, [0.0] * size, [0.0] * size

    # ---- threads that take turns

    def run(self, function):
        global_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        threads = [threading.Thread(target=self.run_rank, args=(rank, function), daemon=True)
                   for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            start = time.process_time()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
                    if time.process_time() - start > LIMIT:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads[self.current].ident),
                                                                   ctypes.py_object(Endless))
                        start = time.process_time()          # and again, if it caught the exception
        finally:
            torch.set_default_dtype(global_dtype)
        if self.failure is not None:
            raise self.failure
        return self.results

    def run_rank(self, rank, function):
        here.world, here.rank = self, rank
        try:
            with self.turn:
                while self.current != rank:
                    self.turn.wait()
            if self.failure is None:
                with FlopClock(self, rank) if self.wire else nullcontext():
                    self.results[rank] = function()
                for work in self.works[rank]:
                    if not work.waited:
                        raise RankError(f"rank {rank} never calls wait() on its {work.call}")
        except Stopped:
            pass
        except BaseException as error:                       # an answer may call exit(); Ctrl-C reaches another thread
            if self.failure is None:
                error.rank = rank
                self.failure = error
        with self.turn:
            self.ended.add(rank)
            self.pass_turn(rank)

    def pass_turn(self, rank):
        """Let the next rank run that can continue. Called with self.turn held."""
        alive = [other for other in (*range(rank + 1, self.size), *range(rank + 1)) if other not in self.ended]
        able = [other for other in alive if other not in self.waits or self.failure or self.waits[other][0]()]
        if alive and not able:
            self.failure = Deadlock("; ".join(
                [f"rank {waiting} waits for its {call}" for waiting, (_, call) in sorted(self.waits.items())]
                + [f"rank {other} has ended" for other in sorted(self.ended)]) + ", so none of them ever continues")
            self.failure.rank = min(self.waits)
            able = alive
        if able:
            self.current = able[0]
            self.turn.notify_all()

    def wait_until(self, is_ready, call):
        rank = here.rank
        with self.turn:
            if not is_ready():
                self.waits[rank] = is_ready, call
                self.pass_turn(rank)
                while self.current != rank:
                    self.turn.wait()
                del self.waits[rank]
                if isinstance(self.failure, Deadlock) and self.failure.rank == rank:
                    raise self.failure                    # here, so that the traceback shows who waits
            if self.failure is not None:
                raise Stopped

    # ---- collectives

    def launch(self, name, group, signature, inputs, outputs, compute, async_op):
        """Launch a collective. compute({rank: inputs}) returns what is written to this rank's outputs."""
        group, rank = group or tuple(range(self.size)), here.rank
        if rank not in group:
            raise RankError(f"rank {rank} calls {name} on the group of ranks {group}, to which it does not belong")
        number = self.counts[rank, group] = self.counts.get((rank, group), 0) + 1
        slot = self.collectives.setdefault((group, number), SimpleNamespace(calls={}, launched=0.0, end=0.0))
        for other, (its_name, its_signature, _) in slot.calls.items():
            if (its_name, its_signature) != (name, signature):
                raise RankError(f"call {number} on the group of ranks {group}: rank {other} calls {its_name} of "
                                f"{its_signature}, but rank {rank} calls {name} of {signature}")
        slot.calls[rank] = name, signature, [tensor.detach().clone() for tensor in inputs]
        slot.launched = max(slot.launched, self.clock[rank])
        seconds = self.wire * sum(tensor.nbytes for tensor in inputs) * (len(group) > 1)
        if len(slot.calls) == len(group):
            slot.end = self.wire_free[group] = max(slot.launched, self.wire_free.get(group, 0.0)) + seconds
        for tensor in outputs:
            blur(tensor)

        def finish():
            for tensor in outputs:
                blurred = tensor.data.isnan() if tensor.is_floating_point() else tensor.data == -12345
                if not blurred.all():
                    raise RankError(f"rank {rank} writes to a tensor while its {name} is in flight")
            for tensor, value in zip(outputs, compute({r: call[2] for r, call in slot.calls.items()})):
                tensor.data.copy_(value)
            wait = max(0.0, slot.end - self.clock[rank])
            self.clock[rank] += wait
            self.exposed[rank] += wait
            self.carried[rank] += seconds

        call = f"{name} (call {number} on the group of ranks {group})"
        work = Work(self, rank, call, finish, lambda: len(slot.calls) == len(group))
        return work if async_op else work.wait() and None

    # ---- messages

    def post(self, messages):
        """Post a batch of messages; return a Work for each."""
        for message in messages:
            if not 0 <= message.peer < self.size or message.peer == here.rank:
                raise RankError(f"rank {here.rank} posts an {message}, which is no other rank")
            if message.kind == "irecv":
                blur(message.tensor)
        self.posted[here.rank].append(messages)
        while any(self.match(a, b) for a in range(self.size) for b in range(self.size)):
            pass
        return [Work(self, here.rank, str(message), message.finish, lambda m=message: m.done) for message in messages]

    def active(self, rank, peer):
        """Return the messages that a rank has not finished with its peer, from the oldest batch that has any."""
        for batch in self.posted[rank]:
            pending = [message for message in batch if message.peer == peer and not message.done]
            if pending:
                return pending
        return []

    def match(self, a, b):
        """Match the first pending send from a to b with b's first pending receive; return False if one is missing."""
        send, receive = (next((message for message in self.active(*ranks) if message.kind == kind), None)
                         for kind, *ranks in (("isend", a, b), ("irecv", b, a)))
        if not (send and receive):
            return False
        if send.tensor.shape != receive.tensor.shape or send.tensor.dtype != receive.tensor.dtype:
            raise RankError(f"rank {a} sends a tensor of {describe(send.tensor)} to rank {b}, which "
                            f"receives into a tensor of {describe(receive.tensor)}")
        send.done = receive.done = True
        receive.copy = send.copy
        return True


def blur(tensor):
    tensor.data.fill_(math.nan if tensor.is_floating_point() else -12345)


def describe(*tensors):
    return ", ".join(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)


REDUCTIONS = {ReduceOp.SUM: torch.sum, ReduceOp.MAX: torch.amax, ReduceOp.MIN: torch.amin,
              ReduceOp.PRODUCT: torch.prod, ReduceOp.AVG: torch.mean}
here = threading.local()                            # here.world and here.rank: of the thread that asks


def reduced(op, tensors):
    return REDUCTIONS[op](torch.stack(list(tensors)), 0)


class FakeDistributed:
    """Stands in for torch.distributed within World.run."""

    ReduceOp = ReduceOp
    group = SimpleNamespace(WORLD=None)

    def __getattr__(self, name):
        raise AttributeError(f"the exercises' stand-in for torch.distributed has no {name}")

    def get_rank(self, group=None):
        return group.index(here.rank) if group else here.rank

    def get_world_size(self, group=None):
        return len(group) if group else here.world.size

    def new_group(self, ranks=None, **options):
        return tuple(range(here.world.size) if ranks is None else ranks)

    def all_reduce(self, tensor, op=ReduceOp.SUM, group=None, async_op=False):
        return here.world.launch(
            "all_reduce", group, f"{describe(tensor)}, {str(op).split('.')[-1]}", [tensor], [tensor],
            lambda calls: [reduced(op, (inputs[0] for inputs in calls.values()))], async_op)

    def reduce_scatter(self, output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
        self.need_one_each("reduce_scatter", input_list, output, group)
        return here.world.launch(
            "reduce_scatter", group, f"{describe(output)}, {str(op).split('.')[-1]}", input_list, [output],
            lambda calls: [reduced(op, (inputs[self.get_rank(group)] for inputs in calls.values()))], async_op)

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        self.need_one_each("all_gather", tensor_list, tensor, group)
        return here.world.launch(
            "all_gather", group, describe(tensor), [tensor], tensor_list,
            lambda calls: [calls[member][0] for member in group or range(here.world.size)], async_op)

    def need_one_each(self, name, tensors, tensor, group):
        size = self.get_world_size(group)
        if [part.shape for part in tensors] != [tensor.shape] * size:
            raise RankError(f"rank {here.rank} calls {name} with a list of {describe(*tensors)}, but it needs {size} "
                            f"tensors of {describe(tensor)}, one for each rank of the group")

    # ---- messages

    def isend(self, tensor, dst, group=None, tag=0):
        return here.world.post([Message("isend", here.rank, dst, tensor)])[0]

    def irecv(self, tensor, src, group=None, tag=0):
        return here.world.post([Message("irecv", here.rank, src, tensor)])[0]

    def send(self, *arguments, **options):
        self.isend(*arguments, **options).wait()

    def recv(self, *arguments, **options):
        self.irecv(*arguments, **options).wait()

    def P2POp(self, op, tensor, peer, group=None, tag=0):
        if op not in (self.isend, self.irecv):
            raise RankError("the first argument of P2POp must be dist.isend or dist.irecv")
        if not isinstance(tensor, torch.Tensor) or not isinstance(peer, int):
            raise RankError("P2POp needs a tensor and a rank after dist.isend or dist.irecv, but gets "
                            f"{type(tensor).__name__} and {type(peer).__name__}")
        return Message("isend" if op == self.isend else "irecv", here.rank, peer, tensor)

    def batch_isend_irecv(self, messages):
        if not messages or not all(isinstance(message, Message) for message in messages):
            raise RankError(f"rank {here.rank} calls batch_isend_irecv with " + (
                "a list that does not hold only P2POp" if messages else "an empty list, which torch refuses"))
        return here.world.post(messages)

