"""Shards the residual stream along its tokens over the tensor-parallel ranks (sequence parallelism: 2205.05198,
section 4.2.2).

Between the matmuls of two sublayers, each token's row is computed by itself: x' = x + dropout(y + bias), h = norm(x').
If every rank holds the whole stream, t ranks do the same work on the same rows and keep the same activations. If the
stream is sharded, each rank does and keeps only 1/t of that. But a column-parallel matmul needs all rows of h, and a
row-parallel matmul gives each rank only an addend of every row. So one operation must come before each pair of matmuls,
and another after it:

                   replicated stream     sharded stream
      gather       nothing               all-gather              this rank's rows -> all rows, on every rank
      reduce       all-reduce            reduce-scatter          addends of all rows -> sums of this rank's rows

Each of the two is the backward of the other; parallel.py calls them f and g.

An all-reduce is a reduce-scatter followed by an all-gather, so both streams send the same number of bytes, with one
exception. Backward needs all rows of h for the weight gradient of the column-parallel matmul, but the tape of a sharded
stream keeps only this rank's rows. So backward gathers h once more. That is the price of keeping 1/t of the stream.

**Which rows belong to which rank.** A slice has b x s rows of h numbers. The first b s / t rows belong to rank 0, the
next to rank 1, and so on. So a shard is contiguous, and an all-gather needs no copy afterwards. A shard has the shape
[b, s/t, h], but with more than one sample it does *not* hold s/t tokens of each sample. For example, with 2 samples and
t = 2 each rank holds one whole sample. That does no harm: a token's position and dropout mask are sharded in the same
way (own_rows), each slice is sharded by itself, and pipeline stages pass shards on as they are.

**Two slices, one turn apart.** Every sublayer now has one collective before its first matmul and another after its
second. If both slices ran in lockstep, both would wait for a gather at once, and nothing would hide it. So each
slice also yields between its two matmuls, and slice b starts one turn after slice a. Time runs from left to right, and
a collective "[" is in flight until its slice's next turn:

      slice a   norm [gather             W1 core                W2 [reduce              norm [gather
      slice b                 W2 [reduce         norm [gather              W1 core                    W2 [reduce

So a gather is hidden by the other slice's W2, and a reduce by the other slice's W1 and core.

**Gradients.** Every rank holds the whole norm weights, row-parallel biases and position embeddings, but applies them
only to its own rows. So it computes an addend of their gradients, and zero.py sums these addends once a step.
"""

from nanodomino.overlap.slices import Flight, ReplicatedResidual, prepare_all_gather, prepare_reduce_scatter


class ShardedResidual(ReplicatedResidual):
    """Gathers and reduces for a sharded residual stream: each tensor-parallel rank holds 1/t of the rows."""
    shards = property(lambda self: self.group.size())

    def gather(self, x) -> Flight:
        """Prepare an all-gather: [b, s/t, f] -> [b, s, f]."""
        b, s, f = x.shape
        return prepare_all_gather(x, (b, s * self.shards, f), self.group)

    def reduce(self, addend) -> Flight:
        """Prepare a reduce-scatter: [b, s, f] -> [b, s/t, f]. It overwrites `addend`."""
        return prepare_reduce_scatter(addend, (len(addend), -1, addend.size(-1)), self.group)

    def own_rows(self, whole):
        """Copy this rank's rows [b, s/t, ..] of `whole` [b, s, ..]. A view would keep all rows in memory."""
        rows = whole.flatten(0, 1).chunk(self.shards)[self.group.rank()]
        return rows.view(len(whole), -1, *whole.shape[2:]).clone()
