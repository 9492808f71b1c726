"""Flat buffers for parameters of the same kind: their weights in one tensor, their gradients in another.

    weights      | qkv.weight | dense.weight | ... |pad|     the model's parameters are views of it
    main_grad    | . . . . . . . . . . . . . . . . . . |     fp32 in 16-bit training; domino.py adds to views of it

A collective or an optimizer then treats a bucket as one tensor. But a flat buffer forgets which parameter a number
belongs to. So the parameters of a bucket agree in all that matters later: whether weight decay applies, how many copies
the world holds (the global norm counts each parameter once), and which ranks must sum their gradients.
"""

from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 16       # elements: parameters start at multiples of it, because tensor cores need aligned matrices


@dataclass(frozen=True)
class ParameterKind:
    decay: bool               # weight decay applies: the parameter is a matrix
    sharded: bool             # each tensor-parallel rank holds a shard; otherwise each holds a copy
    partial_gradient: bool    # a copy on every tp rank, but each computes only a part of its gradient
    tied: bool                # the word embedding, of which the first and the last stage hold a copy each


def sort_into_buckets(model) -> list[tuple[ParameterKind, list[nn.Parameter]]]:
    """Return (kind, parameters) of each bucket in the order of backward. Buckets end at config.bucket_size elements."""
    open_buckets, full, tied_copy = {}, [], model.tied_copy
    for weight in reversed(list(model.parameters())):
        sharded = weight.shard_dim is not None
        partial_gradient = not sharded and (weight.partial_gradient or model.config.sequence_shards > 1)
        kind = ParameterKind(decay=weight.dim() >= 2, sharded=sharded, partial_gradient=partial_gradient,
                             tied=weight is tied_copy)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(weight)
        if sum(parameter.numel() for parameter in bucket) >= model.config.bucket_size:
            full.append((kind, open_buckets.pop(kind)))
    return full + list(open_buckets.items())


def flat_layout(parameters, partitions: int) -> tuple[dict, int]:
    """Return ({parameter: offset}, length) in elements of a flat buffer that divides into equal, aligned partitions."""
    offsets, size = {}, 0
    for weight in parameters:
        offsets[weight] = size
        size += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
    return offsets, -(-size // (partitions * ALIGNMENT)) * partitions * ALIGNMENT


class Bucket:
    """Parameters of one kind in flat buffers that divide into equal partitions, of which this rank owns one.

    own_weights and own_grad are the rank's partition; master is own_weights in fp32 or wider, which the optimizer
    updates. With shards_gradients (ZeRO-2) the rank keeps only own_grad: main_grad is allocated when a gradient is
    added and freed when it is reduced. Otherwise own_grad is a view of main_grad.
    """

    def __init__(self, kind: ParameterKind, parameters: list[nn.Parameter], partitions: int, partition: int,
                 shards_gradients: bool):
        self.kind, self.parameters, self.shards_gradients = kind, parameters, shards_gradients
        first = parameters[0]
        self.offsets, size = flat_layout(parameters, partitions)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        for weight in parameters:
            view = self.view(weight, self.weights)
            view.copy_(weight.data)
            weight.data, weight.bucket = view, self
        self.own_weights = self.weights.chunk(partitions)[partition]
        self.own_offset = partition * len(self.own_weights)
        self.master = self.own_weights if wide == first.dtype else self.own_weights.to(wide)
        self.allocate_gradients()
        own = self.main_grad.chunk(partitions)[partition]
        self.own_grad = self.master.grad = own.clone() if shards_gradients else own
        self.drop_gradients()

    def view(self, weight, flat):
        """Return a parameter's range, in its shape, of a flat tensor with this bucket's layout."""
        offset = self.offsets[weight]
        return flat[offset:offset + weight.numel()].view(weight.shape)

    def allocate_gradients(self):
        self.main_grad = torch.zeros_like(self.weights, dtype=self.master.dtype)
        for weight in self.parameters:
            weight.main_grad = self.view(weight, self.main_grad)

    def pop_gradients(self):
        """Return the accumulated gradients, zeros if none were added, for the reduce."""
        if self.main_grad is None:
            self.allocate_gradients()
        flat = self.main_grad
        self.drop_gradients()
        return flat

    def drop_gradients(self):
        """In ZeRO-2, let go of main_grad; its memory is freed once the reduce is done."""
        if self.shards_gradients:
            self.main_grad = None
            for weight in self.parameters:
                weight.main_grad = None

    def zero_grad(self):
        self.drop_gradients()
        (self.own_grad if self.shards_gradients else self.main_grad).zero_()
