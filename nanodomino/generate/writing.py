import argparse
import codecs
import sys
import time
from itertools import product

import torch
import torch.distributed as dist

from nanodomino.config.terminal import stdout_is_open
from nanodomino.corpus.tokenizer import Tokenizer
from nanodomino.generate.sampling import generate
from nanodomino.mesh import Mesh
from nanodomino.model import GPT

SEPARATOR = "---------------\n"


# ---- on a screen

class Writer:
    """Puts texts on standard output, which only rank 0 has, until whoever reads it has gone (`| head`).

    Each method returns whether somebody still reads: on every rank what rank 0 knows, since one that stops alone would
    leave the others waiting in their next sum.
    """

    def __init__(self, tokenizer: Tokenizer, mesh: Mesh):
        self.tokenizer, self.mesh = tokenizer, mesh
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sys.stdout.reconfigure(errors="replace")               # a ? for a character that the terminal does not know

    def write(self, text: str) -> bool:
        print(text, end="", flush=True)
        return bool(tell(stdout_is_open(), self.mesh))

    def write_token(self, token: int) -> bool:
        """The characters that this token completes."""
        return self.write(self.decoder.decode(self.tokenizer.token_bytes(token)))

    def end_text(self) -> bool:
        """What is left is no character any more."""
        return self.write(self.decoder.decode(b"", final=True) + "\n")


def tell(number: int, mesh: Mesh) -> int:
    """Rank 0's number, on every tensor-parallel rank."""
    told = torch.tensor([int(number)], device=mesh.device)
    if mesh.tp > 1:
        dist.broadcast(told, 0, group=mesh.tp_group)
    return int(told)


def write_texts(flags: argparse.Namespace, model: GPT, mesh: Mesh, tokenizer: Tokenizer, seed: int):
    """--num-samples texts for each prompt, each shown as it is written; then, on stderr, how fast that was."""
    config = model.config
    context_name = "seq-length" if config.context_length == config.seq_length else "max-position-embeddings"
    speaks, longest = dist.get_rank() == 0, config.context_length
    writer, written, begin = Writer(tokenizer, mesh), 0, time.perf_counter()
    for number, (text, sample) in enumerate(product(flags.prompts, range(flags.num_samples))):
        prompt = tokenizer.encode_prompt(text) or [tokenizer.end_of_text]
        if speaks and len(prompt) > longest and sample == 0:
            print(f"the prompt has {len(prompt)} tokens, of which the model sees the last {longest}, its "
                  f"{context_name}", file=sys.stderr)
        writer.write((SEPARATOR if number else "") + text)
        tokens = generate(model, mesh, prompt, flags.max_tokens, tokenizer.vocab_size, flags.temperature, flags.top_k,
                          seed, flags.cache, number, writer.write_token, tokenizer.end_of_text)
        written += len(tokens) - len(prompt)
        if not writer.end_text():
            return
    seconds = time.perf_counter() - begin
    if speaks:
        print(f"{written} tokens in {seconds:.2f} s, {written / seconds:.1f} tokens/s", file=sys.stderr)
