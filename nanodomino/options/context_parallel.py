"""Context parallelism (--context-parallel-size): c ranks share the tokens of each sample.

The activations of a sample grow with its length, and tensor parallelism can cut them over only a few ranks. So c ranks
share a sample, and each holds s/c of its tokens. Norms, MLPs, embedding and loss treat each token by itself, and all
gradients are sums over tokens. So outside attention, c ranks with parts of a sample are like c replicas with shorter
samples. (One exception: router.py sums the experts' counts over them.) Attention needs the tokens of other ranks.
--cp-comm-type chooses one of two ways:

    all_gather (Llama 3, 2407.21783, section 3.3.2)      every rank: own queries, all keys and values, all heads
        forward     q, k, v of own places  ->  all-gather of k and v         ->  softmax(q K^T) V of own places
        backward    gradients of q, K, V   ->  reduce-scatter of K's and V's ->  sums for own places

    a2a (DeepSpeed-Ulysses, 2309.14509)                  every rank: whole samples, 1/c of its heads
        forward     q, k, v of own places  ->  all-to-all  ->  attention of 1/c of the heads  ->  all-to-all
        backward    the same two all-to-alls in the other direction

Let X be the bytes of q for a rank's places. If g query heads share a key head, k has X/g bytes. Per layer, a rank
receives in forward:

    all_gather    2 (c - 1) X/g                    grows with c, but a large g makes it small
    a2a           (2 + 2/g) X (c - 1)/c            at most (2 + 2/g) X; c x tp must divide the query groups

In both ways, the rank that holds a token normalizes and rotates its q and k, and then sends them. A slice yields after
each launch, so the other slices hide the collective. A microbatch of a single sample has one slice. Then the weight
gradient of W2 hides the first collective of backward, and --schedule paired can hide the others.

**Recomputation** of the core repeats the collectives of its forward, because keeping all keys and values would cost
what context parallelism saves. The received numbers are the same, so the gradients have the same bits.

**Which tokens a rank holds.** A token's *place* is its index in the sample. A token attends to places up to its own. If
rank r held the r-th of c equal parts, the last rank would compute about 2 c - 1 times as many scores as the first. So
the sample is cut into 2 c parts, and rank r holds parts r and 2 c - 1 - r, as in Llama 3. For c = 2:

    place    0  1 | 2  3 | 4  5 | 6  7         rank 0 computes 1 + 2 + 7 + 8 = 18 scores,
    rank     0  0 | 1  1 | 1  1 | 0  0         rank 1 computes 3 + 4 + 5 + 6 = 18

So with all_gather, a rank's i-th query is not the i-th token of the sample. The rank tells the AttentionMask
(attention_mask.py) the places of its queries, and where the gathered tensor holds each key. With a2a, the mask is the
mask of whole samples.
"""

from dataclasses import replace

import torch

from nanodomino.layers.attention_mask import AttentionInputs
from nanodomino.overlap.compute import LinearPair
from nanodomino.overlap.slices import prepare_all_gather, prepare_all_to_all, prepare_reduce_scatter


# ---- which tokens a rank holds

def by_rank(whole, ranks: int, dim=1) -> list[torch.Tensor]:
    """Cut `whole` [b, s, ..] into each rank's places: a list of c tensors [b, s/c, ..]. dim: the dimension of s."""
    parts = whole.chunk(2 * ranks, dim)
    return [torch.cat(both, dim) for both in zip(parts[:ranks], reversed(parts[ranks:]))]


def in_order(own_of_each) -> torch.Tensor:
    """Undo by_rank(): join the places of each rank, c tensors [b, s/c, ..], to whole samples [b, s, ..]."""
    first, second = zip(*(own.chunk(2, dim=1) for own in own_of_each))
    return torch.cat([*first, *reversed(second)], dim=1)


def own_places(whole, mesh, dim=1) -> torch.Tensor:
    """Return this rank's places of `whole` [b, s, ..]."""
    ranks, rank = mesh.axis("cp")
    return by_rank(whole, ranks, dim)[rank]


def own_part(batch, mesh):
    """Return the batch with this rank's tokens of each sample, but with all documents, because attention needs them."""
    own = {name: own_places(getattr(batch, name), mesh) for name in ("tokens", "labels", "loss_mask", "positions")}
    extras = {name: own_part(value, mesh) if isinstance(value, type(batch)) else value
              for name, value in batch.extras.items()}
    return replace(batch, **own, in_order=False, extras=extras)


# ---- what ranks exchange for attention

class SharedSampleAttention(LinearPair):
    """Runs attention of samples that the ranks of the cp group share."""

    def __init__(self, sublayer, ops, compiled, mesh, **factor):
        super().__init__(sublayer, ops, compiled, **factor)
        self.mesh, self.ranks, self.group = mesh, mesh.axis("cp")[0], mesh.groups["cp"]

    def send(self, slice, flight):
        """Launch a flight. Return a generator that lets other slices compute, and then returns the flight's tensor."""
        return self.ops.yield_then_wait(slice, self.site, [self.ops.launch(slice, self.site, flight)])


class GatheredKeys(SharedSampleAttention):
    """Runs attention of this rank's queries to all keys (--cp-comm-type all_gather)."""

    def core(self, slice, c):
        attention, inputs = self.sublayer, self.inputs(slice.masks_and_positions, c)
        q, k, v, saved = attention.prepare(self.forward_kernel, c, inputs)
        own = torch.cat([k, v], dim=3)                         # [b, s/c, groups, 2, d]
        gathered = yield from self.send(slice, prepare_all_gather(own, (self.ranks, *own.shape), self.group, "cp"))
        k, v = gathered.flatten(0, 2)[inputs.keys].split(1, dim=3)
        context, segment = attention.attend_forward(q, k, v, inputs)
        return context, (segment, saved, inputs.keys, gathered.shape)

    def core_backward(self, slice, gradient, saved, matmuls):
        attention, (segment, saved, keys, shape) = self.sublayer, saved
        q, k, v = attention.attend_backward(segment, gradient)
        addends = k.new_zeros(shape)                           # gradients of all places from this rank's queries
        addends.flatten(0, 2).index_add_(0, keys.flatten(), torch.cat([k, v], dim=3).flatten(0, 1))
        arriving = self.send(slice, prepare_reduce_scatter(addends, shape[1:], self.group, "cp"))
        if slice.deferred is None:
            self.ops.weight_gradients(slice, self.site, matmuls)       # they hide the reduce-scatter
        own = yield from arriving
        return attention.prepare_backward(self.backward_kernel, q, *own.split(1, dim=3), saved)

    def inputs(self, masks_and_positions, c) -> AttentionInputs:
        """Return the AttentionInputs for this rank's queries and all keys. c [b, s/c, ..]: the output of W1."""
        mesh = self.mesh
        return masks_and_positions.attention_inputs(
            self.sublayer, c, lambda mask: own_places(mask.chunk(mesh.tp, dim=1)[mesh.tp_rank], mesh, dim=2),
            lambda b, s: (own_places(torch.arange(s), mesh, dim=0), gathered_places(b, s, self.ranks)), self.ranks)


def gathered_places(b: int, s: int, ranks: int):
    """Return the index [b, s] of each place of each sample in the gathered tensor [c, b, s/c], in the host's memory."""
    return in_order(torch.arange(b * s).view(ranks, b, -1))


class ExchangedHeads(SharedSampleAttention):
    """Runs attention of whole samples and 1/c of this rank's heads (--cp-comm-type a2a)."""

    def core(self, slice, c):
        attention, inputs = self.sublayer, self.inputs(slice.masks_and_positions, c)
        *heads, saved = attention.prepare(self.forward_kernel, c, inputs)
        sizes = [x.size(3) for x in heads]                     # query heads, keys and values of a group
        whole = in_order((yield from self.exchange(slice, self.by_heads(torch.cat(heads, dim=3)))))
        context, segment = attention.attend_forward(*whole.split(sizes, dim=3), inputs)
        own = yield from self.exchange(slice, torch.stack(by_rank(context, self.ranks)))
        return own.movedim(0, 2).flatten(2), (segment, saved, sizes)

    def core_backward(self, slice, gradient, saved, matmuls):
        attention, (segment, saved, sizes) = self.sublayer, saved
        arriving = self.exchange(slice, self.by_heads(gradient))
        if slice.deferred is None:
            self.ops.weight_gradients(slice, self.site, matmuls)       # they hide the all-to-all
        whole = in_order((yield from arriving))
        whole = torch.cat([*attention.attend_backward(segment, whole)], dim=3)
        own = yield from self.exchange(slice, torch.stack(by_rank(whole, self.ranks)))
        heads = own.movedim(0, 2).flatten(2, 3).split(sizes, dim=3)
        return attention.prepare_backward(self.backward_kernel, *heads, saved)

    def by_heads(self, own):
        """Cut own [b, s/c, groups or heads, ..] into each rank's heads: [c, b, s/c, groups/c or heads/c, ..]."""
        return own.unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()

    def exchange(self, slice, parts):
        """Send parts[i] to rank i. Return a generator that returns the received parts, in the order of the ranks."""
        each = [1] * len(parts)
        return self.send(slice, prepare_all_to_all(parts, each, each, self.group, "cp"))

    def inputs(self, masks_and_positions, c) -> AttentionInputs:
        """Return the AttentionInputs for whole samples, with rotary angles for this rank's places. c [b, s/c, ..]."""
        parts, number = self.mesh.tp * self.ranks, self.mesh.tp_rank * self.ranks + self.mesh.axis("cp")[1]
        return masks_and_positions.attention_inputs(
            self.sublayer, c, lambda mask: mask.chunk(parts, dim=1)[number].clone(), ranks=self.ranks)


ATTENTION = {"all_gather": GatheredKeys, "a2a": ExchangedHeads}        # --cp-comm-type
