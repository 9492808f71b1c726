from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.layers.masks_and_positions import AttentionInputs
from nanodomino.layers.positions import attention_bias, document_ids, positions_within_documents, rotation
from nanodomino.model import GPT, Chunk


class Cache:
    """Keys and values [1, groups/t, positions, d] of each attention of this stage, for the first `length` tokens of a
    window of at most `room`; keys are turned already. begin: where the document begins that the next token belongs to,
    which end_of_text ends, if its end means anything.
    """

    def __init__(self, model: GPT, room: int, end_of_text: int | None = None):
        config = model.config
        self.model, self.length, self.begin = model, 0, 0
        self.end_of_text = end_of_text if config.uses_document_boundaries else None
        shape = (1, config.num_query_groups // model.mesh.tp, room, config.kv_channels)
        self.kept = {sublayer.site: torch.zeros(2, *shape, device=model.mesh.device, dtype=config.params_dtype)
                     for chunk in model.chunks for sublayer in chunk.sublayers if sublayer.attends}

    def meet(self, tokens):
        """Before the new tokens [1, m] go through: where they stand, and what they may look at. m > 1 only on an empty
        cache."""
        config, m = self.model.config, tokens.size(1)
        self.positions = torch.arange(self.length, self.length + m, device=tokens.device).unsqueeze(0)
        self.seen, self.bias = 0, None
        if self.end_of_text is not None and self.length == 0:
            documents = document_ids(tokens, self.end_of_text)
            self.positions = positions_within_documents(documents) if config.reset_position_ids else self.positions
            self.bias = attention_bias(documents, config.params_dtype) if config.reset_attention_mask else None
        elif self.end_of_text is not None:
            self.positions = self.positions - self.begin * config.reset_position_ids
            self.seen = self.begin * config.reset_attention_mask
        self.turn = rotation(config, self.positions, m, tokens.device)

    def pass_on(self, tokens):
        """After they went through."""
        if self.end_of_text is not None:
            ends = [place for place, token in enumerate(tokens[0].tolist(), self.length) if token == self.end_of_text]
            self.begin = ends[-1] + 1 if ends else self.begin
        self.length += tokens.size(1)

    def hidden_dropout_mask(self, site, x):
        """Return no mask, as MasksAndPositions does in evaluation."""
        return None

    def attention_inputs(self, sublayer, x) -> AttentionInputs | None:
        """Return what attention needs for the new tokens; its keys and values join those in the cache."""
        if not sublayer.attends:
            return None
        return AttentionInputs(None, self.turn, self.bias, partial(self.extend, sublayer.site))

    def extend(self, site, k, v):
        """Store k and v [1, groups, m, d] of the new tokens; return k and v of all tokens that they may attend to."""
        keys, values = self.kept[site]
        end = self.length + k.size(2)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, self.seen:end], values[:, :, self.seen:end]

    def run(self, chunk: Chunk, tokens, hidden):
        """A chunk on m new tokens [1, m] (hidden [1, m, h] from the layers before) -> hidden,
        or logits of this rank's words."""
        model, x = self.model, hidden
        if chunk.pre_process:
            x = model.embedding.add_positions(model.embedding.word_embeddings(tokens), self.positions, None)
        for layer in chunk.layers:
            x = layer(x, self)
        if not chunk.post_process:
            return x
        (vocabulary,) = model.head
        return F.linear(model.final_norm(x[:, -1:]), vocabulary.logits_weight())[..., :vocabulary.num_words]
