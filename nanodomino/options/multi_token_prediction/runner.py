"""Runs the depths of multi-token prediction (depths.py) slice by slice.

A depth is a merge, followed by a chunk of one layer and the head. So domino.py's forward_slice and backward_slice run
this chunk too, and other slices hide its collectives:

    forward     layers, head,  merge, layer, head,  merge, layer, head                    from left to right
    backward    layers, head,  merge, layer, head,  merge, layer, head                    from right to left
                main model     depth 1              depth 2

The hidden states between a layer and its head go to two places: to the final norm and to the next depth's merge. So in
backward their gradient is a sum, and a merge's backward comes before that of the head to its left. The final norm and
the head get gradients from every depth and from the main model. So these gradients are complete only after the backward
of the main model's head, which comes last (GPT.reported_modules counts the reports).

Every tp rank holds the merge's whole matrix and multiplies all rows of the residual stream that it holds (Megatron-LM
cuts this matrix over tp). So a merge needs no collective, but its look-up of the next tokens' embeddings does, as at
the start of the model. Backward recomputes the two norms of a merge instead of keeping their outputs.

The loss of a depth is not an output of the stage, because its gradient is known in advance: a constant for each token
that counts. So pipeline.py and its schedules do not know of depths.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from nanodomino.domino import Domino
from nanodomino.model import Chunk
from nanodomino.overlap.ends import SavedResidualNorm
from nanodomino.overlap.slices import NothingBehindHead, Slice


@dataclass
class DepthTape:
    """Holds what forward keeps of a slice in one depth."""
    slice: Slice                         # the slice that passes through the depth's layer and head
    embedding_norm: SavedResidualNorm
    hidden_norm: SavedResidualNorm


class PredictionDepths(NothingBehindHead):
    """Runs the depth after a slice's head. Both methods are generators. After the last depth they do nothing."""

    def __init__(self, domino: Domino):
        self.domino, self.ops, self.ends, self.residual_norm = domino, domino.ops, domino.ends, domino.residual_norm
        model = domino.model
        self.factor = model.config.mtp_loss_scaling_factor / len(model.mtp)
        self.counts_here = model.mesh.tp_rank == 0             # all tp ranks have the same losses
        self.chunks = [Chunk([depth.layer], pre_process=False, post_process=True) for depth in model.mtp]
        chunks = [*(chunk for chunk in model.chunks if chunk.post_process), *self.chunks]
        self.after = dict(zip(chunks, zip(model.mtp, self.chunks)))                    # chunk -> the depth after it

    def forward(self, slice):
        """Merge the slice's hidden states with the embeddings of the next tokens, and run the next depth's chunk."""
        if slice.chunk not in self.after or not slice.training:
            return
        depth, chunk = self.after[slice.chunk]
        batch, x = slice.batch.extras["ahead"], slice.head.norm.x
        words = yield from self.ends.look_up(slice, depth.site, batch.tokens)
        e, embedding_norm = self.residual_norm.forward(slice, words, None, None, depth.enorm.weights)
        h, hidden_norm = self.residual_norm.forward(slice, x, None, None, depth.hnorm.weights)
        with self.ops.trace.span("matmul", slice=slice.index, site=depth.site):
            hidden = F.linear(torch.cat([e, h], dim=-1), depth.eh_proj.weight)
        ahead = replace(slice, chunk=chunk, batch=batch, hidden=hidden, tape=[], head=None, output=None)
        slice.behind_head = DepthTape(ahead, embedding_norm, hidden_norm)
        del e, h, hidden, words                                # free what the tape does not keep
        yield from self.domino.forward_slice(ahead)
        if self.counts_here:
            counted = torch.stack([ahead.output * batch.loss_mask, batch.loss_mask])
            self.ops.statistics_of[depth.site] += counted.sum(dim=(1, 2))

    def backward(self, slice, ready):
        """Return the gradient of the slice's hidden states from the next depth; None after the last depth."""
        if slice.behind_head is None:
            return None
        tape, slice.behind_head = slice.behind_head, None
        depth, batch, results = self.after[slice.chunk][0], tape.slice.batch, {}
        tape.slice.deferred, tape.slice.loss_scale = slice.deferred, slice.loss_scale
        gradient = batch.loss_mask.to(tape.slice.output.dtype) * (self.factor * slice.loss_scale)
        yield from self.domino.backward_slice(tape.slice, gradient, results, ready)
        grad, tape.slice = results[slice.index], None
        with self.ops.trace.span("matmul", slice=slice.index, site=depth.site):
            grad_e, grad_h = (F.linear(grad, half.t()) for half in depth.eh_proj.weight.chunk(2, dim=1))
        grad_words, _ = self.residual_norm.backward(slice, tape.embedding_norm, None, grad_e)
        flights = self.ops.gather(slice, depth.site, grad_words)
        grad_x, _ = self.residual_norm.backward(slice, tape.hidden_norm, None, grad_h)
        merged = torch.cat([self.residual_norm.norm_again(norm) for norm in (tape.embedding_norm, tape.hidden_norm)],
                           dim=-1)
        matmuls, modules = [(depth.eh_proj.weight, grad, merged)], (depth.enorm, depth.hnorm, depth.eh_proj)
        if slice.deferred is None:
            self.ops.weight_gradients(slice, depth.site, matmuls)
            ready(*modules)
        else:
            slice.deferred.append((depth.site, matmuls, modules))
        yield from self.ends.add_word_gradients(slice, depth.site, batch.tokens, flights)
        ready(self.domino.model.embedding.word_embeddings)
        return grad_x
