"""A table of bad inputs. Each is given to real processes, to one and to four, and ends soon with one sentence.

    flags                       that contradict each other or the number of processes, or that don't exist
    data, checkpoints, runs     missing, damaged, of another kind; one that would run a program if it were trusted
    environments                half of what a launcher sets, a port in use, nobody to meet

The processes are forks (support/fork_server.py), or this would take ten minutes. What they run is all of train.py, of
`python -m nanodomino.generate` and so on, from the command line to the exit code. Each begins in a folder that holds a
corpus, data/, and a run of two steps, run/, both there to be spoiled. test_bad_input.py has more flags and folders, in
one process.
"""

import json
import os
import pickle
import shlex
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path
from collections.abc import Callable

import pytest
from support.jobs import TINY, make_corpus
from support.fork_server import launcher_environments

from nanodomino.checkpoint.manifest import file_digest, manifest_text

LIMIT = 20              # seconds from the start to the end of all processes; more on a machine that has other work
MODEL = [*TINY, "--num-attention-heads", "4"]           # so that four processes can share it
STEP = "run/checkpoints/step-00000002"
PREPARE_AGAIN, ANOTHER, TORCHRUN = "prepare the text again", "use another", "start with torchrun, which sets"


def leave(folder: Path):
    """Nothing is wrong in the folder."""


@dataclass(frozen=True)
class Bad:
    """A row. In flags and environment {n} is the number of processes, {more} one more, {rank} the rank, {port} a port
    in use; in the sentence too, but for the rank."""
    what: str                                           # in words, for the test's name
    command: str                                        # as in support/fork_server.py
    flags: str
    says: list[str]                                     # parts of the sentence: the rule, its numbers, the fix
    spoil: Callable[[Path], None] = leave               # what is wrong in the folder
    environment: dict = field(default_factory=dict)     # what is wrong in a launcher's; None: not there
    processes: tuple = (1, 4)                           # on how many; (1,) where a command knows no ranks


# ---- flags

FLAGS = [Bad(f"train.py {flags[:60]}", "train.py", flags, says) for flags, *says in [
    ("--tp 3", "world size {n} must equal", "data parallel = 3 x 1 x 1 = 3", "start 3 processes with torchrun"),
    ("--tp 1 --dp 3", "world size {n} must equal", "= 1 x 1 x 3 = 3", "or change --tp, --pp, --dp"),
    ("--num-attention-heads 7", "hidden-size 16 must be divisible by num-attention-heads 7", "try 14"),
    ("--global-batch-size 10", "global-batch-size 10 must be divisible by", "4 x 1 = 4", "try --global-batch-size 12"),
    ("--slices 5", "slices 5 must be at most micro-batch-size 4", "try --slices 4"),
    ("--columns 17", "columns 17 must be at most hidden-size 16", "try 2 or 4"),
    ("--max-position-embeddings 8", "seq-length 16 must be at most", "try --max-position-embeddings 16"),
    ("--seq-length 20000", "train split", "has 12009 tokens", "seq-length + 1 = 20001", "lower --seq-length"),
    ("--vocab-size 100", "vocabulary of 257 tokens does not fit --vocab-size 100", "give at least 257"),
    ("--train-iters 0", "--train-iters must be at least 1, but is 0"),
    ("--lr nan", "--lr must be a finite number of at least 0, but is nan"),
    ("--min-lr 1", "min-lr 1.0 must be at most lr 0.004", "lower it or leave it out"),
    ("--trace 5", "--trace must be FIRST:LAST", "but is 5;", "try --trace 10:12"),
    ("--trace 5:2", "--trace must be FIRST:LAST", "but is 5:2;", "try --trace 10:12"),
    ("--model gpt5", "--model: invalid choice: 'gpt5'", "gpt2-xl", "--help lists every flag"),
    ("--bf16 --dtype float64", "--bf16 and --dtype float64 contradict each other", "give one"),
    ("--bf16 --fp16", "--fp16 and --dtype bfloat16 contradict each other", "give one"),
    ("--micro-batch 4", "unrecognized arguments: --micro-batch 4", "--help lists every flag"),
    ("--seq-length", "--seq-length: expected one argument", "--help lists every flag"),
    ("--device cuda", "--device cuda needs a GPU that torch can see, and there is none", "try --device cpu"),
    ("--data-path ''", "--data-path must not be empty", "leave the flag out"),
    ("--num-layers 2000000000", "the fullest of {n} processes would need at least", "GB here; lower --num-layers"),
    ("--hidden-size 4000000 --num-attention-heads 4", "processes would need at least", "more processes (--tp, --pp)"),
    ("--micro-batch-size 40000000 --global-batch-size 160000000", "GB of memory, and each has",
     "lower --micro-batch-size"),
    ("--load " + "a" * 5000, "can't be looked up (File name too long)", "give a checkpoint or the folder of a run")]]

FLAGS += [Bad(f"generate {flags}", "nanodomino.generate", flags, says) for flags, *says in [
    ("--load run --tp 3", "--tp 3 needs 3 processes, but there are {n}", "start torchrun --nproc_per_node 3"),
    ("--load run --tp -1", "--tp must be at least 1, but is -1", "leave it out"),
    ("--load run --temperature -1", "--temperature must be a finite number of at least 0, but is -1.0"),
    ("--load run --max-tokens -1", "--max-tokens must be at least 0, but is -1"),
    ("--load run --num-samples 0", "--num-samples must be at least 1, but is 0"),
    ("--load run --prompt FILE:nowhere", "--prompt nowhere can't be read (No such file", "give a file that is there"),
    ("--load run --max-token 9", "unrecognized arguments: --max-token 9", "--help lists every flag"),
    ("--load run --device cuda", "--device cuda needs a GPU that torch can see, and there is none", "try --device cpu"),
    ("--load ''", "--load must not be empty", "give a checkpoint or the folder of a run"),
    ("--prompt def", "the following arguments are required: --load", "--help lists every flag"),
    ("--load run --data-path nowhere", "there is no data folder nowhere", "data/prepare.py --output nowhere")]]
FLAGS += [Bad("generate from a prompt that is no text", "nanodomino.generate", "--load run --prompt \udcff",
              ["--prompt must be UTF-8 text", "convert it"])]

FLAGS += [Bad(f"checkpoint {flags}", "nanodomino.checkpoint", flags, says, processes=(1,)) for flags, *says in [
    ("", "arguments are required: verify | export; python -m nanodomino.checkpoint --help lists every flag"),
    ("verify", "arguments are required: DIR; python -m nanodomino.checkpoint verify --help lists every flag"),
    ("verify nowhere", "nowhere is not a complete checkpoint", ANOTHER),
    ("export nowhere out.pt", "nowhere is not a complete checkpoint", ANOTHER),
    (f"export {STEP} {STEP}/manifest.json", "would lie in a checkpoint", "choose another folder"),
    (f"export {STEP} {STEP}/out.pt", "would lie in a checkpoint", "choose another folder"),
    (f"export {STEP} data", "data can't be written (Is a directory)", "choose another"),
    (f"export {STEP} /proc/out.pt", "/proc/out.pt can't be written (No such file or directory)", "choose another")]]

FLAGS += [Bad(f"prepare.py {flags}", "data/prepare.py", flags, says, processes=(1,)) for flags, *says in [
    ("--input none*.txt --output out", "no file or folder matches the input none*.txt", "check the path"),
    ("--input data --output data/meta.json", "meta.json is a file", "choose another --output"),
    ("--input data --output /proc/out", "cannot prepare /proc/out", "choose another --input or --output"),
    ("--input data --output out --split 1,2", "--split must be three numbers", "but is 1,2", "try 949,50,1"),
    ("--input data --output out --tokenizer word", "unknown tokenizer 'word'", "try one of byte, gpt2"),
    ("--input data/meta.json --output data --overwrite", "the input", "lies in the output", "choose another --output"),
    ("--outputs out", "unrecognized arguments: --outputs out", "--help lists every flag"),
    ("--verify run", "run is not a folder made by data/prepare.py", "prepare another folder")]]

FLAGS += [Bad("bench.py nonsense", "bench.py", "nonsense", ["there is no question 'nonsense'", "try one of overlap"],
              processes=(1,))]


# ---- data folders

def write(name: str, content: bytes):
    """Put a file of this content in the place of a file or folder, or where there was none."""
    def change(folder):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).write_bytes(content)
    return change


def cut(name: str, count: int):
    """Keep a file's first `count` bytes; without the last ones if negative."""
    return lambda folder: write(name, (folder / name).read_bytes()[:count])(folder)


def remove(name: str):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def lose(name: str):
    """Put a link to nowhere in its place."""
    def change(folder):
        remove(name)(folder)
        (folder / name).symlink_to("not mounted")
    return change


def change_meta(**changes):
    def change(folder):
        meta = json.loads((folder / "data/meta.json").read_text())
        (folder / "data/meta.json").write_text(json.dumps(meta | changes))
    return change


DATA = [Bad(f"data folder {what}", "train.py", "--sample-tokens 5", says, spoil) for what, spoil, *says in [
    ("missing", remove("data"), "there is no data folder data", "make one with data/prepare.py --output data"),
    ("that is a file", write("data", b"text"), "data is no data folder but a file", "data/prepare.py --input data"),
    ("without meta.json", remove("data/meta.json"), "data is not a folder made by data/prepare.py", "prepare another"),
    ("with half a meta.json", cut("data/meta.json", 99), "data/meta.json is damaged", PREPARE_AGAIN),
    ("with bytes for a meta.json", write("data/meta.json", b"\xff\x00"), "data/meta.json is damaged", PREPARE_AGAIN),
    ("of another program", change_meta(format="megatron"), "data/meta.json is of format 'megatron'", PREPARE_AGAIN),
    ("of an unknown tokenizer", change_meta(tokenizer="llama"), "tokenizer 'llama'", "byte, gpt2", PREPARE_AGAIN),
    ("of another vocabulary", change_meta(vocab_size=300), "vocabulary of 300", "byte has 257", PREPARE_AGAIN),
    ("with a truncated train.bin", cut("data/train.bin", -1), "tokens in 24018 bytes, but has 24017", PREPARE_AGAIN),
    ("without valid.bin", remove("data/valid.bin"), "data/valid.bin is missing", PREPARE_AGAIN),
    ("with tokens that no word has", write("data/train.bin", 24018 * b"\xff"),
     "token id 65535, outside the vocabulary of 257", PREPARE_AGAIN)]]


# ---- checkpoints

def flip(name: str, behind=None):
    """One bit of the middle byte, or of the one behind these."""
    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[content.index(behind) + len(behind) if behind else len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    return change


def forge(change=leave, **changes):
    """Change a checkpoint, then what its manifest says (config: the settings named; None: no word of it), whose
    checksums are right again."""
    def forged(folder):
        change(folder)
        path = folder / STEP / "manifest.json"
        says = json.loads(path.read_text())
        files = {name: file_digest(folder / STEP / name) for name in says["files"]}
        says |= dict(files=files) | changes | dict(config=says["config"] | changes.get("config", {}))
        path.write_text(manifest_text({name: value for name, value in says.items() if value is not None}))
    return forged


class Program:
    """As a pickle: makes a folder `it-ran` where it is loaded."""
    def __reduce__(self):
        return os.mkdir, ("it-ran",)


# an index that gives one of torch's record types an attribute
CHANGED_TYPE = b"ctorch.distributed.checkpoint.metadata\nMetadata\n}S'__init__'\nS'x'\nsb."


def pipe(name):
    """A named pipe in the place of a file: whoever opens it waits for ever."""
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    return change


DAMAGES = {what: (says, spoil) for what, spoil, *says in [
    ("without a manifest", remove(f"{STEP}/manifest.json"), "is not a complete checkpoint", ANOTHER),
    ("with an empty manifest", write(f"{STEP}/manifest.json", b""), "is not a complete checkpoint", ANOTHER),
    ("with a flipped bit in its manifest", flip(f"{STEP}/manifest.json", behind=b'"num_layers": '),
     "manifest.json is damaged", ANOTHER),
    ("whose manifest lists no files", forge(files=None), "manifest.json lacks files", ANOTHER),
    ("of a later version", forge(format="nanodomino-checkpoint-9"), "has format 'nanodomino-checkpoint-9'",
     "use the version that wrote it"),
    ("without a file", remove(f"{STEP}/__0_0.distcp"), "__0_0.distcp is missing", ANOTHER),
    ("with a truncated file", cut(f"{STEP}/__1_0.distcp", -1), "__1_0.distcp should have", ANOTHER),
    ("with a flipped bit in a file", flip(f"{STEP}/__0_0.distcp"), "__0_0.distcp is damaged", ANOTHER),
    ("with a flipped bit in its index", flip(f"{STEP}/.metadata"), ".metadata is damaged", ANOTHER),
    ("with half an index", forge(cut(f"{STEP}/.metadata", -40)), ".metadata is not an index of tensors", ANOTHER),
    ("with a program for an index", forge(write(f"{STEP}/.metadata", pickle.dumps(Program()))),
     "index refers to posix.mkdir", "do not use this checkpoint"),
    ("whose index changes a type", forge(write(f"{STEP}/.metadata", CHANGED_TYPE)),
     "index changes one of torch's own types", "do not use this checkpoint"),
    ("whose files are a list", forge(files=["a"]), "manifest.json lacks files", ANOTHER),
    ("of no files", forge(files={}), "does not list .metadata", ANOTHER),
    ("of a file elsewhere", forge(files={"../../data/meta.json": {"size": 1, "sha256": ""}}), "files beside it",
     ANOTHER),
    ("of an absolute file", forge(files={"/etc/passwd": {"size": 1, "sha256": ""}}), "files beside it", ANOTHER),
    ("of a file without a size", forge(files={".metadata": 7}), "must give size and SHA-256", ANOTHER),
    ("of a step below 0", forge(step=-5), "must be from 0 to", ANOTHER),
    ("of an endless step", forge(adam_steps=10**30), "must be from 0 to", ANOTHER),
    ("whose manifest is a pipe", pipe(f"{STEP}/manifest.json"), "is not a regular file", ANOTHER),
    ("whose file holds other things than tensors", forge(write(f"{STEP}/__0_0.distcp", b"x" * 100_000)),
     "does not hold what its index says", ANOTHER)]}

CHECKPOINTS = [Bad(f"--load a checkpoint {what}", "train.py", f"--load {STEP}", *damage)
               for what, damage in DAMAGES.items()]
CHECKPOINTS += [Bad(f"generate from a checkpoint {what}", "nanodomino.generate", f"--load {STEP}", *DAMAGES[what])
                for what in ("with a truncated file", "with a program for an index")]
CHECKPOINTS += [Bad(f"export a checkpoint {what}", "nanodomino.checkpoint", f"export {STEP} out.pt",
                    *DAMAGES[what], processes=(1,))
                for what in ("with a flipped bit in a file", "with half an index", "with a program for an index")]
CHECKPOINTS += [Bad(what, "train.py", flags, says, spoil) for what, flags, spoil, *says in [
    ("--load a folder that is not there", "--load nowhere", leave, "there is no folder nowhere to load from",
     "give a checkpoint or the folder of a run"),
    ("--load a file", "--load data/meta.json", leave, "there is no folder data/meta.json to load from"),
    ("--load a corpus", "--load data", leave, "data is not a complete checkpoint", ANOTHER),
    ("--load a run without a sound checkpoint", "--load run", flip(f"{STEP}/__0_0.distcp"),
     "holds no intact checkpoint", "give another folder"),
    ("--load a narrower model", f"--load {STEP} --hidden-size 32", leave, "hidden-size 16, but this run has 32",
     "give the same again"),
    ("--load another vocabulary", f"--load {STEP} --vocab-size 300", leave, "vocab-size 257, but this run has 300",
     "give the same again"),
    ("--load a checkpoint that lacks a layer", f"--load {STEP} --num-layers 3 --tp {{n}}",
     forge(config=dict(num_layers=3)), "lacks weight.layers.2", ANOTHER)]]
CHECKPOINTS += [Bad(what, "nanodomino.generate", flags, says, spoil) for what, flags, spoil, *says in [
    ("generate from a folder that is not there", "--load nowhere", leave, "there is no folder nowhere to load from",
     "give a checkpoint or the folder of a run"),
    ("generate with a tokenizer of more words", "--load run --data-path data", change_meta(vocab_size=300),
     "tokenizer of data has 300 tokens, but the model 257", "give the --data-path that it was trained on"),
    ("generate from a checkpoint with settings of a later version", "--load run", forge(config=dict(rotary=True)),
     "settings that this version does not know (rotary)", "use the version that wrote it"),
    ("generate where the training text has gone", "--load run", forge(config=dict(data_path="moved/data")),
     "tokenizer is in the training data, but moved/data does not exist", "new path as --data-path")]]


# ---- runs

RUNS = [Bad(f"--run-dir {what}", "train.py", flags, says, spoil) for what, flags, spoil, *says in [
    ("that is a file", "--run-dir data/meta.json", leave, "--run-dir data/meta.json is a file", "choose another name"),
    ("below a file", "--run-dir data/meta.json/run", leave, "can't be written to (Not a directory)", "choose another"),
    ("that takes no files", "--run-dir /proc", leave, "--run-dir /proc can't be written to", "choose another folder"),
    ("with too long a name", f"--run-dir {5000 * 'r'}", leave, "(File name too long)", "choose another folder"),
    ("of a run with another seed", "--run-dir run --seed 5", leave, "made with seed 1234, but this run has 5",
     "start another run"),
    ("of another run that has saved nothing yet", "--run-dir run --seed 5", remove("run/checkpoints"),
     "--run-dir run was made with seed 1234, but this run has 5", "start another run"),
    ("whose checkpoints are all damaged", "--run-dir run", flip(f"{STEP}/__0_0.distcp"),
     "none of the 1 in it is intact", "move the folder away to start over"),
    ("whose checkpoints have gone", "--run-dir run", lambda folder: shutil.rmtree(folder / STEP),
     "run has saved checkpoints, but none of the 0", "restore a checkpoint"),
    ("whose checkpoints lie on a disk that is not there", "--run-dir run", lose("run/checkpoints"),
     "run can't be written to (File exists)", "choose another folder"),
    ("in which checkpoints is a file", "--run-dir run", write("run/checkpoints", b""),
     "run can't be written to (File exists)", "choose another folder"),
    ("of another program", "--run-dir data", write("data/metrics.jsonl", b""),
     "holds a metrics.jsonl but no config.json", "choose another folder")]]


# ---- environments

LAUNCHES = [Bad(f"a launcher with {what}", "train.py", "--timeout 1", says, environment=environment)
            for what, environment, *says in [
    ("no RANK", dict(RANK=None), "has WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE but not RANK", TORCHRUN),
    ("no WORLD_SIZE", dict(WORLD_SIZE=None), "has RANK, LOCAL_RANK, LOCAL_WORLD_SIZE but not WORLD_SIZE", TORCHRUN),
    ("no MASTER_ADDR", dict(MASTER_ADDR=None), "but not MASTER_ADDR;", TORCHRUN),
    ("no MASTER_PORT", dict(MASTER_PORT=None), "but not MASTER_PORT;", TORCHRUN),
    ("RANK x", dict(RANK="x"), "RANK must be a whole number, but the environment has 'x'", TORCHRUN),
    ("RANK -1", dict(RANK="-1"), "RANK must be a whole number, but the environment has '-1'", TORCHRUN),
    ("LOCAL_RANK x", dict(LOCAL_RANK="x"), "LOCAL_RANK must be a whole number", TORCHRUN),
    ("RANK n of n", dict(RANK="{n}"), "RANK {n} must be below WORLD_SIZE {n}", TORCHRUN),
    ("MASTER_PORT http", dict(MASTER_PORT="http"), "MASTER_PORT must be a whole number", "has 'http'", TORCHRUN),
    ("MASTER_PORT 99999", dict(MASTER_PORT="99999"), "MASTER_PORT must be from 1 to 65535, but", "has 99999", TORCHRUN),
    ("a port in use", dict(MASTER_PORT="{port}"), "MASTER_PORT {port}", "choose a free port"),
    ("a host that is not there", dict(MASTER_ADDR="nobody.invalid"), "cannot connect at MASTER_ADDR nobody.invalid",
     "choose a free port on a host that all can reach")]]
LAUNCHES += [
    Bad("a launcher that starts a process too few", "train.py", "--timeout 1 --tp 1 --pp {more} --num-layers 5",
        ["the {more} processes cannot connect", "and start all {more}"], environment=dict(WORLD_SIZE="{more}")),
    Bad("ranks of different flags", "train.py", "--seed {rank}",
        ["rank 1 was started with another seed than rank 0", "give all hosts the same flags"], processes=(4,))]

TABLE = [*FLAGS, *DATA, *CHECKPOINTS, *RUNS, *LAUNCHES]


# ---- the test

@pytest.fixture(scope="module")
def sound(fork_server, tmp_path_factory):
    """(the folder before it is spoiled, LIMIT on this machine: a run of two steps takes two seconds if it is idle)"""
    folder = tmp_path_factory.mktemp("sound") / "folder"
    folder.mkdir()
    make_corpus(folder).rename(folder / "data")
    flags = [*MODEL, "--data-path", "data", "--run-dir", "run", "--train-iters", "2"]
    ended = fork_server.launch("train.py", [(flags, place) for place in launcher_environments(2)], folder, 120)
    assert ended.code == 0 and (folder / STEP).is_dir(), ended.output
    return folder, max(LIMIT, 10 * ended.seconds)


@pytest.mark.parametrize("command, flags, processes, says", [
    ("train.py", "--help", 4, "usage: train.py"), ("data/prepare.py", "--verify data", 1, "data is as it was prepared"),
    ("nanodomino.checkpoint", f"verify {STEP}", 1, "is intact: step 2"),
    ("nanodomino.generate", "--load run --max-tokens 3 --prompt def", 1, "def")], ids=lambda value: str(value)[:20])
def test_good_input_ends_with_code_0_and_is_answered_once(fork_server, sound, command, flags, processes, says):
    """Without this, the table would also pass if everything were refused. Of many ranks one answers."""
    environments = launcher_environments(processes) if processes > 1 else [{}]
    ended = fork_server.launch(command, [(shlex.split(flags), place) for place in environments], *sound)
    assert (ended.code, ended.output.count(says)) == (0, 1) and "error" not in ended.output, ended.output


def test_the_table_has_forty_rows_for_one_and_for_four_processes():
    assert sum(bad.processes == (1, 4) for bad in TABLE) >= 40


@pytest.mark.parametrize("bad, n", [
    pytest.param(bad, n, id=f"{bad.what} on {n}", marks=pytest.mark.exhaustive if n > 1 and row % 6
                 and n != min(bad.processes) else [])
    for row, bad in enumerate(TABLE) for n in bad.processes])
def test_it_ends_soon_with_one_sentence(fork_server, sound, tmp_path, bad, n):
    """Of the rule, the numbers and the fix; whether all ranks find the mistake or one, while the others wait for it."""
    whole, limit = sound
    folder = Path(shutil.copytree(whole, tmp_path / "folder"))
    bad.spoil(folder)
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    places = launcher_environments(n) if n > 1 or bad.environment else [{}]
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        numbers = dict(n=n, more=n + 1, port=in_use.getsockname()[1])
        usual = [*MODEL, "--data-path", "data", "--train-iters", "3"] if bad.command == "train.py" else []
        ranks = [(usual + shlex.split(bad.flags.format(rank=rank, **numbers)),
                  {name: value.format(**numbers) for name, value in (place | bad.environment).items() if value})
                 for rank, place in enumerate(places)]
        ended = fork_server.launch(bad.command, ranks, folder, limit)
    assert not ended.late and ended.code == 2 and "Traceback" not in ended.output, ended
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert all(part.format(**numbers) in sentence for part in bad.says), sentence
    assert not (folder / "it-ran").exists()
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics, "what is refused loses nothing"
