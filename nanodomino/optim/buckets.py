"""Declares parameters, and stores all that are treated alike in buckets: flat tensors of weights and of gradients.

**A parameter is declared once**: how it is cut, which ranks sum its gradient, and how the optimizer updates it.

                          cut           replicas     addends                     update
    W1 of an MLP          {0: "tp"}     "dp"         ()                          with weight decay
    weight of a norm      {}            "dp"         ()                          without
    tied word embedding   {0: "tp"}     "dp"         ("embedding",)              with weight decay

A gradient is summed first over the parameter's *replicas*: ranks that hold the same shard and train on different
tokens. Then, once per step, it is summed over groups in which each rank computes only an *addend* of it. For example,
the first stage looks up tokens in its copy of a tied embedding, and the last stage computes logits with another copy.

**A bucket** keeps the weights of many parameters in one flat tensor, and their gradients in another:

    weights      | qkv.weight | dense.weight | ... |pad|     the model's parameters are views of it
    main_grad    | . . . . . . . . . . . . . . . . . . |     fp32 in 16-bit training; backward adds to views of it

A collective or an optimizer then treats a bucket as one tensor. So all its parameters must have the same ParameterKind:
the same weight decay, copies on the same ranks (of which the norm counts one), and gradients that the same ranks sum.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

ALIGNMENT = 16       # each parameter starts at a multiple of 16 elements, because tensor cores need aligned matrices


@dataclass(frozen=True)
class ParameterKind:
    """Says which ranks sum a parameter's gradient, and how the optimizer updates the parameter."""
    update: str                         # "decay": with weight decay; "no_decay": without; or another of config.updates
    shards: tuple[str, ...] = ()        # the axes over which the parameter is cut, such as ("tp",)
    replicas: str = "dp"                # the axis whose ranks hold the same shard and train on different tokens
    addends: tuple[str, ...] = ()       # the groups in which each rank computes only an addend of the gradient


@dataclass(frozen=True)
class ParameterSpec:
    """Declares a parameter. The model, buckets, ZeRO, checkpoints, drift checks and formulas all read it."""
    shape: tuple[int, ...]              # of the whole tensor, as checkpoints store it
    offset: tuple[int, ...]             # where this rank's shard starts in the whole tensor
    size: tuple[int, ...]               # the shape of the shard
    kind: ParameterKind
    parts: tuple[int, ...]              # the numbers of rows of interleaved matrices, such as q, k and v
    std: float | None                   # the standard deviation of normal initial values; None: all are `value`
    value: float


def parameter(shape, config, mesh, *, cut=None, view=None, parts=None, std=None, value=0.0, replicas="dp",
              addends=(), update=None, dtype=None) -> nn.Parameter:
    """Create this rank's shard of a parameter, uninitialized. GPT.initialize() in model.py fills it.

    cut      {dimension: axis}: each rank of this axis of the mesh holds an equal part of the dimension
    view     the parameter's shape, as for Tensor.view; None: the dimensions of the whole tensor
    update   None: config.matrix_update for a matrix, else "no_decay"
    dtype    None: the training type
    others   see ParameterSpec and ParameterKind; parts None: all rows belong to one matrix
    """
    cut = cut or {}
    shards = tuple(sorted(cut.values()))
    axes = [mesh.axis(cut[dim]) if dim in cut else (1, 0) for dim in range(len(shape))]
    size = tuple(length // ranks for length, (ranks, _) in zip(shape, axes))
    offset = tuple(length * rank for length, (_, rank) in zip(size, axes))
    addends = tuple(sorted(group for group in {*addends, *config.addends(shards)} if mesh.axis(group)[0] > 1))
    update = update or (config.matrix_update if len(view or shape) > 1 else "no_decay")
    shard = torch.empty(size, device=mesh.device, dtype=dtype or config.params_dtype)
    weight = nn.Parameter(shard.view(view or size))
    kind = ParameterKind(update, shards, replicas, addends)
    weight.spec = ParameterSpec(tuple(shape), offset, size, kind, parts or shape[-2:-1], std, value)
    weight.main_grad = weight.bucket = None        # set by Bucket; backward adds to main_grad
    return weight


def local_shard(whole, weight):
    """Return this rank's shard of a parameter in the parameter's shape. whole: the whole tensor, in any shape."""
    own = tuple(slice(start, start + length) for start, length in zip(weight.spec.offset, weight.spec.size))
    return whole.view(weight.spec.shape)[own].reshape(weight.shape)


def sort_into_buckets(model) -> list[tuple[ParameterKind, list[nn.Parameter]]]:
    """Return a (kind, parameters) tuple for each bucket. Parameters are added in the order of backward, and a bucket is
    full when it has config.bucket_size elements or more."""
    filling, full = {}, []
    for weight in reversed(list(model.parameters())):
        kind = weight.spec.kind
        filling.setdefault(kind, []).append(weight)
        if sum(other.numel() for other in filling[kind]) >= model.config.bucket_size:
            full.append((kind, filling.pop(kind)))
    return full + list(filling.items())


def flat_layout(parameters, partitions: int) -> tuple[dict, int]:
    """Return ({parameter: offset}, length) of a flat buffer of equal, aligned partitions, in elements."""
    *offsets, size = accumulate((-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in parameters), initial=0)
    return dict(zip(parameters, offsets)), -(-size // (partitions * ALIGNMENT)) * partitions * ALIGNMENT


class Bucket:
    """Holds parameters of one kind in flat buffers, of whose equal partitions this rank owns number `partition`.

    weights, main_grad: the whole flat buffers, with the weights and the gradients of all parameters.
    own_weights, own_grad: this rank's partition of them.
    master: own_weights in fp32 or wider, which the optimizer updates. In fp32 training it is own_weights itself.
    derived: copies of weights in other types, made once a step.

    With shards_gradients (ZeRO-2) only own_grad is kept: main_grad is allocated when a gradient is added, and freed
    after its reduce. Otherwise own_grad is a view of main_grad."""

    def __init__(self, kind: ParameterKind, parameters: list[nn.Parameter], partitions: int, partition: int,
                 shards_gradients: bool):
        self.kind, self.parameters, self.shards_gradients = kind, parameters, shards_gradients
        self.partitions, self.partition, self.derived = partitions, partition, {}
        self.offsets, size = flat_layout(parameters, partitions)
        self.weights = parameters[0].new_zeros(size)
        for weight in parameters:
            view = self.view(weight, self.weights)
            view.copy_(weight.data)
            weight.data, weight.bucket = view, self
        self.own_weights = self.weights.chunk(partitions)[partition]
        self.own_offset = partition * len(self.own_weights)
        self.master = self.own_weights.to(torch.promote_types(self.weights.dtype, torch.float32))
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
