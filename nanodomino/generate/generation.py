"""Generates text one token at a time, over all stages and tensor-parallel ranks.

    window of tokens -> stage 0 -> ... -> last stage -> logits of the next token -> sample -> broadcast to all stages

On the last stage every tensor-parallel rank gathers the full row of logits and samples from it. Their generators have
the same seed, so all ranks choose the same token without communicating again.

**Kernels.** cuDNN's attention makes a new plan for each number of keys, which takes longer than a token (23 to 37 ms on
an H100). So generate() allows only torch's other attention kernels.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanodomino.errors import NotFinite, require
from nanodomino.generate.cache import KeyValueCache
from nanodomino.layers.residual import seeded_generator
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.parallel import gather_logits

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@sdpa_kernel(KERNELS)
@torch.no_grad()
def generate(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int, temperature=0.8, top_k=0,
             seed=0, sample=0, show=lambda token: None, end_of_text=None) -> list[int]:
    """Return the prompt `tokens` (at least one token), followed by up to max_tokens new tokens. If end_of_text is
    sampled, the text ends without it. Every rank of a replica must call this with the same arguments.

    vocab_size: the number of tokens that the tokenizer knows. The model may have more, but they are never chosen.
    sample: the number of this text; texts with the same seed but different numbers use different random numbers.
    show(token): called on every rank after each token.
    """
    generator, longest = seeded_generator("cpu", seed, "generate", sample), model.config.context_length
    tokens, window, wanted = list(tokens), tokens[-longest:], len(tokens) + max_tokens
    new_cache = partial(model.config.cache_class, model, min(longest, len(window) + max_tokens), end_of_text)
    cache = new_cache()
    while len(tokens) < wanted:
        if len(window) > longest:
            window, cache = window[-(longest // 2 or 1):], new_cache()
        new = torch.tensor([window[cache.length:]], device=mesh.device)
        token = next_token(cache, mesh, new, vocab_size, temperature, top_k, generator)
        if token == end_of_text:
            break
        tokens.append(token)
        window.append(token)
        show(token)
    return tokens


def next_token(cache: KeyValueCache, mesh: Mesh, new, vocab_size: int, temperature: float, top_k: int,
               generator) -> int:
    """Run the tokens `new` [1, m], which follow the cached ones, and return the next token, the same on all ranks."""
    config, placement, x = cache.model.config, cache.model.config.placement, None
    cache.start(new)
    for number, chunk in enumerate(cache.model.chunks):        # in model order, as their inputs arrive
        previous, following = (placement.location(placement.virtual_stage(mesh.pp_rank, number) + step)
                               for step in (-1, 1))
        if previous and previous[0] != mesh.pp_rank:
            x = torch.empty(1, new.size(1), config.hidden_size, dtype=config.params_dtype, device=mesh.device)
            dist.recv(x, mesh.rank_of(pp=previous[0]), group=mesh.pp_group)
        x = cache.hidden_states(chunk, new, x)
        if following and following[0] != mesh.pp_rank:
            dist.send(x, mesh.rank_of(pp=following[0]), group=mesh.pp_group)
    cache.finish(new)
    token = torch.full([1], -1, device=mesh.device)            # tells all ranks if the logits are not finite
    if cache.model.post_process:
        logits = gather_logits(cache.logits(x[:, -1:]), *cache.model.head, vocab_size)
        if logits.isfinite().all():
            token[0] = sample_token(logits[0, 0], temperature, top_k, generator)
    if mesh.pp > 1:
        dist.broadcast(token, mesh.rank_of(pp=placement.location(placement.last)[0]), group=mesh.pp_group)
    for name in config.groups_that_generate_together:          # their ranks may round differently
        dist.broadcast(token, group=mesh.groups[name], group_src=0)
    require(token >= 0, "the model's logits are not finite, as after training that has diverged", NotFinite)
    return int(token)


def sample_token(logits, temperature: float, top_k: int, generator) -> int:
    """Sample a token from logits [v], only among the top_k largest (0: all). Temperature 0 takes the largest."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = (logits.double() - logits.max()) / temperature    # at most 0, so a small temperature cannot overflow
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator))
