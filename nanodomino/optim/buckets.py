"""Flat buffers: parameters of one kind side by side, their weights in one tensor, their gradients in another.

    weights      | qkv.weight | dense.weight | ... |pad|     the model's parameters are views of it
    main_grad    | . . . . . . . . . . . . . . . . . . |     fp32 when training in 16 bit; Domino adds to views of it

What goes over the wires, or into the optimizer, goes there as one tensor. But a flat buffer forgets whose numbers it
holds, and three things depend on it: decay (matrices only), how often a parameter exists in the world (shards once,
replicas on every tp rank, a tied matrix on two stages: in the norm each must count once), and whether first and last
stage must add up what they have, once the replicas have. So a bucket holds parameters of one kind.
"""

from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 16       # elements; a parameter starts at a multiple, as the matrix units of GPUs like it


@dataclass(frozen=True)
class ParameterKind:
    decay: bool          # a matrix: weight decay applies
    sharded: bool        # cut over tp; else every tp rank holds a copy
    partial_gradient: bool    # a copy on every tp rank, but each computes only a part of its gradient
    tied: bool           # the word embedding of which first and last stage hold a copy


def sort_into_buckets(model) -> list[tuple[ParameterKind, list[nn.Parameter]]]:
    """(kind, parameters) of each bucket: in the order of backward, cut at config.bucket_size parameters."""
    open_buckets, full, tied_copy = {}, [], model.tied_copy
    for weight in reversed(list(model.parameters())):
        sharded = weight.shard_dim is not None
        partial_gradient = not sharded and (weight.partial_gradient or model.config.sequence_shards > 1)
        kind = ParameterKind(weight.dim() >= 2, sharded, partial_gradient, tied=weight is tied_copy)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(weight)
        if sum(one.numel() for one in bucket) >= model.config.bucket_size:
            full.append((kind, open_buckets.pop(kind)))
    return full + list(open_buckets.items())


def flat_layout(parameters, parts: int) -> tuple[dict, int]:
    """({parameter: where it begins}, the whole length) of a flat buffer that can be cut into `parts`, in elements."""
    offsets, size = {}, 0
    for weight in parameters:
        offsets[weight] = size
        size += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
    return offsets, -(-size // (parts * ALIGNMENT)) * parts * ALIGNMENT


class Bucket:
    """Some parameters of one kind, flat: weights, gradients, and the part of both that this rank owns.

    shards_gradients: of the gradients it keeps that part alone, own_grad; main_grad comes when something is to be
    added, and goes to be reduced. Else main_grad stays, and own_grad is a part of it.
    """

    def __init__(self, kind: ParameterKind, parameters: list[nn.Parameter], parts: int, part: int,
                 shards_gradients: bool):
        self.kind, self.parameters, self.shards_gradients = kind, parameters, shards_gradients
        first = parameters[0]
        self.offsets, size = flat_layout(parameters, parts)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        for weight in parameters:
            place = self.view(weight, self.weights)
            place.copy_(weight.data)
            weight.data, weight.bucket = place, self
        self.own_weights = self.weights.chunk(parts)[part]
        self.own_offset = part * len(self.own_weights)
        self.master = self.own_weights if wide == first.dtype else self.own_weights.to(wide)
        self.allocate_gradients()
        own = self.main_grad.chunk(parts)[part]
        self.own_grad = self.master.grad = own.clone() if shards_gradients else own
        self.drop_gradients()

    def view(self, weight, flat):
        """A parameter's place in any flat tensor that is laid out as this bucket is."""
        offset = self.offsets[weight]
        return flat[offset:offset + weight.numel()].view(weight.shape)

    def allocate_gradients(self):
        """Memory for gradients, of zeros."""
        self.main_grad = torch.zeros_like(self.weights, dtype=self.master.dtype)
        for weight in self.parameters:
            weight.main_grad = self.view(weight, self.main_grad)

    def pop_gradients(self):
        """The gradients that have been added up, to be reduced."""
        if self.main_grad is None:
            self.allocate_gradients()                                  # nothing was: then zeros
        flat = self.main_grad
        self.drop_gradients()
        return flat

    def drop_gradients(self):
        """Where gradients are sharded, their memory goes to whoever has asked for them, or to nobody."""
        if self.shards_gradients:
            self.main_grad = None
            for weight in self.parameters:
                weight.main_grad = None

    def zero_grad(self):
        """Before a step."""
        self.drop_gradients()
        (self.own_grad if self.shards_gradients else self.main_grad).zero_()
