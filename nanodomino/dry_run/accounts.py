"""Keeps account of what a rank does while it runs: memory, collectives, and events for the clock.

torch calls a TorchDispatchMode for every operation, below autograd. `Accounts` is such a mode:

    memory       the bytes of the storages that are alive now, and their peak. A weak reference tells when one is freed
    traffic      {(group, kind): [calls, bytes]} of the collectives and messages
    events       what clock.py turns into seconds: operations, launches, waits, ends of actions

It also counts a real run, whose tensors have numbers; `bench.py memory` and `bench.py comm` compare both. On meta
tensors it replaces what needs numbers: the host reads 1 from every tensor, and no collective sends anything.
"""

import re
import weakref
from collections import defaultdict
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanodomino.comm.device import kind_of
from nanodomino.comm.scatter_and_gather import TAGS
from nanodomino.dry_run.shapes import flatten, result_of
from nanodomino.errors import UserError


class Operation(NamedTuple):
    """An operation or a fused kernel."""
    kind: str                    # matmul, attention, attention backward, memory
    bytes: int                   # read and written
    flops: float = 0.0
    shape: tuple = ()            # of a matmul: (how many, rows, columns, numbers that are added up)
    element_size: int = 0        # bytes of a number that a matmul or attention reads; attention: its head size in shape


class Launch(NamedTuple):
    """The start of a collective, of a message (group pp), or of a copy to or from the host (group "host")."""
    group: str
    kind: str
    bytes: float                 # the whole tensor: what is all-reduced, a reduce-scatter's input, an all-gather's output
    number: int


class Wait(NamedTuple):
    """The GPU, or the CPU, waits until launch `number` is done."""
    number: int


class ActionEnd(NamedTuple):
    """The end of an action of the schedule. kinds: see rank.kinds_of()."""
    kinds: tuple


# Where the two operands of a matmul stand among its arguments. Operations in VECTORS multiply as well, but memory limits
# them. LOOK_UPS touch only some rows of their first operand, and OVERWRITES do not read what they write to.
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
VECTORS, MULTIPLIES = {"mv", "dot", "addmv", "vdot"}, re.compile(r"m[mv]_?$|dot|attention|attn|conv|bilinear")
LOOK_UPS = {"embedding", "gather", "index", "index_select", "scatter_", "index_add_"}
OVERWRITES = {"zero_", "fill_", "copy_"}
# c10d's operators: (name of the collective, index of the argument that is the whole tensor)
COLLECTIVES = {"allreduce_": ("all_reduce", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
               "_allgather_base_": ("all_gather", 0), "alltoall_base_": ("all_to_all", 1), "send": ("send", 0),
               "recv_": ("receive", 0)}
KIND_OF_TAG = {tag: kind for kind, tag in TAGS.items()}


def attention_flops(name: str, given: dict) -> float | None:
    """Return the FLOPs of a fused attention kernel, or None for another operation. given: its arguments by name.

    A causal kernel skips half of the scores. Forward multiplies twice, backward five times, since it repeats q k^T.
    """
    q, k = given.get("query"), given.get("key")
    if q is None or k is None or not re.search("attention|attn", name):
        return None
    if q.dim() == 3:             # varlen: q [n, heads, d]; sequences with equally many queries and k.size(0) keys
        sequences = len(given.get("cu_seq_q", given.get("cum_seq_q"))) - 1
        pairs = q.size(1) * (q.size(0) / sequences) * (k.size(0) - q.size(0) / 2)
    else:
        pairs = q.size(0) * q.size(1) * q.size(2) * k.size(2) * (0.5 if given.get("is_causal") else 1)
    return (10 if "backward" in name else 4) * pairs * q.size(-1)


@lru_cache(maxsize=None)
def arguments_of(function) -> tuple[list[str], set[str]]:
    """Return the names of an operation's arguments, and of those that it writes to."""
    arguments = function._schema.arguments
    return [one.name for one in arguments], {one.name for one in arguments if one.alias_info and one.alias_info.is_write}


def size(tensor) -> int:
    """Return the bytes behind a tensor. An expanded tensor has fewer than its elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class Arrival(FakeWork):
    """Stands for a collective of a dry run. Whoever waits for it is recorded."""

    def __init__(self, accounts, number: int):
        super().__init__()
        self.accounts, self.number = accounts, number

    def wait(self, timeout=None):
        self.accounts.events.append(Wait(self.number))
        self.accounts.arrivals.pop(self.number, None)
        return True


class Streams:
    """Stands in for torch.cuda's streams. Each stream of a dry run is this object."""

    def __init__(self, accounts):
        self.accounts = accounts

    def Stream(self, device):
        return self

    def current_stream(self):
        return self

    def stream(self, stream):
        return nullcontext()

    def wait_stream(self, other):
        """Do nothing: a copy starts after all operations that were launched before it."""

    def record_event(self) -> int:
        return self.accounts.launches                          # the number of the last launch, a copy

    def wait_event(self, number: int):
        self.accounts.events.append(Wait(number))


class FusedAttention(TorchFunctionMode):
    """Gives meta tensors the attention kernel that torch would choose on the device for which they stand."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v, bias, is_causal = (kwargs[name] for name in ("query", "key", "value", "attn_mask", "is_causal"))
        if kind_of(q.device) == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal,
                                                                              attn_mask=bias)[0]
        if bias is None and q.element_size() == 2:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, is_causal=is_causal)[0]


class Accounts(TorchDispatchMode):
    """Counts while it is active.

    groups: {name: process group}
    host_counts: whether tensors on the CPU belong to the device's memory, because the device is a CPU
    """

    def __init__(self, groups: dict, host_counts: bool):
        super().__init__()
        self.names = {group.group_name: name for name, group in groups.items() if group is not None}
        self.host_counts, self.in_kernel = host_counts, None   # in_kernel: the FLOPs of the fused kernel that runs
        self.alive, self.now, self.peak = {}, 0, 0
        self.pinned, self.host_now, self.host_peak = set(), 0, 0
        self.launches, self.arrivals = 0, {}
        self.restart()

    def restart(self):
        """Forget everything except the storages that are alive."""
        self.peak, self.host_peak, self.traffic, self.events = self.now, self.host_now, defaultdict(lambda: [0, 0]), []

    # ---- operations

    @classmethod
    def _should_skip_dynamo(cls):                              # torch's hook: do not import the compiler for this
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._opname
        if function.namespace == "c10d":
            return self.collective(function, name, args)
        given = dict(zip(arguments_of(function)[0], args)) | kwargs
        if (result := self.instead(name, given)) is not None:
            return result
        result = result_of(function, args, kwargs)
        touched, results = list(flatten(given.values())), list(flatten([result]))
        known = {tensor.untyped_storage()._cdata for tensor in touched}
        new = [tensor for tensor in results if tensor.untyped_storage()._cdata not in known]
        written = [tensor for key in arguments_of(function)[1] for tensor in flatten([given.get(key)])]
        if not new and not written:
            return result                                      # a view
        operation = self.operation(name, given, touched, written + new, results)
        if self.in_kernel is not None:                         # its temporaries stay in registers
            self.in_kernel += operation.flops
            return result
        for tensor in touched + new:
            self.allocate(tensor)
        if self.copies_to_host(name, touched):
            self.launch("host", "to host" if touched[0].untyped_storage()._cdata in self.pinned else "from host",
                        touched[0].nbytes)
        else:
            self.events.append(operation)
        return result

    def instead(self, name: str, given: dict):
        """Return the result of an operation that meta tensors do not have. None for any other operation."""
        tensor = next(flatten(given.values()), None)
        if given.get("pin_memory") and name == "empty":
            result = torch.empty(given["size"], dtype=given.get("dtype"), device="meta")
            self.pinned.add(result.untyped_storage()._cdata)
            self.allocate(result)
            return result
        if tensor is None or not tensor.is_meta:
            return tensor.clone() if name == "_pin_memory" else None
        if name == "_local_scalar_dense":
            return 1.0
        if name == "_to_copy" and given.get("device") == torch.device("cpu"):
            return torch.ones(tensor.shape, dtype=given.get("dtype") or tensor.dtype)
        if name == "is_set_to":
            one, other = ((x.untyped_storage()._cdata, x.storage_offset(), x.shape) for x in flatten(given.values()))
            return one == other
        return None

    def operation(self, name, given, touched, written, results) -> Operation:
        skipped = {id(tensor) for tensor in touched[:1]} if name in LOOK_UPS else set()
        read = [] if name in OVERWRITES else touched
        read = touched[1:] if name == "copy_" else read
        moved = sum(size(tensor) for tensor in [*read, *written] if id(tensor) not in skipped)
        if name in MATMULS:
            a, b = [*given.values()][MATMULS[name]:][:2]
            count = b.size(0) if b.dim() == 3 else 1
            rows, summed = max(a.numel() // (a.size(-1) * count), 1) if a.numel() else 0, a.size(-1)
            return Operation("matmul", moved, 2 * count * rows * b.size(-1) * summed,
                             (count, rows, b.size(-1), summed), a.element_size())
        if (flops := attention_flops(name, given)) is not None:
            q = given["query"]
            return Operation("attention backward" if "backward" in name else "attention", moved, flops,
                             (q.size(-1),), q.element_size())
        if MULTIPLIES.search(name) and name not in VECTORS:
            raise UserError(f"the dry run has no FLOPs for the operation {name}; add it to MATMULS in "
                            "nanodomino/dry_run/accounts.py")
        return Operation("memory", moved)

    def fuse(self, function, **options):
        """Stand in for torch.compile: a fused kernel reads its arguments, writes its results, and stores nothing else."""
        def kernel(*args):
            if self.in_kernel is not None:
                return function(*args)
            self.in_kernel = 0.0
            try:
                result = function(*args)
            finally:
                flops, self.in_kernel = self.in_kernel, None
            ends = {id(tensor): tensor for tensor in flatten((args, [result]))}
            for tensor in ends.values():
                self.allocate(tensor)
            self.events.append(Operation("memory", sum(map(size, ends.values())), flops))
            return result
        return kernel

    # ---- memory

    def allocate(self, tensor):
        """Count a tensor's storage, unless it counts already or is on another device."""
        storage, pinned = tensor.untyped_storage(), tensor.untyped_storage()._cdata in self.pinned
        if storage._cdata in self.alive or not pinned and tensor.device.type == "cpu" and not self.host_counts:
            return
        self.alive[storage._cdata] = weakref.ref(
            storage, lambda _, key=storage._cdata, bytes_=storage.nbytes(): self.free(key, bytes_))
        self.add(storage.nbytes(), pinned)

    def free(self, key: int, bytes_: int):
        del self.alive[key]
        self.add(-bytes_, key in self.pinned)
        self.pinned.discard(key)

    def add(self, bytes_: int, pinned: bool):
        if pinned:
            self.host_now += bytes_
            self.host_peak = max(self.host_peak, self.host_now)
        else:
            self.now += bytes_
            self.peak = max(self.peak, self.now)

    def copies_to_host(self, name: str, touched) -> bool:
        return name == "copy_" and any(tensor.untyped_storage()._cdata in self.pinned for tensor in touched)

    # ---- collectives

    def collective(self, function, name: str, args):
        """Count a collective or a message. On CPUs a reduce-scatter, an all-gather or an all-to-all over n ranks is
        n - 1 sends, each of 1/n of the tensor (comm/scatter_and_gather.py). So such a send counts as 1/(n-1) of a call,
        with n/(n-1) times its bytes."""
        kind, whole = COLLECTIVES.get(name, (name, 0))
        tensors = list(flatten([args[whole]]))
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        group_name, calls, bytes_ = self.names[group.group_name], 1.0, sum(tensor.nbytes for tensor in tensors)
        if group_name != "pp" and kind == "send":
            kind, calls = KIND_OF_TAG[args[3]], 1 / (group.size() - 1)
            bytes_ *= group.size() * calls
        if group_name == "pp" or kind != "receive":
            found = self.traffic[group_name, kind]
            found[0], found[1] = found[0] + calls, found[1] + bytes_
        self.launch(group_name, kind, bytes_, calls)
        if not tensors[0].is_meta:
            return function(*args)
        work = self.arrivals[self.launches] = Arrival(self, self.launches)
        return work.boxed() if name in ("send", "recv_", "alltoall_base_") else (args[0], work.boxed())

    def launch(self, group: str, kind: str, bytes_: float, calls=1.0):
        self.launches += 1
        self.events.append(Launch(group, kind, bytes_, self.launches))
