"""Packed documents: the effects of the token that ends a document.

A sample is a window of a long sequence of documents, so it may hold parts of several documents. Two settings with names
of Megatron-LM make the model treat each document as if it stood alone. --reset-attention-mask keeps attention inside
the token's own document. --reset-position-ids lets positions restart at 0 in each document. An end-of-text token
belongs to the document that it ends:

    tokens      a  b  c  #  d  e  #  f         #: end-of-text
    documents   0  0  0  0  1  1  1  2
    positions   0  1  2  3  0  1  2  0

With --eod-mask-loss, the loss does not count where the label is an end-of-text token.
"""

import torch

from nanodomino.generate.generation import KeyValueCache
from nanodomino.layers.attention_mask import document_begins, to_device


def document_ids(tokens, end_of_text: int):
    """Return the number of each token's document within its sample, [b, s], for tokens [b, s]."""
    ends = (tokens == end_of_text).long()
    return ends.cumsum(dim=1) - ends


def positions_within_documents(documents):
    """Return each token's position within its own document, [b, s], for the document numbers [b, s]."""
    return torch.arange(documents.size(1), device=documents.device) - document_begins(documents)


class DocumentCache(KeyValueCache):
    """A KeyValueCache for a model that was trained with document boundaries."""
    document_start = 0                   # the number of cached tokens before the current document

    def look_around(self, tokens, places):
        positions, begins = super().look_around(tokens, places)
        if self.end_of_text is None:
            return positions, begins
        config, documents = self.model.config, document_ids(tokens.cpu(), self.end_of_text)
        starts = torch.where(documents == 0, self.document_start, self.length + document_begins(documents))
        return positions - starts * config.reset_position_ids, starts * config.reset_attention_mask

    def finish(self, tokens):
        ends = [i for i, token in enumerate(tokens[0].tolist(), self.length) if token == self.end_of_text]
        self.document_start = ends[-1] + 1 if ends else self.document_start
        super().finish(tokens)


def mark_documents(config, batch, rows, end_of_text: int):
    """Apply the three settings to a batch of rows [b, s + 1] of token ids, which are in the host's memory."""
    device = batch.tokens.device
    if config.eod_mask_loss:
        batch.loss_mask.masked_fill_(batch.labels == end_of_text, 0)
    if config.uses_document_boundaries:
        documents = document_ids(rows, end_of_text)[:, :-1]
        if config.reset_position_ids:
            batch.positions, batch.in_order = to_device(positions_within_documents(documents), device), False
        if config.reset_attention_mask:
            batch.extras["documents"] = documents              # still in the host's memory
    return batch
