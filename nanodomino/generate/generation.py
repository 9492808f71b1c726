"""Generates text one token at a time, over all stages and tensor-parallel ranks.

    window of tokens -> stage 0 -> ... -> last stage -> logits of the next token -> sample -> broadcast to all stages

On the last stage every tensor-parallel rank gathers the full row of logits and samples from it. Their generators have
the same seed, so all ranks choose the same token without communicating again.

**The cache.** Attention needs the keys and values of every earlier token, and they do not change when a token is added.
With a cache, each layer computes only one new position per token, however long the text is. When the text has filled
the model's context, the cache can't just drop the oldest token. Learned positions would all change. Rotary positions
enter only as distances, but in the upper layers cached keys and values still depend on the dropped token. So the cache
is emptied, and the later half of the context is recomputed from position 0.

**Kernels.** cuDNN's attention makes a new plan for each number of keys, which takes longer than a token (23 to 37 ms on
an H100). So generate() allows only torch's other attention kernels.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanodomino.errors import NotFinite, require
from nanodomino.layers.attention_mask import AttentionInputs, AttentionMask, rotation, to_device
from nanodomino.layers.dropout_and_positions import seeded_generator
from nanodomino.mesh import Mesh
from nanodomino.model import GPT
from nanodomino.parallel import gather_logits

PROMPT_TOKENS = 32       # length of the prompt of write_sample()


class KeyValueCache:
    """Holds the rotated keys and the values of each attention layer of this stage, both [1, query groups/t, size, d].
    The layers are given this cache instead of a MasksAndPositions, so it defines the methods that layers call.

    size: the number of positions that the cache can hold; the first `length` of them are filled.
    end_of_text: the token that ends a text; an option may let it end what later tokens can see."""

    def __init__(self, model: GPT, size: int, end_of_text: int | None):
        config, self.model, self.length, self.end_of_text = model.config, model, 0, end_of_text
        shape = (1, config.num_query_groups // model.mesh.tp, size, config.kv_channels)
        self.keys_and_values = {
            sublayer.site: torch.zeros(2, *shape, device=model.mesh.device, dtype=config.params_dtype)
            for chunk in model.chunks for sublayer in chunk.sublayers if sublayer.attends}

    def start(self, tokens):
        """Compute the positions of the new tokens [1, m], and forget the masks of the tokens before."""
        places = torch.arange(self.length, self.length + tokens.size(1))
        positions, self.begins = self.look_around(tokens, places)
        self.places, self.masks, self.positions = places, {}, to_device(positions, tokens.device)
        self.rotary = rotation(self.model.config, self.positions, tokens.size(1), tokens.device)

    def look_around(self, tokens, places):
        """Return (positions, first visible places without window), both [1, m] on the host, of tokens at places [m]."""
        return places.unsqueeze(0), torch.zeros_like(places).unsqueeze(0)

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
        if sublayer.window not in self.masks:
            mask = AttentionMask(self.places, self.begins, sublayer.window, self.length + len(self.places))
            first, bias = int(mask.first.min()), None
            if len(self.places) > 1 and not mask.causal:       # a single token sees all keys from the first on
                bias = mask.bias(self.model.config.params_dtype, x.device)[..., first:]
            self.masks[sublayer.window] = first, bias
        first, bias = self.masks[sublayer.window]
        return AttentionInputs(None, self.rotary, bias, extend_cache=partial(self.extend, sublayer.site, first))

    def extend(self, site, first, k, v):
        """Store k and v [1, query groups/t, m, d] of the new tokens. Return k and v of all tokens from `first` on."""
        keys, values = self.keys_and_values[site]
        end = self.length + k.size(2)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        return keys[:, :, first:end], values[:, :, first:end]


@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
@torch.no_grad()
def generate(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int, temperature=0.8, top_k=0,
             seed=0, sample=0, show=lambda token: None, end_of_text=None) -> list[int]:
    """Return the prompt `tokens` (at least one token), followed by up to max_tokens new tokens. If end_of_text is
    sampled, the text ends without it. Every rank of a replica must call this with the same arguments.

    vocab_size: the number of tokens that the tokenizer knows. The model may have more, but they are never chosen.
    sample: the number of this text; each number has other random numbers. show(token): called after each token."""
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
    model, config, placement, x = cache.model, cache.model.config, cache.model.config.placement, None
    cache.start(new)
    for number, chunk in enumerate(model.chunks):              # in model order, as their inputs arrive
        previous, following = (placement.location(placement.virtual_stage(mesh.pp_rank, number) + step)
                               for step in (-1, 1))
        if previous and previous[0] != mesh.pp_rank:
            x = torch.empty(1, new.size(1), config.hidden_size, dtype=config.params_dtype, device=mesh.device)
            dist.recv(x, mesh.rank_of(pp=previous[0]), group=mesh.pp_group)
        if chunk.pre_process:
            x = model.embedding.add_positions(model.embedding.word_embeddings(new), cache.positions, None)
        for layer in chunk.layers:
            x = layer(x, cache)                                # [1, m, h]
        if following and following[0] != mesh.pp_rank:
            dist.send(x, mesh.rank_of(pp=following[0]), group=mesh.pp_group)
    cache.finish(new)
    token = torch.full([1], -1, device=mesh.device)            # tells all ranks if the logits are not finite
    if model.post_process:
        (vocabulary,), last = model.head, model.final_norm(x[:, -1:])
        own = F.linear(last, vocabulary.logits_weight())[..., :vocabulary.num_words]
        logits = gather_logits(own, vocabulary, vocab_size)
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


def write_sample(model: GPT, corpus, dataset):
    """Let the first replica continue the first tokens of a split, and print the text. If an option spreads a replica's
    weights over several ranks of the dp group, all of them generate the same text. Raises NotFinite."""
    mesh, config = model.mesh, model.config
    _, index = mesh.axis("dp")
    if index < max([1, *(mesh.axis(name)[0] for name in config.groups_that_generate_together)]):
        prompt = dataset.batch(0, 0, 0, 1, 1, 1, shuffle=False).tokens[0, :PROMPT_TOKENS].tolist()
        tokens = generate(model, mesh, prompt, config.sample_tokens, corpus.vocab_size, config.temperature,
                          config.top_k, config.seed, end_of_text=corpus.end_of_text)
        if index == 0:
            decode = corpus.tokenizer().decode
            print(f"---- a sample (temperature {config.temperature}, top-k {config.top_k}); the first {len(prompt)} "
                  f"tokens are the prompt\n{decode(prompt)}|{decode(tokens[len(prompt):])}\n----", flush=True)
