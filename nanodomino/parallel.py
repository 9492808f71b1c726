"""Tensor parallelism by hand: a matrix cut over t processes, and where the wires must be (Megatron-LM, 1909.08053,
section 3).

Cut the first matrix of a pair by its output features and the second by its input features. Between them each process
works alone on its own features; one sum joins the pair again. Torch stores a matrix as [out, in], so W1[i] is a run of
rows and W2[i] one of columns (the paper multiplies from the right, x A, and its columns are these rows):

                      column-parallel                         core             row-parallel
      h [b, s, h] --f--> c = h W1[i]^T + b1[i] [b, s, ffn/t] --gelu--> a --> a W2[i]^T [b, s, h], a part of y --g--> y

      f   forward: nothing (every rank has h)         backward: all-reduce (each rank knows a part of dL/dh)
      g   forward: all-reduce (each has a part of y)  backward: nothing (the gradient of a sum is handed to each part)

f and g are mirror images. Write g's backward as another all-reduce, and the last sublayer's gradients are t times too
large, which AdamW does not notice: it divides by the gradient's own size. Every sublayer below it is wrong in direction
too, for in x + sublayer(x) the skip path counts once and the branch t times. Training does not break: on tp 2 nano's
200 steps end at a validation loss of 2.49 instead of 2.28. W1's first gradient in each MLP, wrong against right:

      layer               7      6      5      4      3      2      1      0
      ratio of norms   2.00   2.40   2.93   3.67   4.83   6.50   9.53  15.38
      cosine           1.00   0.95   0.89   0.84   0.79   0.72   0.66   0.56

Biases: that of a column-parallel linear is cut like its output. That of a row-parallel one is whole on every rank and
must be added *after* the sum, or it counts t times: it is left to the caller (Megatron's `skip_bias_add`), who adds it
together with the residual.

The vocabulary is cut the same way: each rank owns rows [first, first + v/t) of the embedding, and the loss is computed
on logits that are never gathered.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def parameter(shape, config, mesh, *, shard_dim=None, partition_stride=1, std=None, value=0.0, partial_gradient=False) -> nn.Parameter:
    """An unfilled local shard that knows how it is cut and how the whole is drawn (see initialize in model.py).

    shape: of the whole; shard_dim: dimension cut over tp, None for a replica; partition_stride: equal ones along that dimension,
    each of which is cut, so that a rank has its part of each (Megatron-LM's partition_stride); std: of a normal draw,
    else `value`; partial_gradient: it is not cut, but each rank has a part of its gradient.
    """
    local = list(shape)
    if shard_dim is not None:
        local[shard_dim] //= mesh.tp
    weight = nn.Parameter(torch.empty(local, device=mesh.device, dtype=config.params_dtype))
    weight.full_shape, weight.shard_dim, weight.partition_stride, weight.init_std, weight.init_value = (
        tuple(shape), shard_dim, partition_stride, std, value)
    weight.partial_gradient = partial_gradient and mesh.tp > 1
    weight.main_grad = weight.bucket = None        # where Domino adds weight gradients, and whose that is: buckets.py
    return weight


def local_shard(whole, weight, mesh):
    """This rank's shard of a whole tensor, cut as `weight` is."""
    if weight.shard_dim is None:
        return whole
    cut = [run.chunk(mesh.tp, dim=weight.shard_dim)[mesh.tp_rank]
           for run in whole.chunk(weight.partition_stride, dim=weight.shard_dim)]
    return cut[0] if weight.partition_stride == 1 else torch.cat(cut, dim=weight.shard_dim)


def copy_to_tensor_parallel(x, group):
    """Megatron's f."""
    return CopyToTensorParallel.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_parallel(partial, group):
    """Megatron's g."""
    return ReduceFromTensorParallel.apply(partial, group) if group.size() > 1 else partial


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


class ColumnParallelLinear(nn.Module):
    """x [.., in] -> x W^T + bias [.., out/t]: this rank's output features; of each of several `partition_stride` its part."""

    def __init__(self, features_in, features_out, config, mesh, bias=True, partition_stride=1):
        super().__init__()
        self.group = mesh.tp_group
        self.weight = parameter((features_out, features_in), config, mesh, shard_dim=0, partition_stride=partition_stride,
                                std=config.init_method_std)
        self.bias = parameter((features_out,), config, mesh, shard_dim=0, partition_stride=partition_stride) if bias else None

    def forward(self, x):
        return F.linear(copy_to_tensor_parallel(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """x [.., in/t] -> sum over ranks of x W^T [.., out]. `bias` [out] is for the caller to add, after the sum."""

    def __init__(self, features_in, features_out, config, mesh, bias=True):
        super().__init__()
        self.group = mesh.tp_group
        std = config.init_method_std / (2 * config.num_layers) ** 0.5      # GPT-2: 2L sublayers add up in the residual
        self.weight = parameter((features_out, features_in), config, mesh, shard_dim=1, std=std)
        self.bias = parameter((features_out,), config, mesh) if bias else None

    def forward(self, x):
        return reduce_from_tensor_parallel(F.linear(x, self.weight), self.group)


class VocabParallelEmbedding(nn.Module):
    """Rows [first, first + padded_vocab/t) of the word embedding; of them, `valid` are words, the rest padding.

    As a head, the words' rows are multiplied, rounded up to `width`: matrix units want aligned sizes (gpt2's 50257 is
    odd). The few logits of padding are cut off before they can win or count.
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
        """tokens [b, s] -> (row in this shard, or 0; whether it is in this shard), both [b, s]."""
        row = tokens - self.first_row
        inside = (row >= 0) & (row < self.num_words)
        return row.where(inside, 0), inside

    def partial_embeddings(self, tokens):
        """tokens [b, s] -> [b, s, h]: the vectors of this shard's words, zeros for the others'."""
        row, inside = self.local_rows(tokens)
        return F.embedding(row, self.weight) * inside.unsqueeze(-1)

    def forward(self, tokens):
        return reduce_from_tensor_parallel(self.partial_embeddings(tokens), self.group)

    def logits_weight(self):
        """[width, h]: the rows that a head multiplies by."""
        return self.weight[:self.num_logits]


class GatherFromTensorParallel(torch.autograd.Function):
    """Concatenate the ranks' last dimensions forward; backward, each rank keeps the gradient of its own part.

    What follows is computed alike on every rank, so each already has the whole gradient: no wires.
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
    """logits [b, s, valid] of each rank's words -> [b, s, vocab_size] on every rank."""
    padded = F.pad(logits, (0, vocabulary.weight.size(0) - vocabulary.num_words))
    whole = GatherFromTensorParallel.apply(padded, vocabulary.group) if vocabulary.group.size() > 1 else padded
    return whole[..., :vocab_size]
