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
are DeepSeek's and Megatron-LM's. The merge adds no position embedding: h contains the positions, and a token keeps its
place i.

**Loss.** With D depths and the factor f (--mtp-loss-scaling-factor), training minimizes

    (main losses + f/D x losses of all depths, each summed over the tokens that it counts) / tokens of the main loss

Depth d counts fewer tokens than the main loss. At the last d places of a sample, the token that it should predict lies
beyond the sample. And if attention or positions restart in each document, a depth does not predict across the end of a
document, because its hidden states know nothing of the next document. All losses have the same divisor, as in the
paper. So it does not matter how the places that do not count are spread over microbatches and ranks.

Evaluation and generation run no depth, and the exported model has none.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from nanodomino.layers.sublayers import Norm
from nanodomino.layers.attention_mask import to_device
from nanodomino.optim.parameter_spec import parameter
from nanodomino.options.documents import goes_on


class PredictionDepth(nn.Module):
    """Holds the parameters of a depth: the merge's two norms and matrix, and a transformer layer."""

    def __init__(self, config, mesh, site: str, layer: nn.Module):
        super().__init__()
        self.site = site
        self.enorm, self.hnorm = (Norm(config, mesh, config.hidden_size) for _ in range(2))
        self.eh_proj, self.layer = nn.Module(), layer
        self.eh_proj.weight = parameter((config.hidden_size, 2 * config.hidden_size), config, mesh,
                                        std=config.init_method_std)

    def forward(self, words, x, masks_and_positions):
        """The definition. Turns the embeddings of the next tokens and the hidden states x of the previous depth, both
        [b, s, h], into the hidden states of this depth."""
        merged = F.linear(torch.cat([self.enorm(words), self.hnorm(x)], dim=-1), self.eh_proj.weight)
        return self.layer(merged, masks_and_positions)


def add_depths(config, batch, rows, end_of_text: int):
    """Add the batch of depth 1 as extras["ahead"], which contains that of depth 2, and so on.

    Depth d predicts the token d places after the next one. Its loss does not count at the last d places of a sample,
    nor where the token that it predicts belongs to another text. After the last token, token 0 stands in.
    """
    last = batch
    for depth in range(1, config.mtp_num_layers + 1):
        labels, loss_mask = (F.pad(tensor[:, 1:], (0, 1)) for tensor in (last.labels, last.loss_mask))
        if config.uses_document_boundaries:
            same = goes_on(rows, depth + 1, end_of_text).to(loss_mask.dtype)
            loss_mask = loss_mask * F.pad(to_device(same, loss_mask.device), (0, depth))
        last.extras["ahead"] = replace(last, tokens=last.labels, labels=labels, loss_mask=loss_mask, extras={})
        last = last.extras["ahead"]
    return batch
