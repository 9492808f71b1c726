"""Declares each parameter once: how it is cut, which ranks sum its gradient, and how the optimizer updates it.

                          cut           replicas     addends                     update
    W1 of an MLP          {0: "tp"}     "dp"         ()                          with weight decay
    weight of a norm      {}            "dp"         () or ("tp",), see below    without
    tied word embedding   {0: "tp"}     "dp"         ("embedding",)              with weight decay
    W1 of the experts     {0: "ep",     "expert_dp"  ()                          with weight decay
                           1: "tp"}

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

    update     "decay": by the optimizer, with weight decay, because it is a matrix; "no_decay": without weight decay;
               "sign": against the sign of its gradient, which the gradient norm leaves out (layers/router.py). The
               parameter is fp32 or wider, because 16 bits would round its small steps away
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
    std, value   the standard deviation of normal initial values; if std is None, all values are `value`
    uses         how many times a stage uses the parameter in a microbatch; its gradient is complete after that many
    """
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    kind: ParameterKind
    std: float | None
    value: float
    uses: int


def parameter(shape, config, mesh, *, cut=None, view=None, std=None, value=0.0, replicas="dp", addends=(),
              update=None, uses=1) -> nn.Parameter:
    """Create this rank's shard of a parameter, uninitialized. GPT.initialize() in model.py fills it.

    shape, std, value, uses   see ParameterSpec
    cut                       {dimension: axis}: each rank of this axis of the mesh holds an equal part of the dimension
    view                      the parameter's shape, as for Tensor.view; None: the dimensions of the whole tensor
    replicas, addends         see ParameterKind
    update                    see ParameterKind; None: "decay" for a matrix, else "no_decay"

    With sequence parallelism, each tp rank computes only an addend of the gradient of a parameter that is not cut over
    tp, because it has only some of the tokens.
    """
    cut, shards = cut or {}, tuple(sorted((cut or {}).values()))
    axes = [mesh.axis(cut[dim]) if dim in cut else (1, 0) for dim in range(len(shape))]
    size = tuple(length // ranks for length, (ranks, _) in zip(shape, axes))
    offset = tuple(length * rank for length, (_, rank) in zip(size, axes))
    if config.sequence_shards > 1 and "tp" not in shards:
        addends = {"tp", *addends}
    addends = tuple(sorted(group for group in addends if mesh.axis(group)[0] > 1))
    update = update or ("decay" if len(view or shape) > 1 else "no_decay")
    kind = ParameterKind(update, shards, replicas, addends)
    dtype = torch.promote_types(config.params_dtype, torch.float32) if update == "sign" else config.params_dtype
    shard = torch.empty(size, device=mesh.device, dtype=dtype)
    weight = nn.Parameter(shard.view(view or size))
    weight.spec = ParameterSpec(tuple(shape), offset, size, kind, std, value, uses)
    weight.main_grad = weight.bucket = None        # set by optim/buckets.py; backward adds to main_grad
    return weight


def local_shard(whole, weight):
    """Return this rank's shard of a parameter in the parameter's shape. whole: the whole tensor, in any shape."""
    shard = whole.view(weight.spec.shape)
    for dim, (start, length) in enumerate(zip(weight.spec.offset, weight.spec.size)):
        shard = shard.narrow(dim, start, length)
    return shard.reshape(weight.shape)
