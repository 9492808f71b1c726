"""Text <-> token ids, by tiktoken, from three kinds of vocabularies.

    byte     the 256 bytes and end-of-text: nothing to download, nothing to learn, every text is encodable
    gpt2     GPT-2's 50,257 byte-pair tokens: about four bytes of English each, so four times fewer positions
    PATH     the folder or the tokenizer.json of a Hugging Face tokenizer, such as Llama 3's: huggingface_tokenizer.py

Byte-pair encoding cuts a text into words by a regular expression, starts each word as single bytes and keeps joining
the neighbours whose union was merged earliest in training (GPT-2's paper, section 2.2). GPT-2 stores this as two files:
encoder.json (token -> id) and vocab.bpe (the merges, oldest first). Both spell bytes as printable characters,
space as Ġ.
"""

import json
import threading
from pathlib import Path

import tiktoken

from nanodomino.corpus.huggingface_tokenizer import GPT2_WORDS, read_huggingface, spelled_bytes
from nanodomino.errors import UserError, require

END_OF_TEXT = "<|endoftext|>"
TOKENIZERS = ("byte", "gpt2")
DOWNLOAD_SECONDS = 60


def build_tokenizer(name, vocab_file=None, merge_file=None, eod_token=None) -> tiktoken.Encoding:
    """The encoding called `name`, or read from that path; `.n_vocab` is its size, `.eot_token` its end-of-text.
    Raises UserError."""
    from_path = name not in TOKENIZERS
    require(not from_path or Path(name).exists(), f"unknown tokenizer '{name}'; try one of {', '.join(TOKENIZERS)}, or "
            "the path of a Hugging Face tokenizer's folder")
    require((vocab_file is None) == (merge_file is None),
            f"--vocab-file and --merge-file belong together, but only {vocab_file or merge_file} was given; "
            "give both or neither")
    require(vocab_file is None or not from_path,
            f"--vocab-file and --merge-file are GPT-2's, but the tokenizer is {name}; leave them out")
    require(eod_token is None or from_path,
            f"--eod-token is for Hugging Face tokenizers, but the end of text of {name} is fixed; leave it out")
    if from_path:
        return read_huggingface(name, eod_token)
    if name == "byte":
        require(vocab_file is None,
                f"the byte tokenizer has no files, but {vocab_file} was given; add --tokenizer gpt2 to use them")
        words, ranks, end_of_text = r"(?s:.)", {bytes([byte]): byte for byte in range(256)}, 256
    elif vocab_file is None:
        return download_gpt2()
    else:
        words, (ranks, end_of_text) = GPT2_WORDS, read_gpt2_files(vocab_file, merge_file)
    return tiktoken.Encoding(name, pat_str=words, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: end_of_text})


def read_gpt2_files(vocab_file, merge_file) -> tuple[dict[bytes, int], int]:
    """({token: id}, end-of-text's id). tiktoken has a reader too, but that one keeps local files in a cache by their
    path and so would serve the old vocabulary after a file has changed."""
    byte_of = spelled_bytes()
    try:
        vocabulary, lines = (json.loads(Path(vocab_file).read_text("utf-8")),
                             Path(merge_file).read_text("utf-8").split("\n"))
        end_of_text = vocabulary.pop(END_OF_TEXT, len(vocabulary))
        whole = {type(number) for number in (*vocabulary.values(), end_of_text)} == {int}     # 1.0 and true equal 1
        ranks = {bytes(byte_of[character] for character in token): number for token, number in vocabulary.items()}
        merges = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
        merged = [vocabulary[first + second] for first, second in merges]
        # tiktoken takes ids for merge priorities: right only if the merges made the tokens in the order of their ids.
        longer = sorted(number for token, number in ranks.items() if len(token) > 1)
        fits = whole and merged == longer and sorted([*ranks.values(), end_of_text]) == list(range(257 + len(merged)))
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; --vocab-file and --merge-file need GPT-2's "
                        "encoder.json and vocab.bpe") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fits = False
    require(fits, f"{vocab_file} and {merge_file} are not a vocabulary and its merges in GPT-2's format; "
            "give encoder.json as --vocab-file and vocab.bpe as --merge-file")
    return ranks, end_of_text


def download_gpt2() -> tiktoken.Encoding:
    """tiktoken's own gpt2, from its cache or the network. The download knows no time limit, hence the thread."""
    outcome = {"reason": f"no answer in {DOWNLOAD_SECONDS} seconds"}

    def get():
        try:
            outcome["encoding"] = tiktoken.get_encoding("gpt2")
        except BaseException as error:      # of requests, its parts or tiktoken: the fix is always the same
            outcome["reason"] = type(error).__name__

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    require("encoding" in outcome, f"the gpt2 vocabulary could not be downloaded ({outcome['reason']}); "
            "prepare the text with --vocab-file encoder.json --merge-file vocab.bpe, or with --tokenizer byte")
    return outcome["encoding"]
