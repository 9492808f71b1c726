"""Generates greedily with a draft: the same text in fewer steps of the main model (speculative decoding, 2211.17192).

The draft is the first depth of multi-token prediction (2412.19437, section 2.2). A step of the main model on two tokens
costs hardly more than a step on a single token, because it reads the same weights. So guess the next token, and let the
next step check the guess and continue from it. Say the step on token a has given the hidden state h(a) and the token b:

    draft    depth 1 on h(a) and b               -> a guess c
    step     main model on b and c               -> the token after b, and the token after c
             if the token after b is c           keep both tokens: two tokens from one step
             otherwise                           keep only the token after b; drop what was computed for c

The main model chooses every token, so the text does not depend on the guesses. (In 16 bits, two almost equal logits may
be rounded differently in a step on two tokens.) Depth 1 was trained to predict exactly the token that it guesses here.
It has its own keys and values, for all tokens that are part of the text.
"""

from functools import partial

import torch
from torch.nn.attention import sdpa_kernel

from nanodomino.generate.cache import KeyValueCache
from nanodomino.generate.generation import KERNELS
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.parallel import gather_logits


@sdpa_kernel(KERNELS)
@torch.no_grad()
def generate_with_draft(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int,
                        show=lambda token: True, end_of_text=None) -> tuple[list[int], int]:
    """Return (what generate() returns at temperature 0, the number of steps of the main model).

    One stage must hold all layers, and the model must have a depth. generate() explains the arguments.
    """
    longest, wanted, steps = model.config.context_length, len(tokens) + max_tokens, 0
    tokens, window = list(tokens), tokens[-longest:]
    new_cache = partial(KeyValueCache, model, min(longest, len(window) + max_tokens), end_of_text,
                        chunks=[*model.chunks, model.depth_chunks[0]])
    cache, guess = new_cache(), []
    while len(tokens) < wanted:
        if len(window) > longest:
            window, cache, guess = window[-(longest // 2 or 1):], new_cache(), []
        if len(window) == longest:                         # no room for a guess
            guess = []
        known = len(window) - cache.length                 # new tokens without the guess
        new = torch.tensor([window[cache.length:] + guess], device=mesh.device)
        x, steps = run_main(cache, new), steps + 1
        chosen = most_likely(cache, x[:, known - 1:], vocab_size)
        if guess != chosen[:1]:
            chosen = chosen[:1]
        right = known + len(chosen) - 1                    # new tokens that are part of the text
        following = (window + chosen)[cache.length + 1:]   # the token after each of them
        guess = run_draft(cache, new[:, :right], x[:, :right], following, vocab_size)
        for token in chosen[:wanted - len(tokens)]:
            if token == end_of_text:
                return tokens, steps
            tokens.append(token)
            window.append(token)
            if not show(token):
                return tokens, steps
    return tokens, steps


def run_main(cache: KeyValueCache, new):
    """Return the main model's last hidden states [1, m, h] for the tokens `new` [1, m] after the cached tokens."""
    x = None
    cache.start(new)
    for chunk in cache.model.chunks:
        x = cache.hidden_states(chunk, new, x)
    return x


def run_draft(cache: KeyValueCache, new, x, following: list[int], vocab_size: int) -> list[int]:
    """Guess the token after the last of `following`, and count `new` as cached. Return a list with the guess.

    new: [1, m] tokens of the text; x: run_main()'s result for them; following: the token after each of them
    """
    model = cache.model
    cache.start(new)
    words = model.embedding.word_embeddings(torch.tensor([following], device=new.device))
    guess = most_likely(cache, model.mtp[0](words, x, cache)[:, -1:], vocab_size)
    cache.finish(new)
    return guess


def most_likely(cache: KeyValueCache, x, vocab_size: int) -> list[int]:
    """Return the most likely next token at each place of the hidden states x [1, m, h]."""
    return gather_logits(cache.logits(x), *cache.model.head, vocab_size)[0].argmax(dim=-1).tolist()
