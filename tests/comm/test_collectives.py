"""Reduce-scatter and all-gather against plain sums and copies."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanodomino.comm.collectives import Messages, all_gather, reduce_scatter


def numbers(rank, size, dtype):
    """Return a rank's tensor. The sum of several has bits that depend on the order, in 16 and in 64 bits."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def both(size, dtype, place):
    """Return this rank's part after a reduce-scatter, the tensor after an all-gather of the parts, and the tensor as it
    was before the first wait(). place: the part to gather lies in the part of rank + place; None: elsewhere. The ranks
    send one after the other."""
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = numbers(rank, size, dtype)
    work, received = reduce_scatter(whole, group=group)
    before = whole.clone()
    work.wait()
    part = received.sum(dim=0)
    elsewhere, own = torch.full_like(whole, torch.nan), part
    if place is not None:
        own = elsewhere.chunk(group.size())[(rank + place) % group.size()].copy_(part)
    isend = dist.isend
    with mock.patch.object(dist, "isend", lambda *args, **options: time.sleep(rank / 100) or isend(*args, **options)):
        work = all_gather(elsewhere, own, group)
    work.wait()
    work.wait()                                                # torch's works allow a second wait(), too
    return part, elsewhere, before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks, place", [(1, 0), (2, 1), (3, None), (8, 0)])
def test_each_rank_gets_the_sum_of_its_part_and_all_get_all_parts(pool, ranks, place, dtype):
    """The order of the sum is fixed, so its bits are the same in every run, whichever rank is late. The part to gather
    may lie in the whole tensor, as with ZeRO, even where a late rank has received another, or elsewhere, as with
    sequence parallelism."""
    size = 24 * 16
    theirs = [numbers(rank, size, dtype) for rank in range(ranks)]
    whole = torch.cat([torch.stack([one.chunk(ranks)[part] for one in theirs]).sum(dim=0) for part in range(ranks)])
    results = pool.run(both, size, dtype, place, world_size=ranks)
    for rank, (part, gathered, before) in enumerate(results):
        assert torch.equal(part, whole.chunk(ranks)[rank])
        assert torch.equal(gathered, whole)
        assert torch.equal(before, theirs[rank])


@pytest.mark.parametrize("traced", [False, True])
def test_wait_raises_if_a_message_failed_also_while_a_trace_records(traced):
    """A trace asks for a future, so a thread waits for the messages. Its error must not end there."""
    class LostMessage:
        def wait(self):
            raise RuntimeError("connection closed by peer")

    messages = Messages([LostMessage()])
    if traced:
        messages.get_future()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        messages.wait()
