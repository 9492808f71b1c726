"""Bad input ends in one sentence with the rule, the numbers and the fix, the same on every rank.

    TABLE            a command, its flags, what is wrong in its folder, and parts of the sentence. Checked in this
                     process: main() runs for the first and the last rank, up to where a process group would form.
    PROCESS_TABLE    mistakes that show only between processes. Checked by forks (support/fork_server.py): they must end
                     soon and print the sentence once.

There is a row for each rule. Each starts in a folder with a corpus, data/, and a run of two steps, run/, of a model of
width 16.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.fork_server import LAUNCHER, launcher_environments
from support.runs import TINY, make_corpus

import data.prepare
import nanodomino.generate.__main__
import train
from nanodomino.checkpoint.format import manifest_text
from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.errors import UserError, sentence_and_code
from nanodomino.files import sha256
from nanodomino.run import session
from nanodomino.run.failures import report_and_exit
from nanodomino.run.session import from_command_line
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.settings.config import Config
from nanodomino.settings.flags import flag_name, flag_settings


LIMIT = 300             # seconds until the processes of a row count as stuck; on an idle machine they take 5
STEP = "run/checkpoints/step-00000002"
META, MANIFEST, SHARD = "data/meta.json", f"{STEP}/manifest.json", f"{STEP}/rank-00000.safetensors"
COMMANDS = {"train.py": train.main, "nanodomino.generate": nanodomino.generate.__main__.main,
            "data/prepare.py": data.prepare.main}


def leave(folder: Path):
    """Change nothing."""


@dataclass(frozen=True)
class Bad:
    """A row. In flags and says, {n} is the number of processes."""
    flags: str
    says: list[str]
    damage: Callable[[Path], None] = leave
    what: str = ""                                      # the name of the damage
    command: str = "train.py"
    processes: tuple = (1, 4)
    environment: dict = field(default_factory=dict)     # changes of the launcher's; only in PROCESS_TABLE

    def __str__(self):
        return " ".join(filter(None, (self.command, self.flags[:60], self.what)))


# ---- flags

MOE = "--num-experts 6 --disable-bias-linear"
HELP = "--help lists every flag"

TABLE = [Bad(flags, says, processes=(n,)) for n, flags, *says in [
    # the layout
    (8, "--tp 2 --pp 2 --dp 4", "world size 8 must equal", "2 x 2 x 4 = 16; start 16 processes with torchrun"),
    (4, "--cp 3 --seq-length 12", "data parallel = 1 x 3 x 1 x 1 = 3", "--tp, --cp, --pp, --dp"),
    (4, "--pp 4 --num-layers 7 --schedule zb-v", "num-layers 7 must be at least",
     "try --num-layers 8 or a smaller --pp"),
    (2, "--schedule 1f1b --virtual-stages 2", "virtual-stages must be from 1 to 1 with schedule 1f1b, but is 2",
     "try --virtual-stages 1, or another --schedule"),
    # divisibility
    (1, "--hidden-size 4", "hidden-size 4 must be divisible by num-attention-heads 8; try --hidden-size 8, or give"),
    (4, "--tp 4 --num-attention-heads 6", "heads 6", "tensor-model-parallel-size 4; try --tp 1, 2, 3, 6"),
    (1, "--num-query-groups 3", "heads 8 must be divisible by num-query-groups 3; try --num-query-groups 1, 2, 4, 8"),
    (4, "--tp 4 --num-query-groups 2", "num-query-groups 2", "tensor-model-parallel-size 4; try --tp 1, 2"),
    (4, "--tp 4 --ffn-hidden-size 10", "ffn-hidden-size 10", "size 4; try --tp 1, 2, 5, 10"),
    (4, f"{MOE} --tp 4 --moe-ffn-hidden-size 10", "moe-ffn-hidden-size 10 must be divisible by", "try --tp 1, 2, 5"),
    (4, "--tp 4 --make-vocab-size-divisible-by 1", "of 257", "size 4", "try --make-vocab-size-divisible-by 512"),
    (1, "--position-embedding-type rope --kv-channels 5", "RoPE must rotate an even number", "try --kv-channels 6"),
    (1, "--position-embedding-type rope --kv-channels 7 --rotary-percent 0.5", "from 2 to 7, but rotary-percent 0.5",
     "try --kv-channels 8 --rotary-percent 1"),
    (4, "--tp 4 --pp 1 --sequence-parallel --seq-length 126", "seq-length 126 must be divisible", "--seq-length 128"),
    (8, "--cp 2 --tp 4 --pp 1 --sequence-parallel --seq-length 12", "seq-length 12", "here 8; try --seq-length 16"),
    (2, "--cp 2 --seq-length 6", "seq-length 6 must be divisible by 2 cp", "here 4; try --seq-length 8"),
    (4, "--cp 4 --cp-comm-type a2a --num-attention-heads 2", "must be divisible by tp x cp = 1 x 4 = 4",
     "try --cp-comm-type all_gather"),
    (3, "--pp 1", "global-batch-size 16", "4 x 3 = 12; try --global-batch-size 24"),
    # experts, depths, fp8
    (4, f"{MOE} --dp 4 --ep 3", "expert-model-parallel-size 3 must divide num-experts 6", "4 x 1; try --ep 1, 2"),
    (1, f"{MOE} --moe-router-topk 7", "moe-router-topk 7 must be at most num-experts 6; try --moe-router-topk 6"),
    (1, f"{MOE} --moe-router-topk 1", "moe-router-topk must be at least 2", "add --moe-router-pre-softmax"),
    (1, "--num-experts 6", "experts have no biases, so --num-experts needs --disable-bias-linear; add it"),
    (1, "--mtp-num-layers 8 --seq-length 8", "mtp-num-layers 8 must be below seq-length 8", "try --mtp-num-layers 7"),
    (1, "--load run --finetune --mtp-num-layers 2", "mtp-num-layers 2 must be at most the 0 of run/checkpoints/step-",
     "can drop depths but not add any; try --mtp-num-layers 0"),
    (1, "--fp8-format hybrid --num-layers 2 --first-last-layers-bf16", "num-layers 2 must be at least 3 with --first"),
    (1, "--fp8-format hybrid --dtype float64", "adds up in fp32, so --dtype must not be float64; try --bf16"),
    # sizes
    (2, "--pp 2 --schedule interleaved --virtual-stages 2 --micro-batch-size 1 --global-batch-size 16385",
     "16385 microbatches per replica", "virtual-stages 2) = 16384; try --global-batch-size 16384"),
    (4, "--micro-batch-size 1 --slices 2", "slices 2 must be at most micro-batch-size 1", "--columns"),
    (1, "--columns 97", "columns 97 must be at most hidden-size 96; try 2 or 4"),
    (1, "--seq-length 64 --max-position-embeddings 63", "seq-length 64", "try --max-position-embeddings 64"),
    (1, "--load run --finetune --seq-length 32", "max-position-embeddings 16; try --seq-length 16"),
    (1, "--load run --finetune --max-position-embeddings 32", "max-position-embeddings 16, but this run has 32"),
    (4, "--vocab-size 256", "vocabulary of 257 tokens does not fit --vocab-size 256", "give at least 257"),
    (4, "--seq-length 20000", "train split", "has 11447 tokens", "seq-length + 1 = 20001", "lower --seq-length"),
    (1, "--hidden-size 4000000 --num-attention-heads 4", "would need at least", "more processes (--tp, --pp)"),
    (1, "--micro-batch-size 65537", "--micro-batch-size must be at least 1 and at most 65536, but is 65537"),
    (1, "--min-lr 1", "min-lr 1.0 must be at most lr 0.004", "lower --min-lr, or leave it out"),
    (1, "--fp16 --min-loss-scale 65536", "min-loss-scale 65536 must be at most initial-loss-scale 32768",
     "try --min-loss-scale 32768"),
    (1, "--trace 5:2", "--trace must be FIRST:LAST", "<= --train-iters 200, but is 5:2;", "try --trace 10:12"),
    (1, "--trace 5:201", "--trace must be FIRST:LAST", "but is 5:201;"), (1, "--trace 5", "FIRST:LAST", "but is 5;"),
    # flags without effect
    (1, "--bf16 --fp16", "argument --fp16: not allowed with argument --bf16"),
    (1, "--rotary-base 500000", "--rotary-base 500000.0 needs --position-embedding-type rope to have an effect",
     "change that, or leave out --rotary-base"),
    (1, "--cp-comm-type a2a", "--cp-comm-type a2a needs --cp above 1 to have an effect"),
    (1, "--ep 1 --moe-layer-freq 2", "--moe-layer-freq 2 needs --num-experts to have an effect"),
    (1, "--fp16 --loss-scale 8 --loss-scale-window 9", "needs no --loss-scale to have an effect"),
    (1, "--lr-decay-style constant --min-lr 0", "--min-lr 0.0 needs --lr-decay-style cosine or linear"),
    (1, "--position-embedding-type none --reset-position-ids", "needs --position-embedding-type rope or learned"),
    (1, "--top-k 5 --sample-tokens 0", "--top-k 5 needs --sample-tokens above 0 to have an effect"),
    (1, "--model nano-moe --ffn-hidden-size 48 --moe-ffn-hidden-size 16", "--ffn-hidden-size 48 has no effect"),
    (1, f"--load {STEP} --init-method-std 0.1", "--init-method-std 0.1 needs no --load"),
    (1, "--finetune", "--finetune needs a checkpoint to take the weights from", "add --load FOLDER"),
    # names
    (1, "--model gpt5", "--model: invalid choice: 'gpt5'", "gpt2-xl", HELP),
    (4, "--schedule zigzag", "--schedule", "'zigzag'", *SCHEDULES),
    (4, "--tensor-parallel 2", "unrecognized arguments: --tensor-parallel 2", HELP),
    (1, "--num-layer 3", "--num-layer 3", HELP), (1, "gpt2", "gpt2", HELP),
    (1, "--seq-length", "--seq-length: expected one argument", HELP)]]

TABLE += [Bad(flags, says, command="nanodomino.generate") for flags, *says in [
    ("--load run --temperature -1", "--temperature must be at least 0 and at most 3.40282e+38, but is -1.0"),
    ("--load run --num-samples 0", "--num-samples must be at least 1 and at most", "but is 0"),
    ("--load run --prompts nowhere", "--prompts nowhere can't be read as UTF-8 text (No such file", "give a text file"),
    ("--load run --max-token 9", "unrecognized arguments: --max-token 9", HELP),
    ("--load run --device cuda", "--device cuda needs a GPU that torch can see, and there is none", "try --device cpu"),
    ("--load ''", "--load must not be empty, but is ''", "give a value, or leave it out"),
    ("--prompt def", "the following arguments are required: --load", HELP),
    ("--load run --data-path nowhere", "there is no data folder nowhere", "--input TEXT --output nowhere"),
    ("--load nowhere", "nowhere is no folder to load from")]]

TABLE += [Bad(flags, says, command="data/prepare.py", processes=(1,)) for flags, *says in [
    ("--input none*.txt --output out", "no file or folder matches the input none*.txt", "check the path"),
    ("--input data --output /proc/out", "/proc/.out", "No such file or directory", "choose another file or folder"),
    ("--input data --output out --split 1,inf,1", "--split must be three numbers"),
    ("--input data --output out --tokenizer word", "unknown tokenizer 'word'", "try one of byte, gpt2")]]


# ---- files

def write(name: str, content: bytes):
    """Replace a file or folder by a file with this content."""
    def change(folder):
        remove(name)(folder)
        (folder / name).write_bytes(content)
    return change


def cut(name: str, count: int):
    """Keep a file's first `count` bytes; if negative, all but the last ones."""
    return lambda folder: write(name, (folder / name).read_bytes()[:count])(folder)


def remove(name: str):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def change_meta(**changes):
    """Change entries of meta.json, and correct its checksums. None: remove."""
    def change(folder):
        digests = {split: sha256(folder / f"data/{split}.bin") for split in data.prepare.SPLITS}
        meta = json.loads((folder / META).read_text()) | dict(sha256=digests) | changes
        write(META, json.dumps({key: value for key, value in meta.items() if value is not None}).encode())(folder)
    return change


def shorten(split: str, tokens: int):
    """Make the split this short, in its file and in meta.json."""
    def change(folder):
        cut(f"data/{split}.bin", 2 * tokens)(folder)
        counts = json.loads((folder / META).read_text())["tokens"]
        change_meta(tokens={**counts, split: tokens})(folder)
    return change


def flip(name: str):
    """Flip one bit, in the middle of a file."""
    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    return change


def forge(**settings):
    """Change settings in a checkpoint's manifest, and correct its checksum."""
    def change(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["config"] |= settings
        (folder / MANIFEST).write_text(manifest_text(manifest))
    return change


PREPARE_AGAIN = "prepare the text again"
TABLE += [Bad("--sample-tokens 5", says, damage, f"with {what}") for what, damage, *says in [
    ("no data folder", remove("data"), "there is no data folder data", "prepare.py --input TEXT --output data"),
    ("a file for a folder", write("data", b"text"), "there is no data folder data", "data/prepare.py --input TEXT"),
    ("no meta.json", remove(META), "there is no data folder data with a meta.json", "give another folder"),
    ("half a meta.json", cut(META, 99), "data/meta.json is damaged", PREPARE_AGAIN),
    ("no end-of-text", change_meta(end_of_text=None), "meta.json is damaged (KeyError: 'end_of_text')", PREPARE_AGAIN),
    ("no valid.bin", remove("data/valid.bin"), "data/valid.bin should hold", "but has 0 bytes", PREPARE_AGAIN),
    ("half a token too few", cut("data/train.bin", -1), "tokens in 22894 bytes, but has 22893", PREPARE_AGAIN),
    ("one token too few", shorten("train", 128), "train split", "has 128 tokens", "+ 1 = 129", "lower --seq-length")]]
TABLE += [Bad("--run-dir run", ["data/valid.bin has changed since it was prepared", PREPARE_AGAIN],
              flip("data/valid.bin"), "with a changed text", processes=(1,))]                # rank 0 of a host looks
TABLE += [Bad(f"--load {STEP}", says, damage, f"with {what}") for what, damage, *says in [
    ("a number among names", forge(given=[1]), "gives [1] as given", "of type list of names; correct it"),
    ("settings of a later version", forge(rotary=True), "this version does not know (rotary)",
     "use the version that wrote them"), ("a flipped bit", flip(SHARD), "damaged", "use another")]]
TABLE += [Bad(flags, says, damage, what) for flags, what, damage, *says in [
    ("--load data/meta.json", "", leave, "data/meta.json is no folder to load from"),
    ("--load " + "a" * 5000, "", leave, "aaa: File name too long", "choose another file or folder"),
    ("--load run", "with no intact checkpoint", flip(SHARD), "holds no intact checkpoint", "give another"),
    (f"--load {STEP} --hidden-size 32", "", leave, "hidden-size 16, but this run has 32", "go back to the old value"),
    ("--run-dir data/meta.json", "", leave, "meta.json can't be written to (File exists)", "choose another folder"),
    ("--run-dir data", "that is no run", leave, "--run-dir data holds no run, but other files (meta.json, test.bin, "
     "train.bin ...); choose a new or an empty folder"),
    ("--run-dir run --seed 5", "", leave, "made with seed 1234, but this run has 5", "start another run"),
    ("--run-dir run --seed 5", "killed before its first checkpoint", remove("run/checkpoints"),
     "--run-dir run was made with seed 1234, but this run has 5", "start another run"),
    ("--run-dir run", "with a damaged checkpoint", flip(SHARD), "run holds only damaged checkpoints",
     "restore a checkpoint, or move the folder away to start over"),
    ("--run-dir run", "with a file named checkpoints", write("run/checkpoints", b""),
     "run can't be written to (File exists)", "choose another folder")]]
TABLE += [Bad("--config text.txt", says, write("text.txt", text), f"with {text[:20]}") for text, *says in [
    (b'{"lr": "fast"}', "--config text.txt gives 'fast' as lr, but must give a value of type float", "correct it"),
    (b'{"lr": true}', "gives True as lr", "of type float"), (b'{"num_layers": 2.5}', "gives 2.5", "of type int"),
    (b'{"given": 5, "min_lr": 0.1}', "gives 5 as given, but must give a value of type list"),
    (b'{"layers": 3}', "settings that this version does not know (layers)", "correct the names"),
    (b"[1]", "must hold one JSON object"), (b"{", "can't be read"),
    (b"[" * 99999, "text.txt can't be read", "give another file or folder")]]
TABLE += [Bad("--load run" + flags, says, damage, what, "nanodomino.generate") for flags, what, damage, *says in [
    (" --data-path data", "with a larger tokenizer", change_meta(vocab_size=300),
     "tokenizer of data has 300 tokens, but the model has only 257", "give the data folder that the model was trained"),
    ("", "without its training text", forge(data_path="moved/data"),
     "the tokenizer is stored with the training data, but the folder moved/data no longer exists",
     "new path as --data-path")]]


# ---- in this process

class ReachedTheGroup(Exception):
    """The input was accepted: the next thing would be to communicate with other ranks."""


@pytest.fixture(scope="module")
def intact(fork_server, tmp_path_factory):
    """A folder with data/ and run/."""
    folder = tmp_path_factory.mktemp("intact") / "folder"
    folder.mkdir()
    make_corpus(folder).rename(folder / "data")
    flags = [*TINY, "--num-attention-heads", "4", "--data-path", "data", "--run-dir", "run", "--train-iters", "2"]
    ended = fork_server.launch("train.py", [(flags, place) for place in launcher_environments(2)], folder, 120)
    assert ended.code == 0 and (folder / STEP).is_dir(), ended.output
    return folder


@pytest.fixture
def folder(intact, tmp_path, monkeypatch):
    """A copy of the folder, in which this process stands."""
    copy = Path(shutil.copytree(intact, tmp_path / "folder"))
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def refuse(folder, monkeypatch):
    """refuse(flags, n, command): the sentence of the command on n processes. Raises ReachedTheGroup without one."""
    def reached(*_):
        raise ReachedTheGroup

    for module in (session, nanodomino.generate.__main__):
        monkeypatch.setattr(module, "start_world", reached)
    monkeypatch.setattr("nanodomino.run.folder.lock_folder", lambda _: None)    # it lasts as long as the process
    monkeypatch.setattr("nanodomino.estimate.stages.fullest_rank_bytes", lambda *_: 0)               # to save time
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def refuse(flags, n=1, command="train.py"):
        main, arguments = COMMANDS[command], shlex.split(flags)
        if command == "train.py":
            arguments = ["--data-path", "data", "--device", "cpu", *arguments]
        sentences = []
        for rank in sorted({n - 1, 0}, reverse=True):           # rank 0 alone looks for folders
            try:
                if command == "data/prepare.py":
                    monkeypatch.setattr(sys, "argv", [command, *arguments])
                    main()
                else:
                    main(arguments, LaunchInfo(rank, n, rank, n, launched=n > 1))
                pytest.fail("it was accepted")
            except (UserError, OSError) as error:
                sentences.append(sentence_and_code(error)[0])
            except ReachedTheGroup:
                if rank == 0:
                    raise
        assert len(set(sentences)) == 1 and "\n" not in sentences[0], sentences
        return sentences[0]

    return refuse


def test_good_input_reaches_the_process_group(refuse, folder):
    """Otherwise every test below would pass even if everything were refused. One sample of training text is enough; a
    validation split that is too short is skipped."""
    for n, flags in [
            (1, ""), (4, ""), (8, "--tp 8 --slices 4"), (8, "--pp 8"), (8, "--dp 2"),
            (8, "--tp 1 --pp 1 --dp 8"), (1, "--slices 4"), (1, "--columns 96"), (1, "--fp16 --loss-scale 8"),
            (1, "--vocab-size 300"), (1, "--trace 5:5"),
            (1, "--seed 2147483647"), (2, "--run-dir run"), (4, f"--load {STEP}"),
            (1, "--eval-iters 0 --sample-tokens 0 --seed 0 --clip-grad 0 --lr 0"),
            (1, "--rotary-base 10000 --no-sequence-parallel --muon-momentum 0.95"),    # the defaults
            (1, "--lr-warmup-fraction 1 --layernorm-epsilon 1")]:
        with pytest.raises(ReachedTheGroup):
            refuse(flags, n)
    shorten("train", 129)(folder)
    shorten("valid", 5)(folder)
    with pytest.raises(ReachedTheGroup):
        refuse("")


@pytest.mark.parametrize("bad", TABLE, ids=str)
def test_bad_input_is_refused_with_the_rule_the_numbers_and_a_fix(refuse, folder, bad):
    """Before a process group forms, and without touching the run that is there."""
    bad.damage(folder)
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    for n in bad.processes:
        sentence = refuse(bad.flags.format(n=n), n, bad.command)
        assert all(part.format(n=n) in sentence for part in bad.says), sentence
        assert any(fix in sentence for fix in ("; ", "(choose from", "must be")), f"no fix: {sentence}"
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("type, values", [
    (int, ("-1", "1" + 30 * "0", "", "1.5", "1e3", "nan")),    # 10^30 would overflow deep inside the run
    (float, ("nan", "inf", "-inf", "-1", "1e400", "", "high")),      # NaN compares false with everything
    (str, ("",))])                                             # `--data-path "$DATA"` with DATA unset
def test_no_value_may_be_negative_infinite_empty_or_of_another_type(type, values):
    """For every flag of Config, also future ones."""
    for setting in flag_settings(Config):
        for value in values if setting.type is type else ():
            with pytest.raises(UserError, match=flag_name(setting.name)) as error:
                from_command_line([f"{flag_name(setting.name)}={value}"], 1)
            shown = repr(value) if type is str or value in ("", "high") else value.removeprefix("1e400") or "inf"
            assert shown in str(error.value), error.value


def test_a_missing_package_is_found_before_anything_starts(refuse, monkeypatch):
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    assert "--tensorboard-dir needs the tensorboard package; pip install -r req" in refuse("--tensorboard-dir board")


# ---- the launcher's environment

LAUNCHED = dict(zip(LAUNCHER, ("1", "4", "1", "4", "localhost", "29500"), strict=True))


def test_copies_that_would_train_separate_models_are_refused():
    """`srun python train.py`, and `srun torchrun --standalone`, whose world has one host. But srun may start one
    torchrun per host, or a single process; sbatch and salloc set only the other variables."""
    for environment in (dict(SLURM_STEP_NUM_TASKS="2"), dict(PMI_SIZE="2"),
                        LAUNCHED | dict(SLURM_STEP_NUM_TASKS="4", GROUP_WORLD_SIZE="1")):
        with pytest.raises(UserError, match="copies were started, .*; start one torchrun per host, without --standal"):
            read_launch_environment(environment)
    two_hosts = LAUNCHED | dict(SLURM_STEP_NUM_TASKS="2", GROUP_WORLD_SIZE="2")
    assert read_launch_environment(two_hosts) == LaunchInfo(1, 4, 1, 4, launched=True)
    assert read_launch_environment(dict(SLURM_NTASKS="4", SLURM_PROCID="0", PMI_SIZE="1")) == LaunchInfo()


@pytest.mark.parametrize("rank, error, waits, start", [
    (0, UserError("heads 3; try 4"), False, "error: heads 3; try 4\n"),
    (0, OSError(5, "bad disk", "data"), False, "error: data: bad disk; fix that, or choose another file or folder\n"),
    (3, UserError("heads 3; try 4"), True, "error: heads 3; try 4\n"),
    (2, ValueError("mine"), False, "rank 2 failed: ValueError: mine\n"),
    (2, RuntimeError("Connection closed by peer"), True, "rank 2 lost its peers: ")], ids=str)
def test_a_rank_whose_error_is_probably_an_echo_waits_before_it_prints(monkeypatch, capsys, rank, error, waits, start):
    """But it does print: a token id outside the vocabulary is found by one replica, which may not hold rank 0."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        report_and_exit(LaunchInfo(rank, 4, rank, 4, launched=True), error)
    assert caught.value.code != 0 and (sum(slept) >= 3) == waits and sum(slept) <= 13
    last = capsys.readouterr().err.splitlines(keepends=True)[-1]        # after a traceback, if there is one
    assert last.startswith(start)


# ---- between processes

# {n} is the number of processes, {more} one more, {port} a port in use, {rank} (in flags) the rank.
PROCESS_TABLE = [
    Bad("--run-dir data/meta.json", ["meta.json can't be written", "choose another"], what="on rank 0 alone"),
    Bad("--seq-length 16", ["token id 65535, outside the vocabulary of 257", PREPARE_AGAIN],
        lambda folder: (write("data/train.bin", 22894 * b"\xff")(folder), change_meta()(folder)),
        "with tokens outside the vocabulary", processes=(4,)),
    Bad("nonsense", ["there is no question 'nonsense'", "try one of overlap"], command="bench.py", processes=(1,)),
    Bad("--timeout 1", ["MASTER_PORT {port}", "choose a free port"], environment=dict(MASTER_PORT="{port}")),
    Bad("--timeout 1 --tp 1 --pp {more} --num-layers 5",
        ["the {more} processes cannot connect", "and start all {more}"], environment=dict(WORLD_SIZE="{more}")),
    Bad("--seed {rank} --data-path data-{rank}", ["rank 1 has other settings or data than rank 0", "give all hosts"],
        lambda folder: [shutil.copytree(folder / "data", folder / f"data-{rank}") for rank in range(4)],
        "but equal data", processes=(4,))]


@pytest.mark.parametrize("bad", PROCESS_TABLE, ids=lambda bad: f"{bad} {''.join(bad.environment)}")
def test_processes_end_soon_with_one_sentence(fork_server, folder, bad):
    """Whether all ranks find the mistake, or one finds it while the others wait for it in a collective."""
    bad.damage(folder)
    n = bad.processes[-1]
    places = launcher_environments(n) if n > 1 or bad.environment else [{}]
    base = [*TINY, "--num-attention-heads", "4", "--data-path", "data", "--train-iters", "3"]
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        numbers = dict(n=n, more=n + 1, port=in_use.getsockname()[1])
        ranks = [((base if bad.command == "train.py" else []) + shlex.split(bad.flags.format(rank=rank, **numbers)),
                  {name: value.format(**numbers) for name, value in (place | bad.environment).items() if value})
                 for rank, place in enumerate(places)]
        ended = fork_server.launch(bad.command, ranks, folder, LIMIT)
    assert ended.code == 2 and "Traceback" not in ended.output, ended
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert all(part.format(**numbers) in sentence for part in bad.says), sentence


@pytest.mark.parametrize("command, flags, n, says", [
    ("train.py", "--help", 4, "usage: train.py"),
    ("nanodomino.generate", "--load run --max-tokens 3 --prompt def", 1, "def")], ids=lambda value: str(value)[:20])
def test_good_input_ends_with_exit_code_0_and_one_answer(fork_server, intact, command, flags, n, says):
    environments = launcher_environments(n) if n > 1 else [{}]
    ended = fork_server.launch(command, [(shlex.split(flags), place) for place in environments], intact, LIMIT)
    assert (ended.code, ended.output.count(says)) == (0, 1) and "error" not in ended.output, ended.output
