"""Shards the residual stream along its tokens over the tensor-parallel ranks (sequence parallelism: 2205.05198,
section 4.2.2).

Between two pairs of matmuls everything works row by row: x' = x + dropout(y + bias), h = norm(x'), each token on its
own. If every rank holds the whole stream, t ranks do the same work on the same rows and keep the same activations. If
the stream is sharded, each rank does and keeps 1/t of that. But a column-parallel matmul needs all rows of h, and a
row-parallel matmul leaves on each rank an addend of every row. So one operation is needed on the way into a pair of
matmuls and another on the way out:

                   replicated stream     sharded stream
      gather       nothing               all-gather              rows of this rank -> all rows, on every rank
      reduce       all-reduce            reduce-scatter          addends of all rows -> summed rows of this rank

Each is the backward of the other, so f and g of parallel.py are, for either kind of stream:

      f, into the matmuls        forward: gather      backward: reduce
      g, out of the matmuls      forward: reduce      backward: gather

An all-reduce is a reduce-scatter followed by an all-gather, so both streams send the same bytes, except for one gather:
backward needs all rows of h again for the weight gradient of the column-parallel matmul. The tape keeps this rank's
rows of h and gathers them once more in backward. That is the price of keeping only 1/t of each activation.

**Which rows belong to which rank.** A slice has b x s rows of h numbers. The first b s / t rows belong to rank 0, the
next to rank 1, and so on, so that a shard is contiguous and an all-gather needs no copy afterwards. A shard has the
shape [b, s/t, h], but with more than one sample it does not hold s/t positions of each sample. This does no harm:
everything that belongs to a token (its position, its dropout mask) is sharded by the same function, own_rows; each
slice is sharded on its own; and pipeline stages pass shards on as they are.

**Two slices, one turn apart.** Every sublayer now has a collective before its first matmul and another after its
second. If both slices were at the same point, both would wait for a gather at the same time and nothing would be
hidden. So each slice also yields between its two matmuls, and slice b starts one turn after slice a. From left to right
in time:

      slice a   norm [gather             W1 core                W2 [reduce              norm [gather
      slice b                 W2 [reduce         norm [gather              W1 core                    W2 [reduce

      a's gather is hidden by b's W2, b's gather by a's W2; a's reduce by b's W1 and core, b's reduce by a's W1 and core

**Gradients.** Parameters that every rank holds whole but applies to its own rows only (norms, row-parallel biases,
position embeddings) get a different addend of their gradient on each rank. zero.py sums the addends once a step.
"""

from nanodomino.comm.scatter_and_gather import all_gather, reduce_scatter
from nanodomino.overlap.flight import Flight, prepare_all_reduce


class ReplicatedResidual:
    """Communicates for a stream that every tensor-parallel rank holds whole."""
    shards = 1

    def __init__(self, group):
        self.group = group

    def gather(self, x) -> Flight:
        return Flight(x)

    def reduce(self, addend) -> Flight:
        return prepare_all_reduce(addend, self.group)

    def own_rows(self, whole):
        return whole


class ShardedResidual:
    """Communicates for a stream of which each tensor-parallel rank holds 1/t of the rows."""

    def __init__(self, group):
        self.group, self.shards = group, group.size()

    def gather(self, x) -> Flight:
        """Prepare an all-gather: [b, s/t, f] -> [b, s, f]."""
        b, s, f = x.shape
        whole = x.new_empty(b, s * self.shards, f)
        whole.view(self.shards, *x.shape)[self.group.rank()] = x
        return Flight(whole, "all_gather", whole, lambda: (all_gather(whole.view(-1), self.group), None))

    def reduce(self, addend) -> Flight:
        """Prepare a reduce-scatter: [b, s, f], which is overwritten -> [b, s/t, f]."""
        flat = addend.view(-1)
        own = flat.chunk(self.shards)[self.group.rank()].view(len(addend), -1, addend.size(-1))
        return Flight(own, "reduce_scatter", flat, lambda: reduce_scatter(flat, self.group))

    def own_rows(self, whole):
        """Copy this rank's rows [b, s/t, ..] out of [b, s, ..]. A view would keep all of `whole` in memory."""
        rows = whole.flatten(0, 1).chunk(self.shards)[self.group.rank()]
        return rows.view(len(whole), -1, *whole.shape[2:]).clone()


def residual_stream(config, mesh) -> ReplicatedResidual | ShardedResidual:
    """Return the kind of stream that config.sequence_parallel asks for; with tp = 1 there is nothing to shard."""
    return (ShardedResidual if config.sequence_shards > 1 else ReplicatedResidual)(mesh.tp_group)


def in_words(config) -> str:
    """Return ', sequence parallel' if the stream is sharded, else ''."""
    return ", sequence parallel" * (config.sequence_shards > 1)
