"""What a slice computes between two collectives: residual + norm, the branch of a sublayer, the two ends of the model.

    x' = x + dropout(y + bias)        y: the previous sublayer's output, summed over ranks; bias: its row-parallel bias
    h  = norm(x')                     the next sublayer's norm
    y  = branch(h)                    two matmuls around a core; then the sum over the ranks

                     attention              |  residual + norm  |            MLP
      ... W1 -> core -> W2 -> all-reduce -> | + bias, drop, add |  norm  -> W1 -> gelu -> W2 -> all-reduce -> ...
                                            |  of attention     | of MLP

**Residual + norm** belongs to two sublayers: y, bias and dropout mask to the previous one, the norm's weights to the
next one. It treats each token by itself, so it does not matter whether a rank holds all rows or a shard. Below,
[b, s, h] means the rows that this rank holds. There is no matmul, but many bytes are read and written. So torch.compile
(--compile) fuses forward into one kernel, and backward into another.

**The ends of the model** are the word embedding, and final norm + head + cross entropy. Both matrices are cut along the
vocabulary (parallel.py), so both ends need collectives, which other slices hide:

    embedding    forward    reduce of the word embeddings           backward    (gather of the gradient of x)
    head         forward    (gather of h)                           backward    reduce of the gradient of h
    loss         forward    all-reduce of the maximum logit,        backward    nothing
                            then of two sums: 3 fp32 per token

Collectives in parentheses are only needed if an option shards the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from nanodomino.layers.cross_entropy import (cross_entropy_gradient, in_blocks, local_max_and_sum_exp, loss_from_sums,
                                             max_and_sum_exp_of_rows, partial_loss_sums, scaled_exp_of_rows)
from nanodomino.layers.gradients import add_gradients, add_residual, drop, main_grad_of, residual_backward, wide_dtype
from nanodomino.overlap.slices import Flight, SliceOps, result_of


@dataclass
class SavedResidualNorm:
    """Holds what forward keeps of a residual + norm for backward."""
    weights: tuple                       # (weight, bias) of the norm
    previous: Branch | None              # the branch whose output is added; None at a chunk's start
    x: torch.Tensor                      # x' [b, s, h], the input of the norm
    statistics: tuple                    # from the norm's forward: for example mean and 1 / deviation of each token


class ResidualNorm:
    """Runs residual + norm for slices."""

    def __init__(self, norm, compiled):
        """norm: any Norm of the model; all have the same normalization and epsilon. compiled: see Domino."""
        normalization, epsilon = norm.normalization, norm.epsilon
        # lambdas, because torch.compile treats all functools.partials as one function and keeps few versions of it
        self.forward_kernel = compiled(lambda *inputs: residual_norm(*inputs, epsilon, normalization))
        self.backward_kernel = compiled(lambda *inputs: residual_norm_backward(*inputs, normalization))

    def forward(self, slice, x, y, previous, weights):
        """Add y to the residual stream x, with bias and dropout, and normalize the sum. Return (h, SavedResidualNorm).
        x, y [b, s, h]: the residual stream, and the output of the sublayer `previous`. y is None at a chunk's start.
        weights: (weight, bias) of the next sublayer's norm."""
        x, h, *statistics = self.forward_kernel(x, y, *bias_and_mask(slice, previous, y), *weights)
        return h, SavedResidualNorm(weights, previous, x, statistics)

    def norm_again(self, saved: SavedResidualNorm):
        """Return h, recomputed from the saved x'."""
        return self.forward_kernel(saved.x, None, None, None, *saved.weights)[1]

    def backward(self, slice, saved: SavedResidualNorm, grad_x, grad_h):
        """Turn the gradients of x' and h into gradients of x and y. Add the gradients of bias and norm weights to
        main_grad. grad_x, grad_h: the gradients of x' and h; grad_x is None in the head, which uses only h."""
        bias, mask = bias_and_mask(slice, saved.previous, grad_h)
        grad_x, grad_y, *gradients = self.backward_kernel(grad_x, grad_h, saved.x, saved.statistics, *saved.weights,
                                                          mask, saved.previous is not None, bias is not None)
        add_gradients((bias, *saved.weights), gradients)
        return grad_x, grad_y


def bias_and_mask(slice, sublayer, like):
    """Return the row-parallel bias and the dropout mask for a sublayer's output; (None, None) if sublayer is None."""
    if sublayer is None:
        return None, None
    return sublayer.output_bias, slice.masks_and_positions.hidden_dropout_mask(sublayer.site + ".hidden", like)


def residual_norm(x, y, bias, mask, weight, norm_bias, epsilon, normalization):
    """Return (x', h, *statistics of the norm); x' and h are [b, s, h]. If y is None, x' is x."""
    if y is not None:
        x = add_residual(x, y, bias, mask)
    return x, *normalization.forward(x, weight, norm_bias, epsilon)


def residual_norm_backward(grad_x, grad_h, x, statistics, weight, norm_bias, mask, has_residual, has_bias,
                           normalization):
    """Return the gradients of x, y, bias, norm weight and norm bias, or None. Here x is x', as in SavedResidualNorm."""
    gradient, grad_weight, grad_norm_bias = normalization.backward(grad_h, x, statistics, weight, norm_bias)
    if grad_x is not None:
        gradient = gradient.add_(grad_x)
    if not has_residual:
        return gradient, None, None, grad_weight, grad_norm_bias
    return *residual_backward(gradient, mask, has_bias), grad_weight, grad_norm_bias


class Branch:
    """The interface of a branch, which is everything between a norm and the reduce of its result y: LinearPair for
    attention and MLP, or an option's.

        keep(h)                           -> h in the form in which the tape keeps it
        forward(slice, h)                 -> (flights of y, tape)
        backward(slice, tape, grad_y, h)  -> (flights of the gradient of h, matmuls of the weight gradients)
        restore(slice, tape, h)              recomputes what a tape policy has dropped from the tape

    All but `keep` are generators, which yield while a collective is in flight. There, h and grad_y are flights, for
    which the branch waits. domino.py runs the weight gradients' matmuls, to hide the reduce of the gradient of h."""

    def __init__(self, sublayer, output_bias=None):
        """output_bias: the bias [h] that is added to y after the reduce, or None"""
        # plain attributes, because looking parameters up in the nn.Module would take a tenth of the host's time
        self.sublayer, self.site = sublayer, sublayer.site
        self.norm_weights, self.output_bias = sublayer.norm.weights, output_bias


@dataclass
class LinearPairTape:
    """Holds what backward needs of a LinearPair. A field is None after a tape policy has dropped it."""
    column_output: torch.Tensor | None   # c [b, s, .../t]
    core: object                         # what core_backward needs
    activation: torch.Tensor | None      # a [b, s, .../t], the input of the row-parallel matmul


class LinearPair(Branch):
    """Runs the branch of attention and MLP: column-parallel matmul, core, row-parallel matmul.

        forward     c = h W1^T + b1      a = core(c)      y = sum over ranks of a W2^T
        backward    grad_a = grad_y W2   grad_c = core_backward(grad_a)   grad_h = sum over ranks of grad_c W1
        later       grad W2 = grad_y^T a      grad W1 = grad_c^T h      grad b1 = sum of grad_c over the rows
    """

    def __init__(self, sublayer, ops: SliceOps, compiled, factor=lambda weight: weight):
        """factor: weight -> what computes its three products: the weight itself, or an option's object (SliceOps)."""
        super().__init__(sublayer, sublayer.row.bias)
        self.ops, self.b1 = ops, sublayer.column.bias                                      # [out/t]
        self.w1, self.w2 = factor(sublayer.column.weight), factor(sublayer.row.weight)     # [out/t, h], [h, in/t]
        self.forward_kernel, self.backward_kernel = sublayer.kernels(compiled)

    def keep(self, h):
        return h if self.ops.stream.shards > 1 else self.ops.convert_once(h, self.w1)

    def forward(self, slice, h: list[Flight]):
        """Multiply h by W1, run the core, multiply by W2, and launch the sum of y over the ranks."""
        c = self.ops.linear(slice, self.site, h, self.w1, self.b1)
        activation, core = yield from self.core(slice, c)
        tape = LinearPairTape(c, core, activation)
        yield from self.ops.yield_if_sharded()
        return self.ops.linear_then_reduce(slice, self.site, activation, self.w2), tape

    def core(self, slice, c):
        """Return (activation, what core_backward needs)."""
        yield from ()                                          # an option's core may launch collectives and yield
        inputs = slice.masks_and_positions.attention_inputs(self.sublayer, c)
        activation, core = self.sublayer.core_forward(self.forward_kernel, c, inputs, slice.training)
        if not self.sublayer.attends:                          # attention's core keeps its output in any case
            activation = self.ops.convert_once(activation, self.w2)
        return activation, core

    def backward(self, slice, tape: LinearPairTape, grad_y: list[Flight], h: list[Flight]):
        """Go back from the gradient of y to that of h, and launch the sum of the latter over the ranks."""
        ops, w1 = self.ops, self.w1.t()
        gradient, grad_y = ops.linear(slice, self.site, grad_y, self.w2.t()), ops.wait(slice, self.site, grad_y)
        matmuls = [(self.w2, grad_y, tape.activation)]
        gradient = yield from self.core_backward(slice, gradient, tape.core, matmuls)   # now c's; a's is freed
        yield from ops.yield_if_sharded()
        converted = ops.convert_once(gradient, w1)
        matmuls += [(self.w1, converted, ops.wait(slice, self.site, h)),
                    (self.b1, gradient if self.b1 is not None else None, None)]
        return ops.linear_then_reduce(slice, self.site, converted, w1), matmuls

    def core_backward(self, slice, gradient, saved, matmuls):
        """Turn the gradient of the activation into the gradient of c. matmuls: a list with the weight gradient of W2; a
        core may run it and empty the list, to hide a collective."""
        yield from ()
        return self.sublayer.core_backward(self.backward_kernel, gradient, saved)

    def restore(self, slice, tape: LinearPairTape, h: list[Flight]):
        """Compute a again. If the tape lacks c, first wait for h and compute c."""
        c = tape.column_output
        if c is None:
            c = self.ops.linear(slice, self.site, h, self.w1, self.b1)
        tape.column_output = None
        tape.activation, tape.core = yield from self.core(slice, c)


@dataclass
class HeadTape:
    """Holds what forward keeps of a slice for the head's backward."""
    norm: SavedResidualNorm
    h: torch.Tensor                      # [b, s, h], never sharded, because it is much smaller than the logits
    logits: torch.Tensor                 # [b, s, num_logits] of this rank
    maximum: torch.Tensor                # [b, s], the largest logit on any rank
    sums: torch.Tensor                   # [2, b, s], see layers/cross_entropy.py


class EmbeddingAndHead:
    """Runs the embedding and the head, forward and backward. All methods except head_backward are generators."""

    def __init__(self, model, ops, residual_norm, compiled=None):
        """compiled: a function that fuses operations, such as torch.compile, or None. The cross entropy must not create
        temporaries as large as the logits. If nothing fuses, in_blocks() processes a few rows at a time."""
        self.model, self.ops, self.residual_norm = model, ops, residual_norm
        narrow = dict(narrow=model.config.fp16_lm_cross_entropy and model.config.dtype == "float16")
        self.max_and_sum_exp_of_rows, self.scaled_exp_of_rows = map(compiled or in_blocks, (
            partial(max_and_sum_exp_of_rows, **narrow), partial(scaled_exp_of_rows, **narrow)))

    def embed(self, slice):
        """Return x [b, s, h], the start of the residual stream, for the slice's tokens."""
        words = yield from self.look_up(slice, "embedding", slice.batch.tokens)
        return self.model.embedding.add_positions(words, self.ops.stream.own_rows(slice.batch.positions),
                                                  slice.masks_and_positions.hidden_dropout_mask("embedding", words))

    def look_up(self, slice, site, tokens):
        """Return the word embeddings [b, s, h] of tokens [b, s]."""
        addend = self.model.embedding.word_embeddings.partial_embeddings(tokens)
        words = yield from self.ops.yield_then_wait(
            slice, site, [self.ops.launch(slice, site, self.ops.stream.reduce(addend))])
        return words.clone() if self.ops.stream.shards > 1 else words          # a view would keep the rows of all ranks

    def embed_backward(self, slice, grad_x):
        """Add the gradients of the word and position embeddings to main_grad. grad_x [b, s, h]: of embed()'s result."""
        gradient = drop(grad_x, slice.masks_and_positions.hidden_dropout_mask("embedding", grad_x))
        flights = self.ops.gather(slice, "embedding", gradient)
        self.model.embedding.add_position_gradients(gradient, self.ops.stream.own_rows(slice.batch.positions))
        yield from self.add_word_gradients(slice, "embedding", slice.batch.tokens, flights)

    def add_word_gradients(self, slice, site, tokens, flights):
        """Add the gradient of look_up()'s result, which `flights` deliver, to main_grad."""
        yield from self.ops.yield_if_in_flight(flights)
        gradient, words = self.ops.wait(slice, site, flights), self.model.embedding.word_embeddings
        row, is_local = words.local_rows(tokens)
        gradient = (gradient.to(wide_dtype(gradient)) * is_local.unsqueeze(-1)).flatten(0, 1)
        main_grad_of(words.weight).index_add_(0, row.flatten(), gradient)

    def head(self, slice, x, y, previous):
        """Return (the loss of each token [b, s], the HeadTape). x, y, previous: see ResidualNorm.forward()."""
        ops, (vocabulary,) = self.ops, self.model.head
        h, norm = self.residual_norm.forward(slice, x, y, previous, self.model.final_norm.weights)
        flights = ops.gather(slice, "head", h)
        yield from ops.yield_if_in_flight(flights)
        logits = ops.linear(slice, "head", flights, vocabulary.logits_weight())
        largest, sum_exp = local_max_and_sum_exp(logits, vocabulary, self.max_and_sum_exp_of_rows)
        maximum = largest.clone()
        yield from ops.all_reduce(slice, "cross_entropy", maximum, dist.ReduceOp.MAX)
        sums = partial_loss_sums(logits, slice.batch.labels, largest, sum_exp, maximum, vocabulary)
        yield from ops.all_reduce(slice, "cross_entropy", sums)
        return loss_from_sums(sums), HeadTape(norm, result_of(flights), logits, maximum, sums)

    def head_backward(self, slice, tape: HeadTape, gradient):
        """Return (flights of the gradient of h, matmuls of the weight gradient). gradient [b, s]: of the losses."""
        (vocabulary,) = self.model.head
        grad_logits = cross_entropy_gradient(tape.logits, slice.batch.labels, slice.output, tape.maximum, tape.sums,
                                             gradient, vocabulary, self.scaled_exp_of_rows)
        flights = self.ops.linear_then_reduce(slice, "head", grad_logits, vocabulary.logits_weight().t())
        return flights, [(vocabulary.weight, grad_logits, tape.h)]
