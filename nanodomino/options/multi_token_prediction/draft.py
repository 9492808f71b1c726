"""Generates greedily with a draft: the same text in fewer steps of the main model (speculative decoding, 2211.17192).

The draft is the first depth of multi-token prediction (2412.19437, section 2.2). A step of the main model on two tokens
costs hardly more than a step on a single token, because it reads the same weights. So guess the next token, and let the
next step check the guess and continue from it. After the step on token a has given the hidden state h(a) and token b:

    draft    depth 1 on h(a) and b               -> a guess c
    step     main model on b and c               -> the token after b, and the token after c
             if the token after b is c           keep both tokens: two tokens from one step
             otherwise                           keep only the token after b; drop what was computed for c

The main model chooses every token, so the text does not depend on the guesses. (In 16 bits, two almost equal logits may
be rounded differently in a step on two tokens.) Depth 1 was trained to predict exactly the token that it guesses here.
It has its own keys and values, for all tokens that are part of the text.
"""

import torch

from nanodomino.errors import NotFinite, require
from nanodomino.generate.cache import KeyValueCache
from nanodomino.generate.generation import NOT_FINITE
from nanodomino.model import Chunk
from nanodomino.options.multi_token_prediction.runner import depth_chunks
from nanodomino.parallel import gather_logits


class Draft:
    """Guesses a token for each step of the main model. One stage must hold all layers, and the model needs a depth.

    guess: a list with the guess for the token after the text, or an empty list; steps: steps of the main model so far
    """

    def __init__(self):
        self.guess, self.steps = [], 0

    def chunks(self, model) -> list[Chunk]:
        """Return the chunks that need keys and values besides those of the main model."""
        return depth_chunks(model)[:1]

    def next_tokens(self, cache: KeyValueCache, window: list[int], vocab_size: int) -> list[int]:
        """Run the main model once, and return the one or two tokens that follow those of the window."""
        if cache.length == 0 or len(window) == cache.model.config.context_length:
            self.guess = []                                # an earlier text's guess, or one too many for the cache
        known = len(window) - cache.length                 # new tokens without the guess
        new = torch.tensor([window[cache.length:] + self.guess], device=cache.model.mesh.device)
        x = None
        cache.start(new)
        for chunk in cache.model.chunks:
            x = cache.hidden_states(chunk, new, x)
        chosen = most_likely(cache, x[:, known - 1:], vocab_size)
        if self.guess != chosen[:1]:
            chosen = chosen[:1]
        right = known + len(chosen) - 1                    # new tokens that are part of the text
        following = (window + chosen)[cache.length + 1:]   # the token after each of them
        self.guess = guess_next(cache, new[:, :right], x[:, :right], following, vocab_size)
        self.steps += 1
        return chosen


def guess_next(cache: KeyValueCache, new, x, following: list[int], vocab_size: int) -> list[int]:
    """Guess the token after the last of `following`, and count `new` as cached. Return a list with the guess.

    new: [1, m] tokens of the text; x: the main model's last hidden states for them; following: the token after each
    """
    model = cache.model
    cache.start(new)
    words = model.embedding.word_embeddings(torch.tensor([following], device=new.device))
    guess = most_likely(cache, model.mtp[0](words, x, cache)[:, -1:], vocab_size)
    cache.finish(new)
    return guess


def most_likely(cache: KeyValueCache, x, vocab_size: int) -> list[int]:
    """Return the most likely next token at each place of the hidden states x [1, m, h]."""
    logits = gather_logits(cache.logits(x), *cache.model.head, vocab_size)[0]
    require(logits.isfinite().all(), NOT_FINITE, NotFinite)
    return logits.argmax(dim=-1).tolist()
