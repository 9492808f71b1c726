"""Prints generated texts, token by token.

A token may be a single byte, and a UTF-8 character has up to four bytes, so a character may end three tokens after its
start. A decoder holds incomplete characters back until later tokens complete them or show that they are not UTF-8.
"""

import argparse
import codecs
import sys
import time
from itertools import product

import torch.distributed as dist

from nanodomino.corpus.tokenizers import Tokenizer
from nanodomino.errors import counted
from nanodomino.generate.generation import generate
from nanodomino.mesh import Mesh
from nanodomino.model import GPT

SEPARATOR = "---------------\n"


class Writer:
    """Writes to standard output; the output of all ranks but rank 0 is discarded."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write_token(self, token: int):
        """Print the characters that this token completes."""
        print(self.decoder.decode(self.tokenizer.token_bytes(token)), end="", flush=True)

    def end_text(self):
        """Print U+FFFD for an incomplete character, and a newline."""
        print(self.decoder.decode(b"", final=True), flush=True)


def write_texts(flags: argparse.Namespace, model: GPT, mesh: Mesh, tokenizer: Tokenizer, seed: int):
    """Print --num-samples texts for each prompt while they are generated. At the end, print tokens/s to stderr."""
    config = model.config
    is_rank_0, longest = dist.get_rank() == 0, config.context_length
    writer, written, start_time = Writer(tokenizer), 0, time.perf_counter()
    for number, (text, sample) in enumerate(product(flags.prompts, range(flags.num_samples))):
        begin = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        prompt = [*begin, *tokenizer.encode(text).tolist()] or [tokenizer.end_of_text]
        if is_rank_0 and len(prompt) > longest and sample == 0:
            print(f"the prompt has {counted(len(prompt), 'token')}, but the model sees only the last {longest}, its "
                  "context length", file=sys.stderr)
        print((SEPARATOR if number else "") + text, end="", flush=True)
        tokens = generate(model, mesh, prompt, flags.max_tokens, tokenizer.vocab_size, flags.temperature, flags.top_k,
                          seed, number, writer.write_token, tokenizer.end_of_text)
        written += len(tokens) - len(prompt)
        writer.end_text()
    seconds = time.perf_counter() - start_time
    if is_rank_0:
        print(f"{counted(written, 'token')} in {seconds:.2f} s, {written / seconds:.1f} tokens/s",
              file=sys.stderr)
