"""Run one rank of any layout alone, on tensors with numbers, for tests that look at operations.

What other ranks would send is replaced by zeros, so that all numbers stay finite. A TorchDispatchMode can record each
operation, those of backward too.
"""

from contextlib import contextmanager
from unittest import mock

from nanodomino.comm import scatter_and_gather
from nanodomino.estimate.rank import world_of

exchange = scatter_and_gather.exchange


@contextmanager
def fake_world(rank: int, world_size: int):
    with world_of(rank, world_size), mock.patch.object(scatter_and_gather, "exchange", zeros_from_others):
        yield


def zeros_from_others(gives, takes, group, tag):
    for other, tensor in enumerate(takes):
        if other != group.rank():
            tensor.zero_()
    return exchange(gives, takes, group, tag)
