"""The two ends of the model, slice by slice: word embedding, and final norm + head + cross entropy.

Both matrices are cut along the vocabulary (parallel.py), so both ends need collectives. Other slices hide these, as in
a sublayer. Collectives in parentheses are only needed if an option shards the residual stream:

    embedding    forward    reduce of the word embeddings           backward    (gather of the gradient of x)
    head         forward    (gather of h)                           backward    reduce of the gradient of h
    loss         forward    all-reduce of the maximum logit,        backward    nothing
                            then of two sums: 3 fp32 per token

Every method except head_backward is a generator, which yields while a collective is in flight. The logits [b, s, v/t]
are the largest tensor of a step. Their gradient overwrites them, so that a slice needs only one tensor of this size.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from nanodomino.layers.cross_entropy import (cross_entropy_gradient, in_chunks, local_max_and_sum_exp, loss_from_sums,
                                             max_and_sum_exp_of_rows, partial_loss_sums, scaled_exp_of_rows)
from nanodomino.layers.dropout_and_positions import drop
from nanodomino.layers.gradients import main_grad_of, wide_dtype
from nanodomino.overlap.slices import result_of
from nanodomino.overlap.ends import SavedResidualNorm


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
        """compiled: torch.compile with its backend, or None.

        The cross entropy must not create temporaries as large as the logits. torch.compile avoids them by fusing the
        operations. Without it, in_chunks() processes a few rows at a time.
        """
        self.model, self.ops, self.residual_norm = model, ops, residual_norm
        narrow = dict(narrow=model.config.fp16_lm_cross_entropy and model.config.dtype == "float16")
        self.max_and_sum_exp_of_rows, self.scaled_exp_of_rows = map(compiled or in_chunks, (
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
        """Add the gradients of the word and position embeddings to main_grad.

        grad_x [b, s, h]: the gradient of embed()'s result.
        """
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
        """Return (the loss of each token [b, s], the HeadTape).

        x, y: the residual stream before the last sublayer's addition, and that sublayer's output.
        previous: the last sublayer.
        """
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
        """Return (flights of the gradient of h, the matmuls of the weight gradient, which the caller runs).

        gradient: the gradient of the losses [b, s].
        """
        (vocabulary,) = self.model.head
        grad_logits = cross_entropy_gradient(tape.logits, slice.batch.labels, slice.output, tape.maximum, tape.sums,
                                             gradient, vocabulary, self.scaled_exp_of_rows)
        flights = self.ops.linear_then_reduce(slice, "head", grad_logits, vocabulary.logits_weight().t())
        return flights, [(vocabulary.weight, grad_logits, tape.h)]
