"""How the residual stream x lies on the tensor-parallel ranks: whole on each of them, or cut along its tokens
(sequence parallelism: 2205.05198, section 4.2.2).

Between two pairs of products all is row by row: x' = x + dropout(y + bias), h = norm(x'), of each token for itself.
Where the stream is whole, t ranks do the same work on the same rows, and keep the same. Cut it, and each does, and
keeps, its own. But a column-parallel product wants all rows of h, and a row-parallel one leaves on each rank a part of
every row's sum. So one thing happens on the way into a pair of products, another on the way out:

                   whole on each         cut along its tokens
      spread       nothing               all-gather                rows of the stream -> all rows, on every rank
      join         all-reduce            reduce-scatter            parts of sums of all rows -> rows of the stream

and these two are each other's backward. What every rank was given has a gradient on every rank, each a part of a sum;
the gradient of a sum is that of each of its parts. So f and g of parallel.py are, either way,

      f, before the products     forward spread     backward join
      g, behind them             forward join       backward spread

An all-reduce is a reduce-scatter and then an all-gather, so the bytes on the wires are the same, but for one: backward
needs all rows of h again, for the weight gradient of the column-parallel product. The tape keeps h as it is in the
stream, and spreads it once more, which is how activations come to be all cut by t.

**Whose are which rows.** Of the b x s rows [h] of a slice the first b s / t are rank 0's, and so on: a part is one
run of memory, and what is gathered is whole without a copy. The part is called [b, s/t, h], which is its size: with
several samples its rows are not those of s/t places in each. That is no matter: what belongs to a token (its position,
its dropout mask) is cut in the same way, by `own`; stages pass on parts as they are; and each slice is cut for itself,
so that its samples can be told from another's.

What is whole on every rank and works on the rows of one (norms, row-parallel biases, positions) gets a part of its
gradient there. They are summed over the ranks once a step, where they lie side by side (zero.py).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nanodomino.comm.collectives import all_gather, reduce_scatter


@dataclass
class Flight:
    """A tensor that is to travel. start() begins that, and returns (work, all ranks' parts of a sum [t, size] that are
    still to be added up, or None); kind: of the collective, "" where there is nothing to send; sent: the whole tensor,
    see formulas.Traffic."""
    tensor: torch.Tensor
    kind: str = ""
    sent: torch.Tensor | None = None
    start: object = None
    work: object = None
    received: torch.Tensor | None = None

    def begin(self):
        self.work, self.received = self.start()

    def land(self):
        """The tensor, once `work` has been waited for."""
        if self.received is not None:
            torch.sum(self.received, dim=0, out=self.tensor.view(-1))
            self.received = None
        return self.tensor


class Whole:
    """On every rank; f and g of parallel.py are its blocking version."""
    parts = 1

    def __init__(self, group):
        self.group = group

    def spread(self, x) -> Flight:
        return Flight(x)

    def join(self, partial) -> Flight:
        return all_reduce(partial, self.group)

    def own(self, whole):
        """This rank's rows."""
        return whole


class Cut:
    """Along its tokens."""

    def __init__(self, group):
        self.group, self.parts = group, group.size()

    def spread(self, x) -> Flight:
        """[b, s/t, f] -> [b, s, f]."""
        b, s, f = x.shape
        whole = x.new_empty(b, s * self.parts, f)
        whole.view(self.parts, *x.shape)[self.group.rank()] = x
        return Flight(whole, "all_gather", whole, lambda: (all_gather(whole.view(-1), self.group), None))

    def join(self, partial) -> Flight:
        """[b, s, f], overwritten -> [b, s/t, f]."""
        flat = partial.view(-1)
        own = flat.chunk(self.parts)[self.group.rank()].view(len(partial), -1, partial.size(-1))
        return Flight(own, "reduce_scatter", flat, lambda: reduce_scatter(flat, self.group))

    def own(self, whole):
        """Of [b, s, ..]: this rank's rows, [b, s/t, ..]. A copy: a view would keep the whole in memory."""
        rows = whole.flatten(0, 1).chunk(self.parts)[self.group.rank()]
        return rows.view(len(whole), -1, *whole.shape[2:]).clone()


def all_reduce(tensor, group, op=dist.ReduceOp.SUM) -> Flight:
    """Of a tensor that must be left alone meanwhile; one rank has nothing to send."""
    if group.size() == 1:
        return Flight(tensor)
    return Flight(tensor, "all_reduce", tensor, lambda: (dist.all_reduce(tensor, op, group=group, async_op=True), None))


def in_words(config) -> str:
    """', sequence parallel' where it is."""
    return ", sequence parallel" * (config.sequence_shards > 1)


def stream_of(config, mesh):
    """Whole, or Cut where the config says sequence_parallel and there are ranks to cut it over."""
    return Cut(mesh.tp_group) if config.sequence_shards > 1 else Whole(mesh.tp_group)
