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
import dataclasses
import secrets
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from nanodomino.checkpoint.folders import find_checkpoint
from nanodomino.checkpoint.load import load_weights
from nanodomino.checkpoint.manifest import read_manifest
from nanodomino.comm.world import LaunchInfo, find_device, start_world
from nanodomino.config.config import Config
from nanodomino.config.records import from_record
from nanodomino.config.setting import MAX_INT, flag_name, flag_settings
from nanodomino.corpus.folder import load_corpus
from nanodomino.corpus.tokenizer import Tokenizer, build_tokenizer
from nanodomino.errors import UserError, require
from nanodomino.generate.writing import tell, write_texts
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.run.failure import run_rank


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
        require(value is None or value >= least, f"{flag_name(name)} must be at least {least}, but is {value}")
        require(value is None or value <= MAX_INT, f"{flag_name(name)} must be at most {MAX_INT}, but is {value}")
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


def find_tokenizer(checkpoint: Path, config: Config, data_path: str | None) -> Tokenizer:
    """Of --data-path; else of a model that was imported, from beside it; else of what it was trained with. Raises
    UserError."""
    source = data_path or config.data_path
    if data_path is None and (checkpoint / "tokenizer.json").is_file():
        tokenizer, source = build_tokenizer(str(checkpoint)), checkpoint
        words = tokenizer.vocab_size
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


def main(arguments: list[str], launch: LaunchInfo) -> int:
    """Texts from a checkpoint of any layout, on as many tensor-parallel processes as there are.
    Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)               # Ctrl-C: all that was written is shown, nothing to save
    flags = command_line(arguments)
    tp = flags.tp or launch.world_size
    require(tp == launch.world_size,
            f"--tp {tp} needs {tp} processes, but there are {launch.world_size}; start torchrun --nproc_per_node {tp}")
    folder = find_checkpoint(Path(flags.load))
    layout = {one.name: one.default for one in flag_settings(Config, "The layout")}
    saved = dataclasses.replace(from_record(read_manifest(folder)["config"], folder), **layout)
    saved = dataclasses.replace(saved, tensor_model_parallel_size=tp, micro_batch_size=1, device=flags.device)
    config = saved.resolve(launch.world_size).with_vocabulary(saved.vocab_size)
    tokenizer = find_tokenizer(folder, config, flags.data_path)     # if it fails, then before the ranks meet
    device = find_device(config, launch)

    start_world(launch, device, config.timeout)
    mesh = make_mesh(1, 1, tp, device)
    model = GPT(config, mesh)
    load_weights(folder, model, mesh)
    seed = tell(secrets.randbelow(2**31) if flags.seed is None else flags.seed, mesh)
    if flags.seed is None and launch.rank == 0:
        print(f"seed {seed}: --seed {seed} writes the same again", file=sys.stderr)
    write_texts(flags, model, mesh, tokenizer, seed)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
