"""Let a model write: one token after the other, over all stages and shards.

    window of tokens -> stage 0 -> ... -> last stage -> logits of the next token -> draw -> tell everybody

Each tensor-parallel rank gathers the whole row of logits and draws with a generator of the same seed, so all draw the
same token without talking; the last stage then tells it to the stages before.

**Key-value cache.** Attention needs the keys and values of all tokens before, and they do not change when one is added.
So they are kept, those of a group of heads once, and a new token costs one position of every layer, however long the
text is. A window that is full can't slide by one token: learned positions would all be others, and with rotary ones,
whose products know distances alone, the keys and values of upper layers would still know of the token that has left.
So its later half is kept and read anew, from place 0 on.

**Threads.** A token of a small model is a hundred little products. To hand a part of one to another thread and to wait
for it costs 10 us where a core is idle, and milliseconds where somebody else has the core. So each step takes as many
threads as its work is worth: one for a token of gpt2, all of them for a long prompt, or for gpt3-13b.

**Characters.** A token is a few bytes, and a character of UTF-8 up to four: its last byte may be three tokens away.
What is shown is what is complete; a decoder keeps the rest until later tokens complete it, or show that it is none.

    python -m nanodomino.generate --load runs/nano-001 --prompt "def " --seed 1
    torchrun --nproc_per_node 2 -m nanodomino.generate --load runs/nano-001 --prompt "def " --seed 1    # the same text
"""

import argparse
import codecs
import dataclasses
import secrets
import signal
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path

import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanodomino.checkpoint import load_weights
from nanodomino.command import somebody_reads
from nanodomino.config import Config, from_record
from nanodomino.data import load_corpus
from nanodomino.launch import start
from nanodomino.manifest import find_checkpoint, read_manifest
from nanodomino.mesh import Mesh, Place, find_device, make_mesh, start_world
from nanodomino.model import GPT, Chunk
from nanodomino.parallel import gather_logits
from nanodomino.positions import attention_bias, documents_of, positions_in, rotation
from nanodomino.settings import LARGEST, UserError, flags_of, require, spelling
from nanodomino.sublayers import Attention, by_head, close_residual, fused_attention, join_heads, prepare
from nanodomino.surroundings import seeded_generator
from nanodomino.tokenizer import build_tokenizer

WORK_OF_A_THREAD = 2**21     # multiplications: 0.05 ms of a core where many positions share the weights, 0.8 ms for one
SEPARATOR = "---------------\n"


def choose(logits, temperature: float, top_k: int, generator) -> int:
    """The next token from logits [v]: the largest at temperature 0, else a draw among the top_k largest (all if 0)."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = (logits.double() - logits.max()) / temperature      # none above 0: no temperature makes them overflow
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator))


class Cache:
    """Keys and values [1, groups/t, positions, d] of each attention of this stage, for the first `length` tokens of a
    window of at most `room`; keys are turned already. begin: where the document begins that the next token belongs to,
    which end_of_text ends, if its end means anything.
    """

    def __init__(self, model: GPT, room: int, end_of_text: int | None = None):
        config = model.config
        self.model, self.length, self.begin = model, 0, 0
        self.end_of_text = end_of_text if config.asks_for_documents else None
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
            documents = documents_of(tokens, self.end_of_text)
            self.positions = positions_in(documents) if config.reset_position_ids else self.positions
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

    def attend(self, attention: Attention, qkv):
        """qkv [1, m, ..] of the new tokens -> [1, m, heads d]."""
        q, k, v = attention.split(qkv)
        q, _ = prepare(q, attention.q_layernorm, self.turn)
        k, _ = prepare(k, attention.k_layernorm, self.turn)
        keys, values = self.kept[attention.site]
        end = self.length + qkv.size(1)
        keys[:, :, self.length:end], values[:, :, self.length:end] = by_head(k), by_head(v)
        keys, values = keys[:, :, self.seen:end], values[:, :, self.seen:end]
        return join_heads(fused_attention(by_head(q), keys, values, self.bias))

    def run(self, chunk: Chunk, tokens, hidden):
        """A chunk on m new tokens [1, m] (hidden [1, m, h] from the layers before) -> hidden,
        or logits of this rank's words."""
        model, x = self.model, hidden
        if chunk.pre_process:
            x = model.embedding.add_positions(model.embedding.word_embeddings(tokens), self.positions, None)
        for sublayer in chunk.sublayers:
            columns = sublayer.column(sublayer.norm(x))
            core = self.attend(sublayer, columns) if sublayer.attends else sublayer.core(columns, None)
            x = close_residual(x, sublayer.row(core), sublayer.row.bias, None)
        if not chunk.post_process:
            return x
        (vocabulary,) = model.head
        return F.linear(model.final_norm(x[:, -1:]), vocabulary.logits_weight())[..., :vocabulary.valid]


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
        before, after = (placement.place(placement.virtual_stage(mesh.pp_rank, number) + step) for step in (-1, 1))
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
        dist.broadcast(following, mesh.stage_rank(placement.place(placement.last)[0]), group=mesh.pp_group)
    return int(following)


# ---- on a screen

class Writer:
    """Puts texts on standard output, which only rank 0 has, until whoever reads it has gone (`| head`).

    Each method returns whether somebody still reads: on every rank what rank 0 knows, since one that stops alone would
    leave the others waiting in their next sum.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, mesh: Mesh):
        self.tokenizer, self.mesh = tokenizer, mesh
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sys.stdout.reconfigure(errors="replace")               # a ? for a character that the terminal does not know

    def write(self, text: str) -> bool:
        print(text, end="", flush=True)
        return bool(tell(somebody_reads(), self.mesh))

    def write_token(self, token: int) -> bool:
        """The characters that this token completes."""
        return self.write(self.decoder.decode(self.tokenizer.decode_single_token_bytes(token)))

    def end_text(self) -> bool:
        """What is left is no character any more."""
        return self.write(self.decoder.decode(b"", final=True) + "\n")


def tell(number: int, mesh: Mesh) -> int:
    """Rank 0's number, on every tensor-parallel rank."""
    told = torch.tensor([int(number)], device=mesh.device)
    if mesh.tp > 1:
        dist.broadcast(told, 0, group=mesh.tp_group)
    return int(told)


def write_texts(flags: argparse.Namespace, model: GPT, mesh: Mesh, tokenizer: tiktoken.Encoding, seed: int):
    """--num-samples texts for each prompt, each shown as it is written; then, on stderr, how fast that was."""
    config = model.config
    context_name = "seq-length" if config.context_length == config.seq_length else "max-position-embeddings"
    speaks, longest = dist.get_rank() == 0, config.context_length
    writer, written, begin = Writer(tokenizer, mesh), 0, time.perf_counter()
    for number, (text, sample) in enumerate(product(flags.prompts, range(flags.num_samples))):
        prompt = tokenizer.encode(text, allowed_special="all") or [tokenizer.eot_token]
        if speaks and len(prompt) > longest and sample == 0:
            print(f"the prompt has {len(prompt)} tokens, of which the model sees the last {longest}, its "
                  f"{context_name}", file=sys.stderr)
        writer.write((SEPARATOR if number else "") + text)
        tokens = generate(model, mesh, prompt, flags.max_tokens, tokenizer.n_vocab, flags.temperature, flags.top_k,
                          seed, flags.cache, number, writer.write_token, tokenizer.eot_token)
        written += len(tokens) - len(prompt)
        if not writer.end_text():
            return
    seconds = time.perf_counter() - begin
    if speaks:
        print(f"{written} tokens in {seconds:.2f} s, {written / seconds:.1f} tokens/s", file=sys.stderr)


# ---- from a checkpoint

def command_line(arguments: list[str]) -> argparse.Namespace:
    """The flags; raises UserError."""
    parser = argparse.ArgumentParser("python -m nanodomino.generate", allow_abbrev=False,
                                     usage="python -m nanodomino.generate --load DIR [flags], alone or under torchrun",
                                     description="Let a trained model go on with a text.")
    parser.add_argument("--load", required=True, metavar="DIR",
                        help="a checkpoint, or the folder of a run (its newest one)")
    parser.add_argument("--prompt", default="", metavar="TEXT",
                        help="the text to go on with; FILE:NAME reads it from a file (default: begin a new one)")
    parser.add_argument("--prompts", default=None, metavar="FILE",
                        help="a file with a prompt in each line, in place of --prompt (default: none)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="INT",
                        help="texts to write for each prompt, each from other random numbers (default 1)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="INT",
                        help="tokens to write in each, if no end-of-text comes before (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="FLOAT",
                        help="below 1 likely tokens are drawn more often than the model says, above 1 less often; "
                        "0 takes the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="INT",
                        help="draw among so many of the likeliest tokens; 0 for all (default 0)")
    parser.add_argument("--seed", type=int, default=None, metavar="INT",
                        help="of the random numbers: the same seed, the same texts (default: another one each time)")
    parser.add_argument("--tp", type=int, default=None, metavar="INT",
                        help="tensor-parallel processes (default: all of torchrun's)")
    parser.add_argument("--data-path", default=None, metavar="DIR",
                        help="the data folder with the tokenizer (default: the training run's)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="where to compute; auto takes CUDA where it is found (default auto)")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True,
                        help="keep the keys and values of earlier tokens: the same text, sooner (default: on)")
    parser.error = lambda message: require(False, f"{message}; python -m nanodomino.generate --help lists every flag")
    flags = parser.parse_args(arguments)
    require(flags.load, "--load must not be empty; give a checkpoint or the folder of a run")
    require(flags.tp is None or flags.tp >= 1,
            f"--tp must be at least 1, but is {flags.tp}; leave it out for all of torchrun's processes")
    for name, least in (("num_samples", 1), ("max_tokens", 0), ("top_k", 0), ("seed", 0)):
        value = getattr(flags, name)
        require(value is None or value >= least, f"{spelling(name)} must be at least {least}, but is {value}")
        require(value is None or value <= LARGEST, f"{spelling(name)} must be at most {LARGEST}, but is {value}")
    require(0.0 <= flags.temperature < float("inf"),
            f"--temperature must be a finite number of at least 0, but is {flags.temperature}")
    require(not (flags.prompt and flags.prompts), "--prompt and --prompts contradict each other; give one")
    flags.prompts = find_prompts(flags)
    return flags


def find_prompts(flags: argparse.Namespace) -> list[str]:
    """--prompt's text, or each line that --prompts names. Raises UserError."""
    if flags.prompts is None:
        return [find_prompt(flags.prompt)]
    lines = [line.rstrip("\r") for line in read_text(flags.prompts, "--prompts").split("\n")]
    require(any(lines), f"--prompts {flags.prompts} holds no prompt; write one into each of its lines")
    return [line for line in lines if line]


def find_prompt(text: str) -> str:
    """--prompt's text, or that of the file which it names (nanoGPT's FILE:NAME). Raises UserError."""
    if text.startswith("FILE:"):
        return read_text(text.removeprefix("FILE:"), "--prompt")
    try:
        text.encode("utf-8")
        return text
    except UnicodeError:
        raise UserError("--prompt must be UTF-8 text, but holds other bytes; convert it") from None


def read_text(path: str, flag: str) -> str:
    """Of the file that a flag names. Raises UserError."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path} can't be read ({error.strerror}); give a file that is there") from None
    except UnicodeError:
        raise UserError(f"{flag} {path} must be UTF-8 text, but holds other bytes; convert it") from None


def find_tokenizer(checkpoint: Path, config: Config, data_path: str | None) -> tiktoken.Encoding:
    """Of --data-path; else of a model that was imported, from beside it; else of what it was trained with. Raises
    UserError."""
    source = data_path or config.data_path
    if data_path is None and (checkpoint / "tokenizer.json").is_file():
        tokenizer, source = build_tokenizer(str(checkpoint)), checkpoint
        words = tokenizer.n_vocab
    else:
        require(source, f"the tokenizer lies with a training text, and {checkpoint} was imported, not trained, without "
                "a tokenizer.json; give a data folder as --data-path")
        require(data_path or Path(source).exists(), f"the tokenizer lies with the training text, and {source} is not "
                "there any more; give that folder's new place as --data-path")
        corpus = load_corpus(source)
        tokenizer, words = None, corpus.vocab_size
    require(words <= config.vocab_size, f"the tokenizer of {source} has {words} tokens, but the model "
            f"{config.vocab_size}; give the --data-path that it was trained on")
    return tokenizer or corpus.tokenizer()


def main(arguments: list[str], place: Place) -> int:
    """Texts from a checkpoint of any layout, on as many tensor-parallel processes as there are.
    Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)               # Ctrl-C: all that was written is shown, nothing to save
    flags = command_line(arguments)
    tp = flags.tp or place.world_size
    require(tp == place.world_size,
            f"--tp {tp} needs {tp} processes, but there are {place.world_size}; start torchrun --nproc_per_node {tp}")
    folder = find_checkpoint(Path(flags.load))
    layout = {one.name: one.default for one in flags_of(Config, "The layout")}
    saved = dataclasses.replace(from_record(read_manifest(folder)["config"], folder), **layout)
    saved = dataclasses.replace(saved, tensor_model_parallel_size=tp, micro_batch_size=1, device=flags.device)
    config = saved.resolve(place.world_size).with_vocabulary(saved.vocab_size)
    tokenizer = find_tokenizer(folder, config, flags.data_path)     # if it fails, then before the ranks meet
    device = find_device(config, place)

    start_world(place, device, config.timeout)
    mesh = make_mesh(1, 1, tp, device)
    model = GPT(config, mesh)
    load_weights(folder, model, mesh)
    seed = tell(secrets.randbelow(2**31) if flags.seed is None else flags.seed, mesh)
    if flags.seed is None and place.rank == 0:
        print(f"seed {seed}: --seed {seed} writes the same again", file=sys.stderr)
    write_texts(flags, model, mesh, tokenizer, seed)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    start(main, sys.argv[1:])
