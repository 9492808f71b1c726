"""Declares each parameter once: how it is cut, which ranks sum its gradient, and how the optimizer updates it.

                          cut           replicas     addends                     update
    W1 of an MLP          {0: "tp"}     "dp"         ()                          with weight decay
    weight of a norm      {}            "dp"         ()                          without
    tied word embedding   {0: "tp"}     "dp"         ("embedding",)              with weight decay

A gradient is summed over up to two kinds of groups. First over the parameter's *replicas*: ranks that hold the same
shard and train on different tokens. Then, once per step, over groups in which each rank computes only an *addend* of
the gradient. For example, the first and the last stage each hold a copy of a tied embedding: one looks up tokens in it,
the other computes logits.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterKind:
    """Says how the optimizer treats a parameter. All parameters of a bucket (optim/buckets.py) have the same kind.

    update     "decay": by --optimizer, with weight decay, because it is a matrix; "no_decay": without weight decay; or
               a name that an option adds (config.updates)
    shards     the axes over which the parameter is cut, such as ("tp",); () if it is not
    replicas   the axis whose ranks hold the same shard and train on different tokens; zero.py sums their gradients
    addends    the groups in which every rank holds a copy but computes only an addend of the gradient, such as ("tp",)
    """
    update: str
    shards: tuple[str, ...] = ()
    replicas: str = "dp"
    addends: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """Declares a parameter. The model, buckets, ZeRO, checkpoints, drift checks and formulas all read it.

    shape        the shape of the whole tensor, as checkpoints store it
    offset, size the box of the whole tensor that is this rank's shard
    parts        how many rows in turn belong to each of the matrices that are interleaved in this one, such as q, k, v
    std, value   the standard deviation of normal initial values; if std is None, all values are `value`
    """
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    kind: ParameterKind
    parts: tuple[int, ...]
    std: float | None
    value: float


def parameter(shape, config, mesh, *, cut=None, view=None, parts=None, std=None, value=0.0, replicas="dp",
              addends=(), update=None, dtype=None) -> nn.Parameter:
    """Create this rank's shard of a parameter, uninitialized. GPT.initialize() in model.py fills it.

    shape, parts, std, value  see ParameterSpec; parts None: the rows belong to one matrix
    cut                       {dimension: axis}: each rank of this axis of the mesh holds an equal part of the dimension
    view                      the parameter's shape, as for Tensor.view; None: the dimensions of the whole tensor
    replicas, addends         see ParameterKind
    update                    see ParameterKind; None: config.matrix_update for a matrix, else "no_decay"
    dtype                     None: the training type
    """
    cut, shards = cut or {}, tuple(sorted((cut or {}).values()))
    axes = [mesh.axis(cut[dim]) if dim in cut else (1, 0) for dim in range(len(shape))]
    size = tuple(length // ranks for length, (ranks, _) in zip(shape, axes))
    offset = tuple(length * rank for length, (_, rank) in zip(size, axes))
    addends = tuple(sorted(group for group in {*addends, *config.addends(shards)} if mesh.axis(group)[0] > 1))
    update = update or (config.matrix_update if len(view or shape) > 1 else "no_decay")
    kind = ParameterKind(update, shards, replicas, addends)
    shard = torch.empty(size, device=mesh.device, dtype=dtype or config.params_dtype)
    weight = nn.Parameter(shard.view(view or size))
    weight.spec = ParameterSpec(tuple(shape), offset, size, kind, parts or shape[-2:-1], std, value)
    weight.main_grad = weight.bucket = None        # set by optim/buckets.py; backward adds to main_grad
    return weight


def local_shard(whole, weight):
    """Return this rank's shard of a parameter in the parameter's shape. whole: the whole tensor, in any shape."""
    shard = whole.view(weight.spec.shape)
    for dim, (start, length) in enumerate(zip(weight.spec.offset, weight.spec.size)):
        shard = shard.narrow(dim, start, length)
    return shard.reshape(weight.shape)
