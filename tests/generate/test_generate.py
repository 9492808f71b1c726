"""The text that a model generates is the same on every layout, and is shown token by token at full speed.

    generate() in the pool's workers          layouts, samples, who is shown a token
    make_writer()                             characters that are cut over tokens
    python -m nanodomino.generate             what a person sees
"""

import io
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
from unittest import mock

import pytest
import tiktoken
import torch
from support.runs import TINY, make_corpus, needs_proc, wait_until
from support.fake_world import fake_world
from support.fork_server import launcher_environments
from support.harness import END_OF_TEXT, FAMILIES, build, plain_text, tiny
from support.reference import random_weights

from nanodomino.corpus.tokenizers import Tokenizer, build_tokenizer
from nanodomino.generate.generation import generate, sample_token
from nanodomino.generate.__main__ import SEPARATOR, make_writer

PATIENCE = 90           # seconds until a process counts as stuck; it takes 6, but the machine may have other work


# ---- the tokens

def test_sample_token_is_greedy_at_zero_and_stays_among_the_top_k():
    logits = torch.tensor([1.0, 5.0, 4.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    assert sample_token(logits, 0.0, 0, generator) == 1
    drawn = [sample_token(logits, 1.0, 2, generator) for _ in range(200)]
    assert set(drawn) == {1, 2}
    assert drawn.count(1) / 200 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.12)
    assert {sample_token(logits, 50.0, 0, generator) for _ in range(200)} == {0, 1, 2, 3}


def test_generation_never_uses_cudnns_attention_and_a_single_process_sends_no_logits():
    """cuDNN would plan its work anew for each token, because each token has another number of keys. gloo sends from a
    thread of its own, so each token would wait for a second thread."""
    allowed, shown = torch.backends.cuda.cudnn_sdp_enabled, []
    with fake_world(0, 1), mock.patch("torch.distributed.all_gather", side_effect=AssertionError("to oneself")):
        mesh, model, _, _ = build(tiny(1))
        text = generate(model, mesh, [1, 2], 3, 20, show=lambda token: shown.append((token, allowed())))
    assert shown == [(token, False) for token in text[2:]] and len(shown) == 3 and allowed()


def documents_rank(config, weights, prompts):
    mesh, model, _, _ = build(config, weights)
    return [generate(model, mesh, prompt, 10, 20, temperature=0.0, end_of_text=END_OF_TEXT) for prompt in prompts]


RESETS = dict(both=(True, True), positions=(True, False), attention=(False, True), neither=(False, False))
GENERATING = FAMILIES | dict(mixtral=FAMILIES["llama"] | dict(num_experts=4, moe_ffn_hidden_size=12),
                             window=FAMILIES["llama"] | dict(window_size=2, full_attention_layers=1))


@pytest.mark.parametrize("family, resets", [
    pytest.param(family, resets, id=f"{family}-{name}", marks=[] if i % len(RESETS) == j else pytest.mark.exhaustive)
    for i, family in enumerate(GENERATING) for j, (name, resets) in enumerate(RESETS.items())])
def test_every_family_generates_what_the_plain_model_does_within_documents(pool, family, resets):
    """The prompts contain several documents; on one rank and over shards and stages, in sliding windows."""
    options = GENERATING[family] | dict(reset_position_ids=resets[0], reset_attention_mask=resets[1],
                                       untie_embeddings_and_output_weights=True)
    config, draw = tiny(1, **options), random.Random(family)
    weights = {name: weight * (3 if weight.dim() > 1 else 1)
               for name, weight in random_weights(config, seed=5).items()}
    prompts = [[draw.choice([*range(20), END_OF_TEXT, END_OF_TEXT]) for _ in range(length)]
               for length in (1, 4, 8, 30)]
    expected = [plain_text(config, weights, prompt, 10, vocab_size=20) for prompt in prompts]
    assert pool.run(documents_rank, config, weights, prompts, world_size=1) == [expected]
    several = tiny(4, **options, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert pool.run(documents_rank, several, weights, prompts, world_size=4) == [expected] * 4
    assert len(set(map(tuple, (text[-3:] for text in expected)))) > 2, "a text that repeats itself would show nothing"


# ---- the characters

def test_a_character_is_shown_once_it_is_complete_or_certainly_invalid(monkeypatch):
    """For bytes, for tokens that start within one character and end within the next, and for a byte model that has
    learned little. A text may end within a character; the next is unaffected."""
    bytes_alone, text = build_tokenizer("byte"), "aé€😀z"
    pieces = [b"a\xc3", b"\xa9\xe2\x82", b"\xac\xf0\x9f", b"\x98\x80", b"z"]
    pairs = Tokenizer(tiktoken.Encoding("pairs", pat_str=".", special_tokens={"<|endoftext|>": len(pieces)},
                                                mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)}))
    by_bytes = ["a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€", "aé€", "aé€😀", text]
    invalid = ["", "", "\ufffda", "\ufffda\ufffd", "\ufffda\ufffd"]
    for tokenizer, tokens, seen, end in (
            (bytes_alone, bytes_alone.encode(text).tolist(), by_bytes, text),
            (pairs, range(5), ["a", "aé", "aé€", "aé€😀", text], text),
            (bytes_alone, b"\xe2\x82a\xff\xc3", invalid, "\ufffda\ufffd\ufffd")):
        shown = io.BytesIO()                        # what a terminal would have received
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "utf-8"))
        write = make_writer(tokenizer)
        for token, expected in zip(tokens, seen, strict=True):
            write(token)
            assert shown.getvalue().decode() == expected
        write(None)
        write(tokens[0])
        assert shown.getvalue().decode() == f"{end}\n{seen[0]}"


# ---- the command

@pytest.fixture(scope="module")
def folder(fork_server, tmp_path_factory):
    """A folder with a run in float64, so that layouts cannot differ by rounding, and long enough that text depends on
    its context. The model has more words than the tokenizer."""
    folder = tmp_path_factory.mktemp("generate") / "folder"
    folder.mkdir()
    corpus = make_corpus(folder)
    flags = [*TINY, "--dtype", "float64", "--data-path", str(corpus), "--run-dir", "run", "--train-iters", "50",
             "--micro-batch-size", "16", "--eval-iters", "0", "--vocab-size", "300"]
    ended = fork_server.launch("train.py", [(flags, {})], folder, PATIENCE)
    assert ended.code == 0, ended.output
    return folder


@pytest.fixture
def written(fork_server, folder):
    """written(flags, processes) -> (the output without the line with the rate, the number of tokens in that line)"""
    def written(flags, processes=1):
        places = launcher_environments(processes) if processes > 1 else [{}]
        ranks = [(["--load", "run", *shlex.split(flags)], place) for place in places]
        ended = fork_server.launch("nanodomino.generate", ranks, folder, PATIENCE)
        assert ended.code == 0 and "Traceback" not in ended.output, ended
        (rate,) = re.findall(r"(?m)^(\d+) tokens? in \d+\.\d\d s, \d+\.\d tokens/s\n", ended.output)
        return re.sub(r"(?m)^\d+ tokens? in .*\n", "", ended.output), int(rate)
    return written


def test_without_a_seed_one_is_drawn_that_all_ranks_share_and_that_can_be_repeated(written, folder):
    """Each text of a seed is another, and does not depend on the others. The temperature is high enough to sample from
    both ranks' shards; otherwise two ranks with two seeds could still write rank 0's text."""
    (folder / "twice.txt").write_text("line\nline\n")
    flags, seeds = "--prompts twice.txt --num-samples 2 --max-tokens 40 --temperature 2", []
    for processes in (1, 2):
        said, texts = written(flags, processes)[0].split("\n", 1)
        seeds += re.fullmatch(r"seed (\d+): --seed \1 gives the same texts again", said).groups()
    assert written(f"{flags} --seed {seeds[1]}")[0] == texts and seeds[0] != seeds[1]
    first, *others = texts.removesuffix("\n").split("\n" + SEPARATOR)
    assert len({first, *others}) == 4 and all(text.startswith("line") for text in others)
    alone, other = (written(f"--prompt line --max-tokens 40 --temperature 2 --seed {seed}")[0] for seed in seeds[::-1])
    assert alone == first + "\n" != other


def test_prompts_of_every_kind(written, folder):
    """No prompt, those of a file, the name of end-of-text, more than 16 tokens of context."""
    (folder / "prompts.txt").write_bytes("\ufeffö\r\n\nl\u2028i\fn\x85e!\n".encode())
    (folder / "prompts.jsonl").write_text('{"text": "two\\nlines\\n"}\n\n{"text": ""}\r\n')
    assert written("--max-tokens 0 --seed 1") == ("\n", 0)
    texts = SEPARATOR.join(f"{text}\n" for text in 2 * ["ö"] + 2 * ["l\u2028i\fn\x85e!"])
    assert written("--max-tokens 0 --seed 1 --prompts prompts.txt --num-samples 2") == (texts, 0)
    assert written("--max-tokens 0 --seed 1 --prompts prompts.jsonl") == (f"two\nlines\n\n{SEPARATOR}\n", 0)
    named, tokens = written("--max-tokens 3 --seed 1 --prompt '<|endoftext|><|endoftext|>'")
    assert tokens == 3 and named.startswith("the prompt has 26 tokens"), "as in a document, the name is ordinary text"
    long, tokens = written("--max-tokens 3 --seed 1 --prompt 'line 1 of a text that'", processes=2)
    assert tokens == 3 and long.startswith("the prompt has 21 tokens, but the model sees only the last 16, "
                                           "its context length\nline 1 of a text that")


def test_a_model_that_has_diverged_is_refused_with_the_last_good_checkpoint(fork_server, folder):
    """Whatever the temperature, on all ranks, and if it is evaluated: its weights are finite, its logits are NaN."""
    shutil.copytree(folder / "run", folder / "diverged")
    train = "--run-dir diverged --dtype float32 --train-iters 51 --lr 1e30 --eval-iters 0 --sample-tokens 0"
    assert fork_server.launch("train.py", [(train.split(), {})], folder, PATIENCE).code == 0
    good, wrong = (folder / "diverged" / "checkpoints" / f"step-000000{step}" for step in (50, 51))
    for module, flags, places, advice in (
            ("nanodomino.generate", "--temperature 0", [{}], f"use the last good checkpoint: --load {good}"),
            ("nanodomino.generate", "", launcher_environments(2), f"use the last good checkpoint: --load {good}"),
            ("train.py", "--train-iters 0 --eval-iters 1 --device cpu", [{}],
             f"go on from the last good checkpoint with train.py --load {good} --train-iters 0 --lr 0.004")):
        words = ["--load", str(wrong), *flags.split()]
        ended = fork_server.launch(module, [(words, place) for place in places], folder, PATIENCE)
        assert ended.code == 1 and ended.output.endswith(f"; {advice}\n"), ended.output
        assert "Traceback" not in ended.output and ended.output.count("error: ") == 1, ended.output


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGPIPE])
def test_control_c_or_a_reader_that_has_gone_ends_it_without_a_traceback(fork_server, folder, tmp_path, number):
    log = tmp_path / "output.txt"
    flags = "--load run --prompt line --max-tokens 10000000 --seed 1"
    process = fork_server.start("nanodomino.generate", [(flags.split(), {})], folder, log)
    wait_until(process.ranks)
    try:
        wait_until(lambda: len(process.output()) > 20 or process.poll() is not None)
    finally:
        os.kill(process.ranks()[0], number)
    assert process.wait(PATIENCE) == -number
    output = process.output()
    assert output.startswith("line") and "Traceback" not in output and "Interrupt" not in output, output
