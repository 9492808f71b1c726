"""Let a model write: one token after the other, over all stages and shards.

    context (the last s tokens) -> stage 0 -> ... -> last stage -> logits of the next token -> draw -> tell everybody

Each tensor-parallel rank gathers the whole row of logits and draws with a generator of the same seed, so all draw the same
token without talking; the last stage then tells it to the stages before.
"""

import torch
import torch.distributed as dist

from nanodomino.mesh import Mesh
from nanodomino.model import GPT, seeded_generator
from nanodomino.parallel import gather_logits


def choose(logits, temperature: float, top_k: int, generator) -> int:
    """The next token from logits [v]: the largest at temperature 0, else a draw among the top_k largest (all if 0)."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = logits.double() / temperature
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator))


@torch.no_grad()
def generate(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int, temperature=0.8, top_k=0, seed=0) -> list[int]:
    """tokens (at least one) plus max_tokens more. Called by every rank of a replica with the same arguments.

    vocab_size: of the tokenizer, which may be smaller than the model's; nothing beyond it is written.
    """
    config = model.config
    generator = seeded_generator("cpu", seed, "generate")
    tokens = list(tokens)
    for _ in range(max_tokens):
        context = torch.tensor([tokens[-config.seq_length:]], device=mesh.device)
        positions = torch.arange(context.size(1), device=mesh.device).unsqueeze(0)
        hidden = None
        if not mesh.is_first_stage:
            hidden = torch.empty(1, context.size(1), config.hidden_size, dtype=getattr(torch, config.dtype), device=mesh.device)
            dist.recv(hidden, mesh.stage_rank(mesh.pp_rank - 1), group=mesh.pp_forward_group)
        output = model(context, positions, hidden=hidden)
        following = torch.zeros(1, dtype=torch.int64, device=mesh.device)
        if mesh.is_last_stage:
            logits = gather_logits(output[:, -1:], *model.head, vocab_size)
            following[0] = choose(logits[0, 0], temperature, top_k, generator)
        else:
            dist.send(output, mesh.stage_rank(mesh.pp_rank + 1), group=mesh.pp_forward_group)
        if mesh.pp > 1:
            dist.broadcast(following, mesh.stage_rank(mesh.pp - 1), group=mesh.pp_forward_group)
        tokens.append(int(following))
    return tokens
