from functools import partial

import torch
import torch.distributed as dist

from nanodomino.config.config import Config
from nanodomino.generate.cache import Cache
from nanodomino.layers.masks_and_positions import seeded_generator
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.parallel import gather_logits

WORK_OF_A_THREAD = 2**21     # multiplications: 0.05 ms of a core where many positions share the weights, 0.8 ms for one


def choose(logits, temperature: float, top_k: int, generator) -> int:
    """The next token from logits [v]: the largest at temperature 0, else a draw among the top_k largest (all if 0)."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = (logits.double() - logits.max()) / temperature      # none above 0: no temperature makes them overflow
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator))


def useful_threads(config: Config, positions: int) -> int:
    """How many threads the products of a step on so many positions keep busy, by the largest matrix of a layer."""
    work = positions * config.hidden_size * config.ffn_hidden_size // config.tp
    return max(1, work // WORK_OF_A_THREAD)


@torch.no_grad()
def generate(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int, temperature=0.8, top_k=0,
             seed=0, use_cache=True, sample=0, show=lambda token: True, end_of_text=None) -> list[int]:
    """tokens (at least one) plus max_tokens more, or as many as come before an end_of_text. Called by every rank of a
    replica with the same arguments.

    vocab_size: of the tokenizer, which may be smaller than the model's; nothing beyond it is written.
    use_cache=False computes the whole window for each token: the same text, slower.
    sample: numbers the texts of one seed, each from random numbers of its own.
    show(token) is called on every rank as soon as a token is there, and says whether to go on: the same on all of them.
    """
    config, device, threads = model.config, mesh.device, torch.get_num_threads()
    generator, longest = seeded_generator("cpu", seed, "generate", sample), config.context_length
    tokens, window = list(tokens), tokens[-longest:]
    new_cache = partial(Cache, model, min(longest, len(window) + max_tokens), end_of_text)
    cache = new_cache()
    try:
        for _ in range(max_tokens):
            if len(window) > longest:
                window, cache = window[-(longest // 2 or 1):], new_cache()
            if not use_cache:
                cache = new_cache()
            new = torch.tensor([window[cache.length:]], device=device)
            torch.set_num_threads(min(threads, useful_threads(config, new.size(1))))
            token = next_token(cache, mesh, new, vocab_size, temperature, top_k, generator)
            if token == end_of_text:
                break
            tokens.append(token)
            window.append(token)
            if not show(token):
                break
    finally:
        torch.set_num_threads(threads)
    return tokens


def next_token(cache: Cache, mesh: Mesh, new, vocab_size: int, temperature: float, top_k: int, generator) -> int:
    """What follows the tokens new [1, m], the ones after those in the cache: drawn at the model's end, told to all."""
    config, placement, x = cache.model.config, cache.model.config.placement, None
    cache.meet(new)
    for number, chunk in enumerate(cache.model.chunks):        # each is over before the stage's next one is wanted
        before, after = (placement.location(placement.virtual_stage(mesh.pp_rank, number) + step) for step in (-1, 1))
        if before and before[0] != mesh.pp_rank:
            x = torch.empty(1, new.size(1), config.hidden_size, dtype=config.params_dtype, device=mesh.device)
            dist.recv(x, mesh.stage_rank(before[0]), group=mesh.pp_group)
        x = cache.run(chunk, new, x)
        if after and after[0] != mesh.pp_rank:
            dist.send(x, mesh.stage_rank(after[0]), group=mesh.pp_group)
    cache.pass_on(new)
    following = torch.zeros(1, dtype=torch.int64, device=mesh.device)
    if cache.model.post_process:
        logits = gather_logits(x, *cache.model.head, vocab_size)
        following[0] = choose(logits[0, 0], temperature, top_k, generator)
    if mesh.pp > 1:
        dist.broadcast(following, mesh.stage_rank(placement.location(placement.last)[0]), group=mesh.pp_group)
    return int(following)
