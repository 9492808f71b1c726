"""Let a model write: one token after the other, over all stages and shards.

    window of tokens -> stage 0 -> ... -> last stage -> logits of the next token -> draw -> tell everybody

Each tensor-parallel rank gathers the whole row of logits and draws with a generator of the same seed, so all draw the
same token without talking; the last stage then tells it to the stages before.

**Key-value cache.** Attention needs the keys and values of all tokens before, and they do not change when one is added.
So they are kept, and a new token costs one position of every layer, however long the text is. Positions are learned, so
a window that is full can't slide by one token (each would move to another position and change everything): its later
half is kept and read anew.

    python -m nanodomino.generate --load runs/nano-001 --prompt "def " --max-tokens 200
    torchrun --nproc_per_node 2 -m nanodomino.generate --tp 2 --load runs/nano-001 --prompt "def "      # the same text
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.checkpoint import load_weights
from nanodomino.config import Config
from nanodomino.data import load_corpus
from nanodomino.launch import start
from nanodomino.manifest import find_checkpoint, read_manifest
from nanodomino.mesh import Mesh, Place, find_device, make_mesh, start_world
from nanodomino.model import GPT, Attention, close_residual, seeded_generator
from nanodomino.parallel import gather_logits
from nanodomino.settings import require


def choose(logits, temperature: float, top_k: int, generator) -> int:
    """The next token from logits [v]: the largest at temperature 0, else a draw among the top_k largest (all if 0)."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = (logits.double() - logits.max()) / temperature      # none above 0: no temperature makes them overflow
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator))


class Cache:
    """Keys and values [1, n/t, positions, d] of each attention of this stage, for the first `length` positions."""

    def __init__(self, model: GPT):
        self.model, self.length = model, 0
        shape = (1, model.config.num_attention_heads // model.mesh.tp, model.config.max_position_embeddings,
                 model.config.head_dim)
        self.kept = {sublayer.site: torch.zeros(2, *shape, device=model.mesh.device,
                                                dtype=model.config.params_dtype)
                     for sublayer in model.sublayers if isinstance(sublayer, Attention)}

    def attend(self, attention: Attention, qkv):
        """qkv [1, m, 3h/t] of the m positions after `length` -> [1, m, h/t]; m > 1 only on an empty cache."""
        q, k, v = attention.split_heads(qkv)
        keys, values = self.kept[attention.site]
        end = self.length + qkv.size(1)
        keys[:, :, self.length:end], values[:, :, self.length:end] = k, v
        context = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=self.length == 0)
        return context.transpose(1, 2).flatten(2)

    def stage(self, tokens, hidden):
        """The stage on m new tokens [1, m] (hidden [1, m, h] from the stage before) -> hidden,
        or logits of this rank's words."""
        model, x = self.model, hidden
        positions = torch.arange(self.length, self.length + tokens.size(1), device=tokens.device).unsqueeze(0)
        if model.pre_process:
            x = model.embedding.add_positions(model.embedding.word_embeddings(tokens), positions, None)
        for sublayer in model.sublayers:
            columns = sublayer.column(sublayer.norm(x))
            attends = isinstance(sublayer, Attention)
            core = self.attend(sublayer, columns) if attends else sublayer.core(columns, None)
            x = close_residual(x, sublayer.row(core), sublayer.row.bias, None)
        self.length += tokens.size(1)
        if not model.post_process:
            return x
        (vocabulary,) = model.head
        return F.linear(model.final_norm(x[:, -1:]), vocabulary.logits_weight())[..., :vocabulary.valid]


@torch.no_grad()
def generate(model: GPT, mesh: Mesh, tokens: list[int], max_tokens: int, vocab_size: int, temperature=0.8, top_k=0,
             seed=0, use_cache=True) -> list[int]:
    """tokens (at least one) plus max_tokens more. Called by every rank of a replica with the same arguments.

    vocab_size: of the tokenizer, which may be smaller than the model's; nothing beyond it is written.
    use_cache=False computes the whole window for each token: the same text, slower.
    """
    config, device = model.config, mesh.device
    generator = seeded_generator("cpu", seed, "generate")
    tokens, window, cache = list(tokens), tokens[-config.seq_length:], Cache(model)
    for _ in range(max_tokens):
        if len(window) > config.seq_length:
            window, cache = window[-(config.seq_length // 2 or 1):], Cache(model)
        if not use_cache:
            cache = Cache(model)
        new = torch.tensor([window[cache.length:]], device=device)
        hidden = None
        if not mesh.is_first_stage:
            hidden = torch.empty(1, new.size(1), config.hidden_size, dtype=config.params_dtype, device=device)
            dist.recv(hidden, mesh.stage_rank(mesh.pp_rank - 1), group=mesh.pp_group)
        output = cache.stage(new, hidden)
        following = torch.zeros(1, dtype=torch.int64, device=device)
        if mesh.is_last_stage:
            logits = gather_logits(output, *model.head, vocab_size)
            following[0] = choose(logits[0, 0], temperature, top_k, generator)
        else:
            dist.send(output, mesh.stage_rank(mesh.pp_rank + 1), group=mesh.pp_group)
        if mesh.pp > 1:
            dist.broadcast(following, mesh.stage_rank(mesh.pp - 1), group=mesh.pp_group)
        tokens.append(int(following))
        window.append(tokens[-1])
    return tokens


# ---- from a checkpoint

def command_line(arguments: list[str]) -> argparse.Namespace:
    """The flags; raises UserError."""
    parser = argparse.ArgumentParser("python -m nanodomino.generate",
                                     description="Let a trained model go on with a text.", allow_abbrev=False)
    parser.add_argument("--load", required=True, help="a checkpoint, or the folder of a run (its newest one)")
    parser.add_argument("--prompt", default="", help="the text to go on with (default: the end-of-text token)")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="tokens to choose among; 0 for all")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--tp", type=int, default=None, help="tensor-parallel processes (default: all of torchrun's)")
    parser.add_argument("--data-path", default=None,
                        help="the data folder with the tokenizer (default: the training run's)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True, help="keep keys and values")
    parser.error = lambda message: require(False, f"{message}; python -m nanodomino.generate --help lists every flag")
    flags = parser.parse_args(arguments)
    require(flags.load, "--load must not be empty; give a checkpoint or the folder of a run")
    require(flags.tp is None or flags.tp >= 1,
            f"--tp must be at least 1, but is {flags.tp}; leave it out for all of torchrun's processes")
    require(flags.prompt.encode("utf-8", "replace").decode() == flags.prompt,
            "--prompt must be UTF-8 text, but holds other bytes; convert it")
    require(flags.max_tokens >= 0 and flags.top_k >= 0 and flags.seed >= 0,
            "--max-tokens, --top-k and --seed must be at least 0, "
            f"but are {flags.max_tokens}, {flags.top_k} and {flags.seed}")
    require(0.0 <= flags.temperature < float("inf"),
            f"--temperature must be a finite number of at least 0, but is {flags.temperature}")
    return flags


def main(arguments: list[str], place: Place) -> int:
    """One text from a checkpoint of any layout, on as many tensor-parallel processes as there are.
    Returns the exit code."""
    flags = command_line(arguments)
    tp = flags.tp or place.world_size
    require(tp == place.world_size,
            f"--tp {tp} needs {tp} processes, but there are {place.world_size}; start torchrun --nproc_per_node {tp}")
    folder = find_checkpoint(Path(flags.load))
    settings = read_manifest(folder)["config"]
    unknown = settings.keys() - {one.name for one in dataclasses.fields(Config)}
    require(not unknown, f"{folder} has settings that this version does not know ({', '.join(sorted(unknown))}); "
            "use the version that wrote it")
    saved = dataclasses.replace(Config(**settings), tensor_model_parallel_size=tp,
                                pipeline_model_parallel_size=1, data_parallel_size=1, micro_batch_size=1, slices=1,
                                columns=1, device=flags.device)
    config = saved.resolve(place.world_size).with_vocabulary(saved.vocab_size)
    corpus = load_corpus(flags.data_path or saved.data_path)
    require(corpus.vocab_size <= config.vocab_size,
            f"the tokenizer of {corpus.path} has {corpus.vocab_size} tokens, but the model "
            f"{config.vocab_size}; give the --data-path that it was trained on")
    tokenizer, device = corpus.tokenizer(), find_device(config, place)

    start_world(place, device, config.timeout)
    mesh = make_mesh(1, 1, tp, device)
    model = GPT(config, mesh)
    load_weights(folder, model, mesh)
    prompt = tokenizer.encode_ordinary(flags.prompt) or [corpus.end_of_text]
    begin = time.perf_counter()
    tokens = generate(model, mesh, prompt, flags.max_tokens, corpus.vocab_size, flags.temperature, flags.top_k,
                      flags.seed, flags.cache)
    seconds = time.perf_counter() - begin
    print(flags.prompt + tokenizer.decode(tokens[len(prompt):]))
    if place.rank == 0:
        print(f"{flags.max_tokens} tokens in {seconds:.2f} s, {flags.max_tokens / seconds:.1f} tokens/s",
              file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    start(main, sys.argv[1:])
