"""Tensor parallelism: a matrix cut over t ranks, and the all-reduces that the cut needs (Megatron-LM, 1909.08053,
section 3).

Cut the first matrix of a pair by its output features and the second by its input features. Then each rank computes its
own features from the first matmul to the second without communication, and one all-reduce completes the pair. For an
MLP on rank i:

               column-parallel         core          row-parallel
      h --f--> c = h W1[i]^T + b1[i] --gelu--> a --> partial y = a W2[i]^T --g--> y

      h, partial y and y are [b, s, h]; c and a are [b, s, ffn/t]

      f   forward: identity (every rank has h)               backward: all-reduce (each rank has a partial dL/dh)
      g   forward: all-reduce (each rank has a partial y)    backward: identity (dL/dy is the gradient of each addend)

The names come from the paper, which writes x A: rank i holds columns of the first A and rows of the second. PyTorch
stores a weight as [out, in] and computes x W^T, so here rank i holds *rows* of W1 and *columns* of W2.

f and g are mirror images. A typical bug is to write another all-reduce as g's backward. Then the gradients inside the
last sublayer are t times too large. AdamW hides that, because it divides by the gradient's own size. In all earlier
sublayers, the gradients also have a wrong direction, because in x + sublayer(x) the skip path counts once and the
branch t times. Training does not break: with tp 2, the 200 steps of the nano preset end at a validation loss of 2.49
instead of 2.28. The table compares the wrong gradient with the right one, for W1 of each MLP at the first step:

      layer               7      6      5      4      3      2      1      0
      ratio of norms   2.00   2.40   2.93   3.67   4.83   6.50   9.53  15.38
      cosine           1.00   0.95   0.89   0.84   0.79   0.72   0.66   0.56

Biases: b1 is cut like the output of its matmul. Every rank holds the whole b2, which must be added *after* the
all-reduce: otherwise the sum contains it t times. RowParallelLinear does not add b2. Its caller does, together with the
residual (Megatron's `skip_bias_add`).

The vocabulary is cut too. Each rank owns v/t rows of the embedding, and the loss is computed without gathering the
logits (layers/cross_entropy.py).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from nanodomino.optim.buckets import parameter


class CopyToTensorParallel(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        # clone: all_reduce works in place, but autograd may use the same tensor in another branch
        gradient = gradient.clone(memory_format=torch.contiguous_format)
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
    """Computes this rank's output features: x [.., in] -> x W^T + bias [.., out/t].

    partition_stride: the number of matrices stacked in W, each of which is cut by itself (Megatron-LM's name); for
    example 2 for SwiGLU's [gate; up]. parts: see ParameterSpec."""

    def __init__(self, features_in, features_out, config, mesh, bias=True, partition_stride=1, parts=None):
        super().__init__()
        self.group = mesh.tp_group
        rows = (features_out,) if partition_stride == 1 else (partition_stride, features_out // partition_stride)
        cut = {len(rows) - 1: "tp"}
        self.weight = parameter((*rows, features_in), config, mesh, cut=cut, view=(-1, features_in),
                                parts=parts, std=config.init_method_std)
        self.bias = parameter(rows, config, mesh, cut=cut, view=(-1,)) if bias else None

    def forward(self, x):
        return F.linear(copy_to_tensor_parallel(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Turns x [.., in/t] into the sum of x W^T over the tp ranks, [.., out]. The caller adds `bias` [out]."""

    def __init__(self, features_in, features_out, config, mesh, bias=True):
        super().__init__()
        self.group = mesh.tp_group
        std = config.init_method_std / (2 * config.num_layers) ** 0.5      # as in GPT-2: 2L sublayers add to the stream
        self.weight = parameter((features_out, features_in), config, mesh, cut={1: "tp"}, std=std)
        self.bias = parameter((features_out,), config, mesh) if bias else None

    def forward(self, x):
        return reduce_from_tensor_parallel(F.linear(x, self.weight), self.group)


class VocabParallelEmbedding(nn.Module):
    """Holds padded_vocab/t rows of the word embedding, from first_row on: num_words words, then padding. declared:
    further arguments of parameter()."""

    def __init__(self, config, mesh, **declared):
        super().__init__()
        self.group = mesh.tp_group
        self.weight = parameter((config.padded_vocab_size, config.hidden_size), config, mesh, cut={0: "tp"},
                                std=config.init_method_std, update="decay", **declared)
        rows = config.padded_vocab_size // mesh.tp
        self.first_row = rows * mesh.tp_rank
        self.num_words = min(max(config.vocab_size - self.first_row, 0), rows)

    def local_rows(self, tokens):
        """Return (row, is_local), both [b, s], for tokens [b, s]: the row of the token's word in this shard, or 0 if
        another rank owns the word, and whether this rank owns it."""
        row = tokens - self.first_row
        is_local = (row >= 0) & (row < self.num_words)
        return row.where(is_local, 0), is_local

    def partial_embeddings(self, tokens):
        """Return [b, s, h] for tokens [b, s]: the embeddings of this rank's words, and zeros for all other words."""
        row, is_local = self.local_rows(tokens)
        return F.embedding(row, self.weight) * is_local.unsqueeze(-1)

    def forward(self, tokens):
        return reduce_from_tensor_parallel(self.partial_embeddings(tokens), self.group)

    def logits_weight(self):
        """Return the matrix [num_logits, h] that a head multiplies by: num_words rows, rounded up to a multiple of 8 if
        this rank has enough padding rows. Matrix units need aligned sizes, and GPT-2's vocabulary of 50257 is odd. The
        loss ignores the logits of padding rows."""
        return self.weight[:-(-self.num_words // 8) * 8]


class GatherFromTensorParallel(torch.autograd.Function):
    """Joins the ranks' tensors along the last dimension. Backward returns the gradient of this rank's part, without
    communication: all ranks compute the same results from the whole tensor, so each has its whole gradient."""

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
    """Gather each rank's logits [b, s, num_words] into [b, s, vocab_size] on every rank."""
    padded = F.pad(logits, (0, vocabulary.weight.size(0) - vocabulary.num_words))
    whole = GatherFromTensorParallel.apply(padded, vocabulary.group) if vocabulary.group.size() > 1 else padded
    return whole[..., :vocab_size]
