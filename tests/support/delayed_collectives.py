"""Carry out each asynchronous collective at its wait(), or at its launch.

A real collective finishes at some moment between the two. Code that reads a result before it waits is right when all
finish at the launch and wrong when all finish at the wait, so tests compare both extremes.
"""

from functools import cache
from types import SimpleNamespace

import torch.distributed as dist

from nanodomino.comm import collectives


def delayed_collectives(when, config=None):
    """Return patches [(object, name, replacement)] that carry collectives out 'late' (at wait()) or 'early'."""
    real_all_reduce, real_exchange = dist.all_reduce, collectives.exchange

    def launch(collective):
        work = SimpleNamespace(wait=cache(collective))             # carried out once
        if when == "early":
            work.wait()
        return work

    def all_reduce(*arguments, async_op=False, **options):
        if not async_op:
            return real_all_reduce(*arguments, **options)
        return launch(lambda: real_all_reduce(*arguments, **options))

    def exchange(*arguments):
        return launch(lambda: real_exchange(*arguments).wait())

    return [(dist, "all_reduce", all_reduce), (collectives, "exchange", exchange)]
