"""Generates text from a checkpoint, which may come from any layout.

The processes that torchrun starts share the model by tensor parallelism:

    python -m nanodomino.generate --load runs/nano-001 --prompt "def " --seed 1
    torchrun --nproc_per_node 2 -m nanodomino.generate --load runs/nano-001 --prompt "def " --seed 1    # the same text
"""

import argparse
import codecs
import secrets
import signal
import sys
import time
from itertools import product
from pathlib import Path

import torch.distributed as dist

from nanodomino.checkpoint.format import read_manifest, step_of
from nanodomino.checkpoint.load import config_of, find_checkpoint, load_weights, newest_intact_checkpoint, together
from nanodomino.comm.device import choose_kernels, find_device
from nanodomino.comm.world import LaunchInfo, from_rank_0, start_world
from nanodomino.corpus.prepared_folder import load_corpus
from nanodomino.corpus.tokenizers import Tokenizer, build_tokenizer, text_of
from nanodomino.errors import NotFinite, attempt, counted, require
from nanodomino.files import read_file
from nanodomino.generate.generation import generate
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.model import GPT
from nanodomino.run.failures import run_rank
from nanodomino.settings.config import Config
from nanodomino.settings.flags import Parser, check_range, flag_name

SEPARATOR = "---------------\n"


def command_line(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the flags. In the result, `prompts` is a list of texts. Raises UserError."""
    parser = Parser("python -m nanodomino.generate", allow_abbrev=False,
                    usage="python -m nanodomino.generate --load DIR [flags], alone or under torchrun",
                    description="Let a trained model continue a text.")
    parser.add_argument("--load", required=True, metavar="DIR",
                        help="a checkpoint, or a run's folder, whose newest checkpoint is then used")
    for name, metavar, default, help in (
            ("--prompt", "TEXT", "", "the text to continue (default: start a new text)"),
            ("--prompts", "FILE", None, "a file with one prompt per line, instead of --prompt; in a .jsonl file a "
             'line is {"text": "..."}, which can hold line breaks (default: none)'),
            ("--num-samples", "INT", 1, "texts per prompt, each sampled with different random numbers (default 1)"),
            ("--max-tokens", "INT", 200, "new tokens per text; a text ends earlier at end-of-text (default 200)"),
            ("--temperature", "FLOAT", 0.8, "number that divides the logits: below 1 favours likely tokens, above 1 "
             "unlikely ones; 0 always takes the most likely token (default 0.8)"),
            ("--top-k", "INT", 0, "sample only from this many most likely tokens; 0: from all tokens (default 0)"),
            ("--seed", "INT", None, "the same seed gives the same texts (default: a random seed)"),
            ("--data-path", "DIR", None, "data folder with the tokenizer (default: the one that the model was trained "
             "on)")):
        parser.add_argument(name, metavar=metavar, default=default, help=help,
                            type=dict(INT=int, FLOAT=float).get(metavar, str))
    for name, help in (
            ("--special-tokens", "the name of a special token in a prompt, such as <|im_end|>, means the token; "
             "otherwise the name is ordinary text"),
            ("--begin-of-text", "put the tokenizer's begin-of-text token in front of each prompt")):
        parser.add_argument(name, action="store_true", help=f"{help} (default: on if the training data was prepared "
                            "with this flag)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="where to compute; auto is cuda if there is a GPU, else cpu (default auto)")
    flags = parser.parse_args(arguments)
    for name, least in (("num_samples", 1), ("max_tokens", 0), ("top_k", 0), ("seed", 0)):
        if (value := getattr(flags, name)) is not None:
            check_range(flag_name(name), value, at_least=least)
    check_range("--temperature", flags.temperature, type=float)
    require(not (flags.prompt and flags.prompts), "--prompt and --prompts contradict each other; give only one")
    require(flags.prompt.encode(errors="replace").decode() == flags.prompt, "--prompt is not UTF-8 text; correct it")
    flags.prompts = [flags.prompt] if flags.prompts is None else read_prompts(flags.prompts)
    return flags


def read_prompts(path: str) -> list[str]:
    """Return the lines of the file of --prompts, or the texts of a .jsonl file, without blank lines. splitlines() would
    also cut a prompt at other characters than the end of a line. Raises UserError."""
    text = attempt(f"--prompts {path} can't be read as UTF-8 text", lambda: read_file(path).decode("utf-8-sig"),
                   advice="give a text file")
    lines = text.replace("\r\n", "\n").split("\n")
    prompts = [text_of(line.encode(), "text", f"--prompts {path}, line {number}", advice="")
               if path.endswith(".jsonl") else line for number, line in enumerate(lines, 1) if line.strip()]
    require(prompts, f"--prompts {path} holds no prompt; write one prompt per line")
    return prompts


def find_tokenizer(checkpoint: Path, config: Config, flags: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer: from --data-path if given, else from an imported model, else from the training data. Raises
    UserError if there is none, or if its vocabulary is larger than the model's."""
    encoding = dict(special_tokens=flags.special_tokens, begin_of_text=flags.begin_of_text)
    imported = flags.data_path is None and (checkpoint / "tokenizer.json").is_file()
    source = checkpoint if imported else flags.data_path or config.data_path
    require(source, f"{checkpoint} has no tokenizer, because it was imported from a folder without a tokenizer.json; "
            "give a data folder as --data-path")
    require(flags.data_path or Path(source).exists(), f"the tokenizer is stored with the training data, but the folder "
            f"{source} no longer exists; give its new path as --data-path")
    found = build_tokenizer(str(source), **encoding, end_of_text="eos_token") if imported else load_corpus(source)
    require(found.vocab_size <= config.vocab_size, f"the tokenizer of {source} has {found.vocab_size} tokens, but the "
            f"model has only {config.vocab_size}; give the data folder that the model was trained on as --data-path")
    return found if imported else found.tokenizer(**encoding)


def make_writer(tokenizer: Tokenizer):
    """Return a function that prints a token, or ends the text if it is given None. A token may be a single byte, but a
    UTF-8 character has up to four bytes. So the bytes of an incomplete character are held back until it is complete or
    can't be UTF-8. At the end of the text, U+FFFD is printed for them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(token: int | None):
        text = decoder.decode(b"", final=True) + "\n" if token is None else decoder.decode(tokenizer.token_bytes(token))
        print(text, end="", flush=True)
    return write


def write_texts(flags: argparse.Namespace, model: GPT, mesh: Mesh, tokenizer: Tokenizer, seed: int):
    """Print --num-samples texts for each prompt while they are generated, then tokens/s. Only rank 0's is shown."""
    config = model.config
    is_rank_0, longest = dist.get_rank() == 0, config.context_length
    write, written, start_time = make_writer(tokenizer), 0, time.perf_counter()
    for number, (text, sample) in enumerate(product(flags.prompts, range(flags.num_samples))):
        begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        prompt = [*begin, *tokenizer.encode(text).tolist()] or [tokenizer.end_of_text]
        if is_rank_0 and len(prompt) > longest and sample == 0:
            print(f"the prompt has {counted(len(prompt), 'token')}, but the model sees only the last {longest}, its "
                  "context length", file=sys.stderr)
        print((SEPARATOR if number else "") + text, end="", flush=True)
        tokens = generate(model, mesh, prompt, flags.max_tokens, tokenizer.vocab_size, flags.temperature, flags.top_k,
                          seed, number, write, tokenizer.end_of_text)
        written += len(tokens) - len(prompt)
        write(None)
    seconds = time.perf_counter() - start_time
    if is_rank_0:
        print(f"{counted(written, 'token')} in {seconds:.2f} s, {written / seconds:.1f} tokens/s", file=sys.stderr)


def main(arguments: list[str], launch: LaunchInfo) -> int:
    """Load the model on all ranks and print the texts. Returns the exit code. Raises UserError."""
    for number in (signal.SIGINT, signal.SIGPIPE):             # Ctrl-C, or `| head`, ends the command at once
        signal.signal(number, signal.SIG_DFL)
    flags = command_line(arguments)
    tp = launch.world_size
    # what may fail comes before the process groups start
    checkpoint = find_checkpoint(Path(flags.load))
    config = config_of(checkpoint, read_manifest(checkpoint), tp, tensor_model_parallel_size=tp, device=flags.device,
                       fp8_format=None, compile=False)         # generation multiplies in --dtype, on any GPU
    tokenizer = find_tokenizer(checkpoint, config, flags)
    device = find_device(config, launch)

    choose_kernels(config, device)
    start_world(launch, device, config.timeout)
    mesh = make_mesh(1, 1, tp, device)
    model = GPT(config, mesh, initialize=False)
    checkpoint = from_rank_0(checkpoint)
    together(lambda: load_weights(checkpoint, model))
    seed = from_rank_0(secrets.randbelow(2**31) if flags.seed is None else flags.seed)
    if flags.seed is None and launch.rank == 0:
        print(f"seed {seed}: --seed {seed} gives the same texts again", file=sys.stderr)
    try:
        write_texts(flags, model, mesh, tokenizer, seed)
    except NotFinite as error:
        good = newest_intact_checkpoint(checkpoint.absolute().parent.parent, lambda text: None,
                                        (step_of(checkpoint) or 0) - 1)
        raise NotFinite(f"{error}; " + (f"use the last good checkpoint: --load {good}" if good
                                        else f"give another checkpoint than {checkpoint}")) from None
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
