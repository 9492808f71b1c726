"""Keeps account of what a rank does while it runs: memory, collectives, and events for the clock.

torch calls a TorchDispatchMode for every operation, below autograd. `Accounts` is such a mode:

    memory       the bytes of the storages that are alive now, and their peak. A weak reference tells when one is freed
    traffic      {(group, kind): [calls, bytes]} of the collectives and messages
    events       what a Clock turns into seconds: operations, launches, waits, ends of actions

It counts a real run as well; `bench.py memory` compares both. For meta tensors it replaces what needs numbers or other
ranks: the host reads 1 from every tensor, and no collective sends anything.
"""

import re
import weakref
from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from nanodomino.comm.collectives import TAGS
from nanodomino.comm.device import kind_of
from nanodomino.errors import require


class Operation(NamedTuple):
    """An operation or a fused kernel."""
    kind: str                    # matmul, attention, attention backward, memory
    bytes: int                   # bytes read plus bytes written
    flops: float = 0.0
    shape: tuple = ()            # matmul: (how many, rows, columns, terms of each sum); attention: (head size,)
    element_size: int = 0        # bytes of a number that a matmul reads


class Launch(NamedTuple):
    """The start of a collective, of a message (group "pp"), or of a copy to or from the host (group "host")."""
    group: str
    kind: str
    bytes: float                 # of the whole tensor: a reduce-scatter's or all-to-all's input, an all-gather's output
    number: int


class Wait(NamedTuple):
    """The device waits until launch `number` is done."""
    number: int


class ActionEnd(NamedTuple):
    """The end of an action of the schedule. kinds: see rank.kinds_of()."""
    kinds: tuple


# The index of a matmul's first operand among its arguments; the second follows. VECTORS: memory alone limits these.
MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0}
VECTORS, MULTIPLIES = {"mv", "dot", "addmv"}, re.compile(r"m[mv]_?$|dot|attention|attn|conv|bilinear")
LOOK_UPS = {"embedding", "gather", "index", "scatter_", "index_add_"}     # use only some rows of their first operand
OVERWRITES = {"zero_", "fill_", "copy_"}                                  # do not read the tensor they write to
# c10d's operators: (name of the collective, index of the argument that is the whole tensor)
COLLECTIVES = {"allreduce_": ("all_reduce", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
               "_allgather_base_": ("all_gather", 0), "alltoall_base_": ("all_to_all", 1), "send": ("send", 0),
               "recv_": ("receive", 0)}
KIND_OF_TAG = {tag: kind for kind, tag in TAGS.items()}


def operation_of(name: str, given: dict, read, written) -> Operation:
    """Describe an operation. given: its arguments by name; read, written: its tensors. Attention multiplies twice in
    forward and five times in backward. A causal kernel skips half of the scores. Raises UserError for unknown FLOPs."""
    rows_of = read[0] if name in LOOK_UPS else None            # this tensor's bytes do not count
    moved = sum(size(one) for one in [*(read[1:] if name in OVERWRITES else read), *written] if one is not rows_of)
    if name in MATMULS:
        a, b = [*given.values()][MATMULS[name]:][:2]
        count, summed = b.size(0) if b.dim() == 3 else 1, a.size(-1)
        rows = a.shape[:-1].numel() // max(count, 1)             # a rank may own no words, or its experts no rows
        return Operation("matmul", moved, 2 * count * rows * b.size(-1) * summed, (count, rows, b.size(-1), summed),
                         a.element_size())
    if "query" in given:
        q, k = given["query"], given["key"]
        if q.dim() == 3:         # varlen: q [n, heads, d]; assumes equal sequences, whose last query sees all keys
            sequences = len(next(starts for name, starts in given.items() if name.startswith("cu"))) - 1
            pairs = q.size(1) * q.size(0) / sequences * (k.size(0) - q.size(0) / 2)
        else:
            pairs = q.size(0) * q.size(1) * q.size(2) * k.size(2) * (0.5 if given.get("is_causal") else 1)
        kind, each = ("attention backward", 10) if "backward" in name else ("attention", 4)
        return Operation(kind, moved, each * pairs * q.size(-1), (q.size(-1),))
    require(name in VECTORS or not MULTIPLIES.search(name), f"the dry run does not know the FLOPs of torch's {name}; "
            "add it to MATMULS in nanodomino/estimate/accounts.py")
    return Operation("memory", moved)


def workspace(name: str, given: dict) -> int:
    """Return the bytes that flash attention's backward allocates until it ends: the gradient of q in fp32; if query
    heads share k and v, also the gradients of k and v for each query head. q [b, heads, s, d] or [n, heads, d]"""
    if not re.search(r"(flash_attention|varlen_attn)_backward", name):
        return 0
    q, k = given["query"], given["key"]
    return 4 * q.numel() + (2 * k.nbytes * q.size(1) // k.size(1) if q.size(1) > k.size(1) else 0)


def size(tensor) -> int:
    """Return the bytes that a tensor occupies. An expanded tensor has more elements than its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class Arrival(FakeWork):
    """Stands for a collective in flight. The accounts hold it until wait(), or torch forgets its Python type."""

    def __init__(self, accounts, number: int):
        super().__init__()
        self.accounts, self.number = accounts, number
        accounts.arrivals[number] = self

    def wait(self, timeout=None):
        self.accounts.events.append(Wait(self.number))
        self.accounts.arrivals.pop(self.number, None)
        return True


class Streams:
    """Stands in for torch.cuda and for each of its streams. wait_stream() has nothing to do, because the clock starts a
    copy after all operations that were launched before it."""

    def __init__(self, accounts):
        self.accounts = accounts

    def current_stream(self, device=None):
        return self

    Stream = current_stream

    def stream(self, stream):
        return nullcontext()

    def wait_stream(self, other):
        pass

    def record_event(self) -> int:
        return self.accounts.launches                          # the copy is the last launch

    def wait_event(self, number: int):
        self.accounts.events.append(Wait(number))


def attention_kernel(query, key, value, attn_mask, is_causal, enable_gqa):
    """Stand in for F.scaled_dot_product_attention: call the kernel of the device that the meta tensors stand for."""
    if kind_of(query.device) == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, attn_mask=attn_mask)[0]
    if attn_mask is None and query.element_size() == 2:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, is_causal=is_causal)[0]


class Accounts(TorchDispatchMode):
    """Counts what runs while it is active. groups: {name: process group or None}. host_counts: the device is a CPU."""

    def __init__(self, groups: dict, host_counts: bool):
        super().__init__()
        self.names = {group.group_name: name for name, group in groups.items() if group is not None}
        self.host_counts, self.in_kernel = host_counts, None   # in_kernel: the FLOPs of the fused kernel that runs
        self.alive, self.pinned = {}, set()                    # keys from storage(); pinned: in the host's memory
        self.now = self.peak = self.host_now = self.host_peak = self.launches = 0
        self.arrivals = {}                                     # {number of a launch: its Arrival}
        self.restart()

    def restart(self):
        """Forget everything except the storages that are alive."""
        self.peak, self.host_peak, self.traffic, self.events = self.now, self.host_now, defaultdict(lambda: [0, 0]), []
        self.message_bytes = {}                                # {key of a buffer of messages between stages: bytes}

    @classmethod
    def _should_skip_dynamo(cls):                              # so that torch does not import its compiler
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function._opname
        if is_view(function):
            return function(*args, **kwargs)
        if function.namespace == "c10d":
            return self.collective(function, name, args)
        names, written, not_read, returned = arguments_of(function)
        given = dict(zip(names, args)) | kwargs
        touched = flatten(given.values())
        if (result := self.without_numbers(name, given, touched)) is not None:
            return result
        key = function, signature(args), signature([*kwargs.items()])
        remembered, operation, temporary = REMEMBERED.get(key, (None, None, 0))
        if written and any(one.is_meta for one in touched):    # meta tensors have no numbers that could change
            result = tuple(given[name] for name in returned)
            result = result if len(result) > 1 else result[0] if result else None
        else:
            result = function(*args, **kwargs) if remembered is None else empty_like(remembered)
        storages, results = {storage(one): one for one in touched}, flatten([result])
        new = [one for one in results if storage(one) not in storages]
        changed = flatten([given.get(name) for name in written]) + new
        if not any(map(self.counts, changed)):                 # a view was made, or a GPU's host worked
            return result
        if operation is None:
            read = flatten(value for key, value in given.items() if key not in not_read)
            operation, temporary = operation_of(name, given, read, changed), workspace(name, given)
            if all(one.is_meta for one in changed) and (written or len(new) == len(results)):
                REMEMBERED[key] = None if written else empty_like(result), operation, temporary
        if self.in_kernel is not None:                         # temporaries of a fused kernel stay in registers
            self.in_kernel += operation.flops
            return result
        for tensor in [one for key, one in storages.items() if key not in self.alive] + new:
            self.allocate(tensor)
        self.peak = max(self.peak, self.now + temporary)
        if name == "copy_" and not self.pinned.isdisjoint(storages):
            self.launch("host", "to host" if storage(touched[0]) in self.pinned else "from host", touched[0].nbytes)
        elif "empty" not in name:                              # an "empty" only allocates
            self.events.append(operation)
        return result

    def without_numbers(self, name: str, given: dict, tensors: list):
        """Return the result of an operation that meta tensors or a machine without GPUs do not have; else None."""
        if name == "empty" and given.get("pin_memory"):
            result = torch.empty(given["size"], dtype=given.get("dtype"), device="meta")
            self.pinned.add(storage(result))
            self.allocate(result)
            return result
        if not tensors or not tensors[0].is_meta:
            return tensors[0].clone() if name == "_pin_memory" else None
        if name == "_local_scalar_dense":
            return 1.0
        if name == "_to_copy" and given.get("device") == torch.device("cpu"):
            return torch.ones(tensors[0].shape, dtype=given.get("dtype") or tensors[0].dtype)
        if name == "is_set_to":
            one, other = ((storage(x), x.storage_offset(), x.shape) for x in tensors)
            return one == other

    def fuse(self, function):
        """Stand in for torch.compile: a fused kernel reads its arguments, and writes nothing but its results."""
        def kernel(*args):
            if self.in_kernel is not None:
                return function(*args)
            self.in_kernel = 0.0
            result = function(*args)
            flops, self.in_kernel = self.in_kernel, None
            ends = {id(tensor): tensor for tensor in flatten((args, [result]))}.values()
            for tensor in ends:
                self.allocate(tensor)
            self.events.append(Operation("memory", sum(map(size, ends)), flops))
            return result
        return kernel

    def counts(self, tensor) -> bool:
        """Return whether a tensor is in the memory of the device, or in pinned memory."""
        return self.host_counts or tensor.device.type != "cpu" or storage(tensor) in self.pinned

    def allocate(self, tensor):
        """Count a tensor's storage until it is freed, unless it counts already."""
        key = storage(tensor)
        if key in self.alive or not self.counts(tensor):
            return
        memory = tensor.untyped_storage()
        size, pinned = memory.nbytes(), key in self.pinned

        def free(_):
            del self.alive[key]
            self.add(-size, pinned)
            self.pinned.discard(key)

        self.alive[key] = weakref.ref(memory, free)
        self.add(size, pinned)

    def add(self, bytes_: int, pinned: bool):
        if pinned:
            self.host_now += bytes_
            self.host_peak = max(self.host_peak, self.host_now)
        else:
            self.now += bytes_
            self.peak = max(self.peak, self.now)

    def collective(self, function, name: str, args):
        """Count a collective or a message. On CPUs a reduce-scatter, all-gather or all-to-all over n ranks is n - 1
        sends of 1/n of the tensor. So such a send counts as 1/(n-1) of a call and n/(n-1) times its bytes."""
        kind, whole = COLLECTIVES.get(name, (name, 0))
        tensors = flatten([args[whole]])
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        group_name, calls, bytes_ = self.names[group.group_name], 1.0, sum(tensor.nbytes for tensor in tensors)
        if group_name != "pp" and kind == "send":
            kind, calls = KIND_OF_TAG[args[3]], 1 / (group.size() - 1)
            bytes_ *= group.size() * calls
        if group_name == "pp" or kind != "receive":
            found = self.traffic[group_name, kind]
            found[0], found[1] = found[0] + calls, found[1] + bytes_
        if group_name == "pp" and kind in ("send", "receive"):
            self.allocate(tensors[0])
            self.message_bytes[storage(tensors[0])] = tensors[0].nbytes
        self.launch(group_name, kind, bytes_)
        if not tensors[0].is_meta:
            return function(*args)
        work = Arrival(self, self.launches)
        return work.boxed() if name in ("send", "recv_", "alltoall_base_") else (args[0], work.boxed())

    def launch(self, group: str, kind: str, bytes_: float):
        self.launches += 1
        self.events.append(Launch(group, kind, bytes_, self.launches))


REMEMBERED = {}    # {(operation, shapes, other arguments): (result, Operation, workspace)}; each takes torch 0.2 ms


def flatten(tree) -> list:
    """Return the tensors in nested tuples and lists."""
    found = []
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, (tuple, list)):
            found += flatten(leaf)
    return found


def storage(tensor) -> int:
    """Return a number that identifies the tensor's storage as long as that storage exists."""
    return tensor.untyped_storage()._cdata


def signature(value):
    """Return what the shape of a result can depend on, as a hashable value. The type belongs to it, since 1 == 1.0."""
    if isinstance(value, torch.Tensor):                        # views of equal shapes can occupy different bytes
        return value.shape, value.stride(), value.dtype, value.device, value.is_contiguous() or size(value)
    return tuple(map(signature, value)) if isinstance(value, (tuple, list)) else (type(value), value)


def empty_like(result):
    """Return new tensors with the shapes, strides and types of the ones in a result."""
    if isinstance(result, torch.Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return type(result)(map(empty_like, result)) if isinstance(result, (tuple, list)) else result


@cache
def arguments_of(function) -> tuple[list[str], ...]:
    """Return the names of an operation's arguments: of all, of those it writes to, does not read, and returns."""
    arguments, count = function._schema.arguments, len(function._schema.returns)
    names, written, not_read = ([one.name for one in arguments if test(one)] for test in (
        lambda one: True, lambda one: one.alias_info is not None and one.alias_info.is_write, lambda one: one.is_out))
    return names, written, not_read, written[:count]


@cache
def is_view(function) -> bool:
    """Return whether the operation only returns views of its arguments."""
    schema = function._schema
    return not schema.is_mutable and len(schema.returns) > 0 and all(one.alias_info for one in schema.returns)
