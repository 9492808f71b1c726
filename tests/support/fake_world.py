"""Run one rank of any layout alone, for tests that look at operations and not at numbers.

torch's "fake" backend reports each collective as done and moves no data. What other ranks would send is replaced by
zeros, so that all numbers stay finite. A TorchDispatchMode can record each operation, those of backward too.
"""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from nanodomino.comm import scatter_and_gather

exchange = scatter_and_gather.exchange


@contextmanager
def fake_world(rank: int, world_size: int):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                 # on tensors this small, more threads mostly wait for each other
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with mock.patch.object(scatter_and_gather, "exchange", zeros_from_others):
            yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def zeros_from_others(gives, takes, group, tag):
    for other, tensor in enumerate(takes):
        if other != group.rank():
            tensor.zero_()
    return exchange(gives, takes, group, tag)


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def only_views(function) -> bool:
    """Whether an operation gives another view of its operand, and touches no element."""
    views = [one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns]
    return any(views) or function is torch.ops.aten._unsafe_view.default


def operands(function, args, kwargs) -> list[tuple]:
    """(tensor, the schema's words on it) of each operand: alias_info tells whether it is written to, and is_out whether
    that is all."""
    given = {**dict(zip([one.name for one in function._schema.arguments], args)), **kwargs}
    return [(tensor, one) for one in function._schema.arguments for tensor in tensors(given.get(one.name))]


def writes(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
