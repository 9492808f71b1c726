"""Adds layers at the end of the model, each of which predicts one token further ahead (multi-token prediction,
DeepSeek-V3, 2412.19437, section 2.2).

From the tokens t0 .. ti, the main model computes hidden states h, and its head predicts t(i+1). A *depth* continues
from h. In training the next token is known, so depth 1 merges h with the embedding of t(i+1), runs one more layer, and
predicts t(i+2). Depth 2 continues from the hidden states of depth 1:

    tokens    t0 .. ti -> layers -> h  ------------------------------> final norm, head -> t(i+1)   the main loss
                                    |
    depth 1   embedding of t(i+1) -> merge -> layer -> h1 -----------> final norm, head -> t(i+2)
                                                       |
    depth 2   embedding of t(i+2) -------------------> merge -> ... -> final norm, head -> t(i+3)

    merge:  W [norm(embedding); norm(hidden states)]        two norms and a matrix W [h, 2h] of the depth's own

So training makes h also contain what helps to predict later tokens. The depths share the word embedding, the final norm
and the head of the main model; Megatron-LM gives each depth a final norm of its own. The names enorm, hnorm and eh_proj
are DeepSeek's and Megatron-LM's. The merge adds no position embedding, because h contains the positions and a token
keeps its place i. Evaluation and generation run no depth.

**Loss.** With D depths and the factor f (--mtp-loss-scaling-factor), training minimizes

    (main losses + f/D x losses of all depths, each summed over the tokens that it counts) / tokens of the main loss

Depth d counts fewer tokens than the main loss. At the last d places of a sample, the token that it should predict lies
beyond the sample. And if attention or positions restart in each document, a depth does not predict across the end of a
document, because its hidden states know nothing of the next document. All losses have the same divisor, as in the
paper. So it does not matter how the places that do not count are spread over microbatches and ranks.

**Order.** A depth is a merge, followed by a chunk of one layer and the head. So domino.py's forward_slice and
backward_slice run this chunk too, and other slices hide its collectives:

    forward     layers, head,  merge, layer, head,  merge, layer, head                    from left to right
    backward    layers, head,  merge, layer, head,  merge, layer, head                    from right to left
                main model     depth 1              depth 2

The final norm and the next depth's merge both read the hidden states of a layer. So in backward the gradient of these
hidden states is a sum, and a merge comes before the head to its left. The final norm and the head get gradients from
every depth and from the main model. So each depth's chunk lists both among its parts, and these gradients are complete
only after the backward of the main model's head, which comes last.

Every tp rank holds the merge's whole matrix and multiplies all rows of the residual stream that it holds (Megatron-LM
cuts this matrix over tp). So a merge needs no collective, but its look-up of the next tokens' embeddings does, as at
the start of the model. Backward recomputes the two norms of a merge instead of keeping their outputs.

The loss of a depth is not an output of the stage, because its gradient is known in advance: a constant for each token
that counts. So pipeline.py and its schedules do not know of depths.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.domino import Domino
from nanodomino.errors import counted
from nanodomino.layers.attention_mask import to_device
from nanodomino.layers.sublayers import Norm
from nanodomino.model import GPT, Chunk
from nanodomino.optim.buckets import parameter
from nanodomino.options.documents import document_ids


class PredictionDepth(nn.Module):
    """Holds the parameters of a depth: the merge's two norms and matrix, and a transformer layer."""

    def __init__(self, config, mesh, depth: int, layer_class):
        super().__init__()
        self.site = f"mtp.{depth}"
        self.enorm, self.hnorm = (Norm(config, mesh, config.hidden_size) for _ in range(2))
        self.eh_proj, self.layer = nn.Module(), layer_class(config, mesh, config.num_layers + depth)
        self.eh_proj.weight = parameter((config.hidden_size, 2 * config.hidden_size), config, mesh,
                                        std=config.init_method_std)


class MultiTokenPrediction:
    """What stands behind the head: the depths, of one layer each. Without depths, each method adds nothing."""

    def __init__(self, config):
        self.config, self.layers = config, config.mtp_num_layers
        self.in_words = f"{counted(self.layers, 'depth')} of multi-token prediction" * (self.layers > 0)

    def modules(self, mesh, layer_class) -> dict:
        """Return {name: module} of what the stage with the head holds besides the model."""
        depths = [PredictionDepth(self.config, mesh, depth, layer_class) for depth in range(self.layers)]
        return {"mtp": nn.ModuleList(depths)} if depths else {}

    def chunks(self, model: GPT) -> list[Chunk]:
        """Return a chunk for each depth: look-up of the next tokens' embeddings, merge, layer and head."""
        return [model.chunk([depth.layer], pre_process=False, post_process=True, more_parts={
            "embedding": (model.embedding.word_embeddings,), "merge": (depth.enorm, depth.hnorm, depth.eh_proj)})
                for depth in (model.mtp if self.layers else ())]

    def prepare(self, batch, rows, end_of_text: int):
        """Add the batch of depth 1 as extras["ahead"], which contains the batch of depth 2, and so on. Return `batch`.
        The loss of depth d does not count at the last d places of a sample, nor where the token that it should predict
        belongs to another document. After the last token, token 0 stands in."""
        last = batch
        for depth in range(1, self.layers + 1):
            labels, loss_mask = (F.pad(tensor[:, 1:], (0, 1)) for tensor in (last.labels, last.loss_mask))
            if self.config.uses_document_boundaries:
                documents = document_ids(rows, end_of_text)
                same = (documents[:, depth + 1:] == documents[:, :-depth - 1]).to(loss_mask.dtype)
                loss_mask = loss_mask * F.pad(to_device(same, loss_mask.device), (0, depth))
            last.extras["ahead"] = replace(last, tokens=last.labels, labels=labels, loss_mask=loss_mask, extras={})
            last = last.extras["ahead"]
        return batch

    def runner(self, domino: Domino) -> "PredictionDepths":
        """Return the object that runs the depths which this stage holds."""
        return PredictionDepths(domino)

    # {name: 2} for each depth: a step adds up its losses and the number of tokens that it counts
    statistics = property(lambda self: {f"mtp.{depth}": 2 for depth in range(self.layers)})

    def report(self, counts: dict) -> tuple[dict, str]:
        """Return (what metrics.jsonl records, words for the progress line) of a step's statistics: each depth's mean
        loss over the tokens that it counts. It may be lower than the main loss, because a depth has one more layer, and
        it also knows all tokens before the one that it predicts."""
        means = [total / max(tokens, 1.0) for total, tokens in (counts[name] for name in self.statistics)]
        return ({f"mtp_{depth}_loss": mean for depth, mean in enumerate(means, 1)},
                "".join(f" | mtp {depth} loss {mean:.4f}" for depth, mean in enumerate(means, 1)))


class PredictionDepths:
    """Runs the depth after a slice's head. Both methods are generators. After the last depth they do nothing, and on a
    stage without depths they never do anything."""

    def __init__(self, domino: Domino):
        self.domino, self.ops, self.ends, self.residual_norm = domino, domino.ops, domino.ends, domino.residual_norm
        model, depths = domino.model, getattr(domino.model, "mtp", ())         # other stages have no "mtp"
        self.factor = model.config.mtp_loss_scaling_factor / max(len(depths), 1)
        self.counts_here = model.mesh.tp_rank == 0             # all tp ranks have the same losses
        chunks = [*(chunk for chunk in model.chunks if chunk.post_process), *model.chunks_behind_head]
        self.after = dict(zip(chunks, zip(depths, chunks[1:])))                     # chunk -> the depth after it

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
        slice.behind_head = ahead, embedding_norm, hidden_norm         # the tape
        del e, h, hidden, words                                # free what the tape does not keep
        yield from self.domino.forward_slice(ahead)
        if self.counts_here:
            counted = torch.stack([ahead.output * batch.loss_mask, batch.loss_mask])
            self.ops.statistics_of[depth.site] += counted.sum(dim=(1, 2))

    def backward(self, slice, ready):
        """Return the gradient of the slice's hidden states from the next depth; None after the last depth."""
        if slice.behind_head is None:
            return None
        (ahead, embedding_norm, hidden_norm), slice.behind_head = slice.behind_head, None
        (depth, chunk), tokens, results = self.after[slice.chunk], ahead.batch.tokens, {}
        ahead.deferred, ahead.loss_scale = slice.deferred, slice.loss_scale
        gradient = ahead.batch.loss_mask.to(ahead.output.dtype) * (self.factor * slice.loss_scale)
        yield from self.domino.backward_slice(ahead, gradient, results, ready)
        grad, ahead = results[slice.index], None               # free what it holds
        with self.ops.trace.span("matmul", slice=slice.index, site=depth.site):
            grad_e, grad_h = (F.linear(grad, half.t()) for half in depth.eh_proj.weight.chunk(2, dim=1))
        grad_words, _ = self.residual_norm.backward(slice, embedding_norm, None, grad_e)
        flights = self.ops.gather(slice, depth.site, grad_words)
        grad_x, _ = self.residual_norm.backward(slice, hidden_norm, None, grad_h)
        merged = torch.cat([self.residual_norm.norm_again(norm) for norm in (embedding_norm, hidden_norm)], dim=-1)
        matmuls = [(depth.eh_proj.weight, grad, merged)]
        if slice.deferred is None:
            self.ops.weight_gradients(slice, depth.site, matmuls)
            ready(*chunk.parts["merge"])
        else:
            slice.deferred.append((depth.site, matmuls, chunk.parts["merge"]))
        yield from self.ends.add_word_gradients(slice, depth.site, tokens, flights)
        ready(*chunk.parts["embedding"])
        return grad_x
