"""Tensor parallelism: a matrix cut over t ranks, and the all-reduces that the cut needs (Megatron-LM, 1909.08053,
section 3).

Cut the first matrix of a pair by its output features and the second by its input features. Then each rank works alone
on its own features between the two matmuls, and one all-reduce completes the pair. PyTorch stores a weight as
[out, in], so rank i holds rows of W1 and columns of W2 (the paper writes x A, where these rows are columns):

                      column-parallel                         core             row-parallel
      h [b, s, h] --f--> c = h W1[i]^T + b1[i] [b, s, ffn/t] --gelu--> a --> a W2[i]^T [b, s, h], partial sum --g--> y

      f   forward: identity (every rank has h)               backward: all-reduce (each rank has a partial dL/dh)
      g   forward: all-reduce (each rank has a partial y)    backward: identity (dL/dy is the gradient of each term)

f and g are mirror images. If g's backward is written as another all-reduce, the gradients inside the last sublayer are
t times too large. AdamW hides that, because it divides by the gradient's own size. Every sublayer below gets a wrong
direction too, because in x + sublayer(x) the skip path counts once and the branch t times. Training does not break:
with tp 2, nano's 200 steps end at a validation loss of 2.49 instead of 2.28. The gradient of W1 in each MLP at the
first step, wrong against right:

      layer               7      6      5      4      3      2      1      0
      ratio of norms   2.00   2.40   2.93   3.67   4.83   6.50   9.53  15.38
      cosine           1.00   0.95   0.89   0.84   0.79   0.72   0.66   0.56

Biases: b1 is cut like the output of its matmul. b2 is whole on every rank and must be added *after* the all-reduce, or
it counts t times. RowParallelLinear leaves that to its caller (Megatron's `skip_bias_add`), who adds it with the
residual.

The vocabulary is cut the same way. Each rank owns v/t rows of the embedding, and the loss is computed without gathering
the logits (layers/cross_entropy.py).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def parameter(shape, config, mesh, *, shard_dim=None, partition_stride=1, std=None, value=0.0,
              partial_gradient=False) -> nn.Parameter:
    """Create this rank's shard of a parameter, uninitialized. GPT.initialize() in model.py fills it.

    shape              shape of the whole tensor
    shard_dim          the dimension cut over tp; None: every tp rank holds a copy
    partition_stride   number of equal matrices stacked along shard_dim, each cut on its own (Megatron-LM's name)
    std, value         initialize from a normal distribution with this standard deviation, or with a constant
    partial_gradient   whether each tp rank computes only a part of the gradient of its copy
    """
    local = list(shape)
    if shard_dim is not None:
        local[shard_dim] //= mesh.tp
    weight = nn.Parameter(torch.empty(local, device=mesh.device, dtype=config.params_dtype))
    weight.full_shape, weight.shard_dim, weight.partition_stride = tuple(shape), shard_dim, partition_stride
    weight.init_std, weight.init_value, weight.partial_gradient = std, value, partial_gradient and mesh.tp > 1
    weight.main_grad = weight.bucket = None        # set by optim/buckets.py; backward adds to main_grad
    return weight


def local_shard(whole, weight, mesh):
    """Return this rank's shard of a whole tensor that is cut as `weight` is."""
    if weight.shard_dim is None:
        return whole
    shards = [matrix.chunk(mesh.tp, dim=weight.shard_dim)[mesh.tp_rank]
              for matrix in whole.chunk(weight.partition_stride, dim=weight.shard_dim)]
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=weight.shard_dim)


class CopyToTensorParallel(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)   # autograd may share it with another branch
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def copy_to_tensor_parallel(x, group):
    """Apply f, unless the group has a single rank."""
    return CopyToTensorParallel.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_parallel(partial, group):
    """Apply g, unless the group has a single rank."""
    return ReduceFromTensorParallel.apply(partial, group) if group.size() > 1 else partial


class ColumnParallelLinear(nn.Module):
    """Computes x [.., in] -> x W^T + bias [.., out/t]: this rank's output features."""

    def __init__(self, features_in, features_out, config, mesh, bias=True, partition_stride=1):
        super().__init__()
        self.group = mesh.tp_group
        cut = dict(shard_dim=0, partition_stride=partition_stride)
        self.weight = parameter((features_out, features_in), config, mesh, std=config.init_method_std, **cut)
        self.bias = parameter((features_out,), config, mesh, **cut) if bias else None

    def forward(self, x):
        return F.linear(copy_to_tensor_parallel(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Computes x [.., in/t] -> x W^T summed over tp ranks [.., out]. The caller adds `bias` [out] to the sum."""

    def __init__(self, features_in, features_out, config, mesh, bias=True):
        super().__init__()
        self.group = mesh.tp_group
        std = config.init_method_std / (2 * config.num_layers) ** 0.5      # GPT-2: 2L sublayers add to the residual
        self.weight = parameter((features_out, features_in), config, mesh, shard_dim=1, std=std)
        self.bias = parameter((features_out,), config, mesh) if bias else None

    def forward(self, x):
        return reduce_from_tensor_parallel(F.linear(x, self.weight), self.group)


class VocabParallelEmbedding(nn.Module):
    """Holds rows [first_row, first_row + padded_vocab/t) of the word embedding: num_words words, then padding.

    As a head it computes `num_logits` logits: the number of words rounded up to a multiple of 8, because matrix units
    need aligned sizes and GPT-2's 50257 is odd. The loss ignores the logits of padding rows.
    """

    def __init__(self, config, mesh):
        super().__init__()
        self.group = mesh.tp_group
        self.weight = parameter((config.padded_vocab_size, config.hidden_size), config, mesh, shard_dim=0,
                                std=config.init_method_std)
        rows = config.padded_vocab_size // mesh.tp
        self.first_row = rows * mesh.tp_rank
        self.num_words = min(max(config.vocab_size - self.first_row, 0), rows)
        self.num_logits = min(-(-self.num_words // 8) * 8, rows)

    def local_rows(self, tokens):
        """tokens [b, s] -> (row in this shard, 0 for words of other ranks; whether this rank has it), both [b, s]."""
        row = tokens - self.first_row
        is_local = (row >= 0) & (row < self.num_words)
        return row.where(is_local, 0), is_local

    def partial_embeddings(self, tokens):
        """tokens [b, s] -> [b, s, h]: the embeddings of this rank's words, zeros elsewhere."""
        row, is_local = self.local_rows(tokens)
        return F.embedding(row, self.weight) * is_local.unsqueeze(-1)

    def forward(self, tokens):
        return reduce_from_tensor_parallel(self.partial_embeddings(tokens), self.group)

    def logits_weight(self):
        """Return the rows [num_logits, h] that a head multiplies by."""
        return self.weight[:self.num_logits]


class GatherFromTensorParallel(torch.autograd.Function):
    """Forward joins the ranks' tensors along the last dimension; backward keeps the gradient of this rank's part.

    Every rank computes the same from the gathered tensor, so each already has the whole gradient, and backward needs no
    communication.
    """

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None


def gather_logits(logits, vocabulary: VocabParallelEmbedding, vocab_size: int):
    """logits [b, s, num_words] of each rank's words -> [b, s, vocab_size] on every rank."""
    padded = F.pad(logits, (0, vocabulary.weight.size(0) - vocabulary.num_words))
    whole = GatherFromTensorParallel.apply(padded, vocabulary.group) if vocabulary.group.size() > 1 else padded
    return whole[..., :vocab_size]
