"""Runs new tokens through the model and keeps the keys and values of all earlier tokens.

Attention needs the keys and values of every earlier token, and they do not change when a token is added. With a cache,
each layer computes only one new position per token, however long the text is. The keys and values of a query group are
cached once, for all of its heads.

When the text has filled the model's context, the cache cannot just drop the oldest token. Learned positions would all
change. Rotary positions enter attention only as distances, but in the upper layers the cached keys and values still
depend on the dropped token. So the cache is emptied, and the later half of the context is recomputed from position 0.
"""

from functools import partial

import torch
import torch.nn.functional as F

from nanodomino.layers.dropout_and_positions import AttentionInputs
from nanodomino.layers.attention_mask import rotation
from nanodomino.model import GPT, Chunk


class KeyValueCache:
    """Holds the keys and the values of each attention layer of this stage, both [1, query groups/t, size, d].

    Rotary positions are already applied to the keys.

    size: the number of positions that the cache can hold; the first `length` of them are filled.
    end_of_text: the token that ends a text; an option may let it end what later tokens can see.

    The layers are given this cache instead of a MasksAndPositions, so it defines the methods that layers call.
    """

    def __init__(self, model: GPT, size: int, end_of_text: int | None):
        config, self.model, self.length, self.end_of_text = model.config, model, 0, end_of_text
        shape = (1, config.num_query_groups // model.mesh.tp, size, config.kv_channels)
        self.keys_and_values = {
            sublayer.site: torch.zeros(2, *shape, device=model.mesh.device, dtype=config.params_dtype)
            for chunk in model.chunks for sublayer in chunk.sublayers if sublayer.attends}

    def start(self, tokens):
        """Compute the positions and the attention bias of the new tokens [1, m]. Unless the cache is empty, m is 1."""
        self.positions, self.first_visible, self.bias = self.look_around(tokens)
        self.rotary = rotation(self.model.config, self.positions, tokens.size(1), tokens.device)

    def look_around(self, tokens):
        """Return (the positions [1, m] of the new tokens, the index of the first cached token that they see, an
        attention bias or None)."""
        positions = torch.arange(self.length, self.length + tokens.size(1), device=tokens.device).unsqueeze(0)
        return positions, 0, None

    def finish(self, tokens):
        """Count the new tokens [1, m] as cached. Call this after all chunks have run."""
        self.length += tokens.size(1)

    def hidden_dropout_mask(self, site, x):
        """Return None: generation has no dropout."""
        return None

    def attention_inputs(self, sublayer, x) -> AttentionInputs | None:
        """Return the AttentionInputs of the new tokens, with a function that caches their k and v; None for an MLP."""
        if not sublayer.attends:
            return None
        return AttentionInputs(None, self.rotary, self.bias, partial(self.extend, sublayer.site))

    def extend(self, site, k, v):
        """Store k and v [1, query groups/t, m, d] of the new tokens; return k and v of all tokens visible to them."""
        keys, values = self.keys_and_values[site]
        end = self.length + k.size(2)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, self.first_visible:end], values[:, :, self.first_visible:end]

    def hidden_states(self, chunk: Chunk, tokens, hidden):
        """Run the layers of a chunk on new tokens [1, m], or on hidden [1, m, h] from the previous chunk.

        Returns hidden [1, m, h].
        """
        model, x = self.model, hidden
        if chunk.pre_process:
            x = model.embedding.add_positions(model.embedding.word_embeddings(tokens), self.positions, None)
        for layer in chunk.layers:
            x = layer(x, self)
        return x

    def logits(self, x):
        """Return the logits [1, m, num_words] of this rank's words for hidden states x [1, m, h]."""
        (vocabulary,) = self.model.head
        return F.linear(self.model.final_norm(x), vocabulary.logits_weight())[..., :vocabulary.num_words]
