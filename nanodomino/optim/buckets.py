"""Buckets: parameters of the same kind, with their weights in one flat tensor and their gradients in another.

    weights      | qkv.weight | dense.weight | ... |pad|     the model's parameters are views of it
    main_grad    | . . . . . . . . . . . . . . . . . . |     fp32 in 16-bit training; backward adds to views of it

A collective or an optimizer then treats a bucket as one tensor, whatever parameters it holds. So all parameters of a
bucket must have the same ParameterKind (parameter_spec.py): the same weight decay, copies on the same ranks (the global
norm counts each parameter once), and gradients that the same ranks must sum.
"""

from collections import Counter

import torch
from torch import nn

from nanodomino.optim.buckets import ParameterKind

ALIGNMENT = 16       # each parameter starts at a multiple of 16 elements, because tensor cores need aligned matrices


def sort_into_buckets(model) -> list[tuple[ParameterKind, list[nn.Parameter]]]:
    """Return a (kind, parameters) tuple for each bucket. Parameters are added in the order of backward, and a bucket is
    full when it has config.bucket_size elements or more."""
    open_buckets, sizes, full = {}, Counter(), []
    for weight in reversed(list(model.parameters())):
        kind = weight.spec.kind
        open_buckets.setdefault(kind, []).append(weight)
        sizes[kind] += weight.numel()
        if sizes[kind] >= model.config.bucket_size:
            full.append((kind, open_buckets.pop(kind)))
            del sizes[kind]
    return full + list(open_buckets.items())


def flat_layout(parameters, partitions: int) -> tuple[dict, int]:
    """Return ({parameter: offset}, length) of a flat buffer, in elements. The length divides into `partitions` equal,
    aligned partitions."""
    offsets, size = {}, 0
    for weight in parameters:
        offsets[weight] = size
        size += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
    return offsets, -(-size // (partitions * ALIGNMENT)) * partitions * ALIGNMENT


class Bucket:
    """Parameters of one kind in flat buffers. The buffers divide into equal partitions, and this rank owns the one with
    the number `partition`.

    weights, main_grad: the whole flat buffers, with the weights and the gradients of all parameters.
    own_weights, own_grad: this rank's partition of them.
    master: own_weights in fp32 or wider, which the optimizer updates. In fp32 training it is own_weights itself.

    With shards_gradients (ZeRO-2) only own_grad is kept: main_grad is allocated when a gradient is added, and freed
    after its reduce. Otherwise own_grad is a view of main_grad.
    """

    def __init__(self, kind: ParameterKind, parameters: list[nn.Parameter], partitions: int, partition: int,
                 shards_gradients: bool):
        self.kind, self.parameters, self.shards_gradients = kind, parameters, shards_gradients
        self.partitions, self.partition = partitions, partition
        first = parameters[0]
        self.offsets, size = flat_layout(parameters, partitions)
        wide = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        for weight in parameters:
            view = self.view(weight, self.weights)
            view.copy_(weight.data)
            weight.data, weight.bucket = view, self
        self.derived = {}                              # copies in other types, made once a step
        self.own_weights = self.weights.chunk(partitions)[partition]
        self.own_offset = partition * len(self.own_weights)
        self.master = self.own_weights if wide == first.dtype else self.own_weights.to(wide)
        self.allocate_gradients()
        own = self.main_grad.chunk(partitions)[partition]
        self.own_grad = self.master.grad = own.clone() if shards_gradients else own
        self.drop_gradients()

    def view(self, weight, flat):
        """Return one parameter's part of `flat`, in the parameter's shape. `flat` is laid out like this bucket."""
        offset = self.offsets[weight]
        return flat[offset:offset + weight.numel()].view(weight.shape)

    def allocate_gradients(self):
        self.main_grad = torch.zeros_like(self.weights, dtype=self.master.dtype)
        for weight in self.parameters:
            weight.main_grad = self.view(weight, self.main_grad)

    def pop_gradients(self):
        """Return main_grad for the reduce; it is zero if no gradient was added. In ZeRO-2, also drop_gradients()."""
        if self.main_grad is None:
            self.allocate_gradients()
        flat = self.main_grad
        self.drop_gradients()
        return flat

    def drop_gradients(self):
        """In ZeRO-2, drop the references to main_grad, so that its memory is freed once the reduce is done."""
        if self.shards_gradients:
            self.main_grad = None
            for weight in self.parameters:
                weight.main_grad = None

    def zero_grad(self):
        self.drop_gradients()
        (self.own_grad if self.shards_gradients else self.main_grad).zero_()
