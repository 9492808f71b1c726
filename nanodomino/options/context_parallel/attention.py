"""Computes attention when c ranks share the tokens of each sample (context parallelism, --context-parallel-size).

The activations of a sample grow with its length, and tensor parallelism can cut them over only a few ranks. So c ranks
share a sample: each holds s/c of its tokens (places.py says which). Norms, MLPs, embedding and loss treat each token by
itself, and all gradients are sums over tokens. So outside attention, c ranks with parts of a sample are like c replicas
with shorter samples. (One exception: router.py sums the experts' counts over them.) Attention needs the tokens of other
ranks. --cp-comm-type chooses one of two ways:

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

**The causal mask.** With all_gather, a rank's queries are two separate parts of a sample, so its i-th query is not the
i-th token of the sample. On CPUs, in fp32, or with attention dropout, the rank's rows of an attention bias, [s/c, s],
say what each query attends to. On GPUs in 16 bits, varlen.py's kernel needs no bias: if a sequence has more keys than
queries, it aligns their *ends*. So a document's tokens in one of the rank's parts become a sequence of queries. The
keys of this sequence run from the document's start to the last of these queries. For c = 2 and one document:

    rank 0    queries 0 1    keys 0 1              rank 1    queries 2 3    keys 0 1 2 3
              queries 6 7    keys 0 1 .. 7                   queries 4 5    keys 0 1 .. 5

The kernel takes the keys of one sequence after the other, so keys that two sequences need are copied. A rank reads
s + s/(2c) keys of a sample, whichever parts it holds.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.domino import LinearPair
from nanodomino.layers.attention_mask import (attention_bias, first_of_document, rotation, starts_of, to_device,
                                              uses_varlen, varlen_attention)
from nanodomino.layers.dropout_and_positions import AttentionInputs
from nanodomino.options.context_parallel import by_rank, in_order, own_places
from nanodomino.overlap.slices import prepare_all_gather, prepare_all_to_all, prepare_reduce_scatter


@dataclass(frozen=True)
class GatheredInputs(AttentionInputs):
    """The AttentionInputs for this rank's queries and all keys."""
    keys: torch.Tensor | None = None         # which of the gathered keys attention reads


class SharedSampleAttention(LinearPair):
    """Runs attention of samples that the ranks of the cp group share."""

    def __init__(self, sublayer, mesh, ops, compiled, config):
        super().__init__(sublayer, ops, compiled)
        self.mesh, self.config, self.ranks, self.group = mesh, config, mesh.axis("cp")[0], mesh.group("cp")

    def send(self, slice, flight):
        """Launch a flight, let other slices compute, and return its tensor."""
        return self.ops.yield_then_wait(slice, self.site, [self.ops.launch(slice, self.site, flight)])

    def run_unless_deferred(self, slice, matmuls):
        """Run the weight gradients `matmuls` to hide a collective, unless the schedule defers them."""
        if slice.deferred is None:
            self.ops.weight_gradients(slice, self.site, matmuls)


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
        attention, ops, (segment, saved, keys, shape) = self.sublayer, self.ops, saved
        q, k, v = attention.attend_backward(segment, gradient)
        addends = k.new_zeros(shape)                           # gradients of all places from this rank's queries
        addends.flatten(0, 2).index_add_(0, keys.flatten(), torch.cat([k, v], dim=3).flatten(0, 1))
        flights = [ops.launch(slice, self.site, prepare_reduce_scatter(addends, shape[1:], self.group, "cp"))]
        self.run_unless_deferred(slice, matmuls)
        own = yield from ops.yield_then_wait(slice, self.site, flights)
        return attention.prepare_backward(self.backward_kernel, q, *own.split(1, dim=3), saved)

    def inputs(self, masks_and_positions, c) -> GatheredInputs:
        """Return the AttentionInputs for this rank's queries and all keys. c [b, s/c, ..]: the output of W1."""
        config, mesh, this = self.config, self.mesh, masks_and_positions
        b, s = c.size(0), c.size(1) * self.ranks
        mask = this.attention_dropout_mask(self.site, s, c)
        if mask is not None:
            mask = own_places(mask.chunk(mesh.tp, dim=1)[mesh.tp_rank], mesh, dim=2)
        if this.shared is None:
            documents = this.extras.get("documents", torch.zeros(b, s, dtype=torch.int64))
            find = queries_and_keys if uses_varlen(config, c.device) else bias_and_keys
            this.shared = dict(rotary=rotation(config, this.positions, c.size(1), c.device),
                               **find(config, documents, mesh, c.device))
        return GatheredInputs(mask, **this.shared)


def gathered_places(b: int, s: int, ranks: int):
    """Return the index [b, s] of each place of each sample in the gathered tensor [c, b, s/c], in the host's memory."""
    return in_order(torch.arange(b * s).view(ranks, b, -1))


def bias_and_keys(config, documents, mesh, device) -> dict:
    """Return the fields of AttentionInputs for attention with a bias. documents [b, s], in the host's memory."""
    different = documents if documents.any() else documents[:1]                    # one bias serves all samples
    bias = attention_bias(to_device(different, device), config.params_dtype)
    return dict(attention_bias=own_places(bias, mesh, dim=2),
                keys=to_device(gathered_places(*documents.shape, mesh.axis("cp")[0]), device))


def queries_and_keys(config, documents, mesh, device) -> dict:
    """Return the fields of AttentionInputs for varlen attention. documents [b, s], in the host's memory."""
    places = torch.arange(documents.numel()).view(documents.shape)
    first = places.where(first_of_document(documents), 0).cummax(dim=1).values     # the first place of the document
    documents, last, first = (own_places(x, mesh).reshape(2 * len(x), -1) for x in (documents, places, first))
    begins = F.pad(first_of_document(documents).flatten().nonzero().flatten(), (0, 1), value=documents.numel())
    first, last = first.flatten()[begins[:-1]], last.flatten()[begins[1:] - 1]     # each sequence's first and last key
    lengths = last + 1 - first
    starts = F.pad(lengths.cumsum(0), (1, 0))
    keys = torch.arange(starts[-1]) + (first - starts[:-1]).repeat_interleave(lengths)
    keys = gathered_places(*places.shape, mesh.axis("cp")[0]).flatten()[keys].unsqueeze(0)
    return dict(attend=partial(varlen_attention, documents=starts_of(begins, device, keys=starts_of(starts, device))),
                keys=to_device(keys, device))


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
        self.run_unless_deferred(slice, matmuls)
        whole = in_order((yield from arriving))
        whole = torch.cat([*attention.attend_backward(segment, whole)], dim=3)
        own = yield from self.exchange(slice, torch.stack(by_rank(whole, self.ranks)))
        heads = own.movedim(0, 2).flatten(2, 3).split(sizes, dim=3)
        return attention.prepare_backward(self.backward_kernel, *heads, saved)

    def by_heads(self, own):
        """Cut own [b, s/c, groups or heads, ..] into each rank's heads: [c, b, s/c, groups/c or heads/c, ..]."""
        return own.unflatten(2, (self.ranks, -1)).movedim(2, 0).contiguous()

    def exchange(self, slice, parts):
        """Send parts[i] to rank i. The generator returns the received parts, in the order of the ranks."""
        each = [1] * len(parts)
        return self.send(slice, prepare_all_to_all(parts, each, each, self.group, "cp"))

    def inputs(self, masks_and_positions, c) -> AttentionInputs:
        """Return the AttentionInputs for whole samples; the rotary angles are for this rank's places. c [b, s/c, ..].
        """
        config, mesh, this = self.config, self.mesh, masks_and_positions
        rank = mesh.axis("cp")[1]
        mask = this.attention_dropout_mask(self.site, c.size(1) * self.ranks, c)
        if mask is not None:
            mask = mask.chunk(mesh.tp * self.ranks, dim=1)[mesh.tp_rank * self.ranks + rank].clone()
        if this.shared is None:
            this.shared = dict(rotary=rotation(config, this.positions, c.size(1), c.device),
                               **config.attention_extras(this.extras, c.device))
        return AttentionInputs(mask, **this.shared)


ATTENTION = {"all_gather": GatheredKeys, "a2a": ExchangedHeads}        # --cp-comm-type
