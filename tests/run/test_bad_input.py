"""Bad input ends in one clear sentence, the same on every rank, before any rank talks to another.

    train.main() in this process    flags, folders and environments that can't work; it must not reach the process group
    python, torchrun                what a shell sees: the sentence once, and an exit code that is not 0

test_bad_processes.py has a table of such inputs for real processes, one and four.
"""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.jobs import make_corpus, needs_proc

import train
from data.prepare import prepare
from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.config import setting
from nanodomino.config.config import Config
from nanodomino.config.setting import flag_name
from nanodomino.corpus.folder import load_corpus
from nanodomino.data import TokenDataset
from nanodomino.errors import UserError
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.run.failure import report_and_exit
from nanodomino.run.folder import check_shared_folder
from nanodomino.schedules.definitions import SCHEDULES

SCRIPT = Path(train.__file__).resolve()
PATIENCE = 60           # seconds until a process counts as stuck; it takes 5, but the machine may have other work


class ReachedTheGroup(Exception):
    """The input was accepted: the next thing would have been to talk to other ranks."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A prepared folder of about 13,000 tokens of the byte vocabulary, 257 words."""
    return make_corpus(tmp_path_factory.mktemp("bad-input"))


@pytest.fixture
def attempt(corpus, tmp_path, monkeypatch):
    """attempt(flags, world_size): train.main() on the first and on the last rank, up to where a group would form."""
    def reached(place, device, timeout):
        raise ReachedTheGroup

    monkeypatch.setattr(train, "start_world", reached)
    monkeypatch.chdir(tmp_path)

    def attempt(flags, world_size=1, ranks=None):
        given = shlex.split(flags) if isinstance(flags, str) else flags
        for rank in ranks or (world_size - 1, 0):
            train.main(["--data-path", str(corpus), "--device", "cpu", *given],
                       LaunchInfo(rank, world_size, rank, world_size, launched=world_size > 1))

    return attempt


@pytest.fixture
def refusal(attempt):
    """refusal(flags, world_size): the sentence that both ranks come to."""
    def refusal(flags, world_size=1, ranks=None):
        said = set()
        for rank in ranks or (world_size - 1, 0):
            with pytest.raises(UserError) as caught:
                attempt(flags, world_size, [rank])
            said.add(str(caught.value))
        assert len(said) == 1, "ranks disagree"
        (sentence,) = said
        fixes = ("; ", "(choose from", "must be at", "must be above", "must be a finite")
        assert "\n" not in sentence, sentence
        assert any(fix in sentence for fix in fixes), f"no fix is in: {sentence}"
        return sentence

    return refusal


# Flags

@pytest.mark.parametrize("world_size, flags", [
    (1, ""), (4, ""), (8, ""), (8, "--tp 8 --slices 4"), (8, "--pp 8"), (8, "--dp 2"), (8, "--tp 1 --pp 1 --dp 8"),
    (1, "--slices 4"), (1, "--columns 96"), (1, "--fp16 --dtype float16 --loss-scale 8"), (1, "--vocab-size 300"),
    (1, "--trace 5:5"), (1, "--seed 2147483647"),
    (1, "--eval-iters 0 --sample-tokens 0 --top-k 0 --seed 0 --clip-grad 0 --temperature 0 --lr 0")])
def test_good_input_reaches_the_process_group(attempt, world_size, flags):
    """Without this, every test below would also pass if everything were refused."""
    with pytest.raises(ReachedTheGroup):
        attempt(flags, world_size)


BAD_FLAGS = [
    # The layout
    (8, "--tp 16", "world size 8", "16 x 1 x 1 = 16", "start 16 processes"),
    (8, "--dp 3", "world size 8", "x 3 = 6", "start 6 processes"),
    (8, "--tp 2 --pp 2 --dp 4", "world size 8", "2 x 2 x 4 = 16", "change --tp, --pp, --dp"),
    (4, "--tp 1 --pp 1 --dp 2", "world size 4", "1 x 1 x 2 = 2", "start 2 processes"),
    (1, "--tp 2", "world size 1", "2 x 1 x 1 = 2", "start 2 processes with torchrun"),
    (1, "--dp 2", "world size 1", "1 x 1 x 2 = 2", "start 2 processes with torchrun"),
    (4, "--tp 0", "--tensor-model-parallel-size must be at least 1", "but is 0"),
    (4, "--pp -1", "--pipeline-model-parallel-size must be at least 1", "but is -1"),
    (4, "--pp 4 --num-layers 3", "num-layers 3", "pipeline-model-parallel-size 4, since",
     "try --num-layers 4 or --pp 2"),
    (4, "--pp 4 --num-layers 7 --schedule zb-v", "num-layers 7", "size 4 x virtual-stages 2 = 8",
     "try --num-layers 8 or --pp 2"),
    (2, "--pp 2 --num-layers 7 --virtual-stages 4", "size 2 x virtual-stages 4 = 8",
     "try --num-layers 8 or --virtual-stages 3 or --pp 1"),
    (4, "--pp 4 --num-layers 8 --virtual-stages 3", "num-layers 8", "size 4 x virtual-stages 3 = 12",
     "try --num-layers 12 or --virtual-stages 2 or --pp 2"),
    (1, "--num-layers 4 --virtual-stages 8", "num-layers 4", "size 1 x virtual-stages 8 = 8", "try --num-layers 8"),
    (2, "--virtual-stages 0", "--virtual-stages must be at least 1", "but is 0"),
    (2, "--schedule 1f1b --virtual-stages 2", "virtual-stages must be 1 with schedule 1f1b", "but is 2",
     "try --virtual-stages 1 or --schedule interleaved or --schedule zb-v"),
    (2, "--schedule zb-v --virtual-stages 1", "virtual-stages must be 2 with schedule zb-v", "but is 1",
     "try --virtual-stages 2 or --schedule 1f1b"),
    (2, "--schedule interleaved --virtual-stages 1", "virtual-stages must be from 2 to 999", "but is 1",
     "try --virtual-stages 2"),
    (2, "--num-virtual-stages-per-pipeline-rank 1000", "must be from 2 to 999 with schedule interleaved", "but is 1000",
     "try --virtual-stages 999"),
    # Divisibility
    (1, "--hidden-size 4", "hidden-size 4", "divisible by num-attention-heads 8", "try 8"),
    (4, "--tp 4 --num-attention-heads 6", "heads 6", "parallel-size 4", "try --tp 1, 2, 3, 6"),
    (4, "--tp 4 --ffn-hidden-size 10", "ffn-hidden-size 10", "tensor-model-parallel-size 4", "try --tp 1, 2, 5, 10"),
    (4, "--tp 4 --make-vocab-size-divisible-by 1", "vocabulary of 257", "size 4",
     "try --make-vocab-size-divisible-by 512"),
    (8, "--tp 8 --make-vocab-size-divisible-by 5", "vocabulary of 260", "size 8",
     "try --make-vocab-size-divisible-by 1024"),
    (1, "--model gpt2-xl --num-attention-heads 12", "hidden-size 1600", "num-attention-heads 12"),
    # The batch
    (3, "--pp 1", "global-batch-size 16", "4 x 3 = 12", "try --global-batch-size 24"),
    (4, "--tp 1 --pp 1 --micro-batch-size 3", "global-batch-size 16", "3 x 4 = 12", "try --global-batch-size 24"),
    (1, "--global-batch-size -1", "--global-batch-size must be at least 1", "but is -1"),
    (1, "--micro-batch-size 0", "--micro-batch-size must be at least 1", "but is 0"),
    (1, "--global-batch-size 10000000000", "--global-batch-size", "at most 2147483647", "but is 10000000000"),
    (4, "--micro-batch-size 1 --slices 2", "slices 2", "micro-batch-size 1", "--columns"),
    (4, "--slices 0", "--slices must be at least 1", "but is 0"),
    (4, "--columns 0", "--columns must be at least 1", "but is 0"),
    # Sizes
    (1, "--seq-length 0", "--seq-length must be at least 1", "but is 0"),
    (1, "--train-iters 99999999999999999999", "--train-iters", "at most 2147483647", "but is 99999999999999999999"),
    (4, "--tp 4 --pp 1 --sequence-parallel --seq-length 126", "seq-length 126",
     "parallel-size 4 with --sequence-parallel", "try --seq-length 128"),
    (1, "--seq-length 64 --max-position-embeddings 63", "seq-length 64", "try --max-position-embeddings 64"),
    (1, "--model gpt2 --max-position-embeddings 512", "seq-length 1024", "512", "try --max-position-embeddings 1024"),
    (4, "--vocab-size 256", "vocabulary of 257 tokens", "--vocab-size 256", "at least 257"),
    (1, "--log-interval 0", "--log-interval must be at least 1", "but is 0"),
    (1, "--eval-iters -1", "--eval-iters must be at least 0", "but is -1"),
    # Rates
    (1, "--lr -0.001", "--lr must be a finite number of at least 0", "-0.001"),
    (1, "--clip-grad -1", "--clip-grad must be a finite number of at least 0", "-1.0"),
    (1, "--adam-eps 0", "--adam-eps must be a finite number above 0", "0.0"),
    (1, "--layernorm-epsilon 0", "--layernorm-epsilon must be a finite number above 0", "0.0"),
    (1, "--adam-beta2 1", "--adam-beta2 must be at least 0 and below 1", "1.0"),
    (1, "--hidden-dropout 1", "--hidden-dropout must be at least 0 and below 1", "1.0"),
    (1, "--attention-dropout -0.1", "--attention-dropout must be at least 0 and below 1", "-0.1"),
    (1, "--loss-scale 0", "--loss-scale must be above 0 and below 3.40282e+38", "0.0"),
    (1, "--fp16 --min-loss-scale 65536", "min-loss-scale 65536 must be at most initial-loss-scale 32768",
     "try --min-loss-scale 32768"),
    (1, "--bf16 --dtype float32", "--bf16 and --dtype float32 contradict each other", "give one"),
    (1, "--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy needs --fp16", "--dtype is float32", "add --fp16"),
    (1, "--lr-warmup-fraction 1", "--lr-warmup-fraction must be at least 0 and below 1", "1.0"),
    # Names
    (4, "--dtype float8", "--dtype", "'float8'", "float32", "bfloat16", "float64"),
    (4, "--schedule zigzag", "--schedule", "'zigzag'", *SCHEDULES),
    (1, "--zero-stage 3", "--zero-stage", "3", "0, 1"),
    (1, "--optimizer abacus", "--optimizer", "'abacus'", *OPTIMIZERS),
    (1, "--normalization abnormal", "--normalization", "'abnormal'", *NORMALIZATIONS),
    (1, "--finetune", "--finetune needs a checkpoint to take the weights from", "add --load FOLDER"),
    (1, "--device tpu", "--device", "'tpu'", "cpu", "cuda"),
    (1, "--lr-decay-style step", "--lr-decay-style", "'step'", "cosine", "linear"),
    (1, "--tensor-parallel 2", "--tensor-parallel 2", "--help lists every flag"),
    (1, "--num-layer 3", "--num-layer 3", "--help lists every flag"),
    (1, "gpt2", "gpt2", "--help lists every flag"),
    (1, "--seq-length twelve", "--seq-length", "'twelve'", "--help lists every flag"),
]


@pytest.mark.parametrize("world_size, flags, needles", [(n, flags, rest) for n, flags, *rest in BAD_FLAGS],
                         ids=[f"{flags or 'no flags'} on {n}" for n, flags, *_ in BAD_FLAGS])
def test_flags_that_cannot_work_are_refused_with_the_numbers_and_a_fix(refusal, world_size, flags, needles):
    """Each rule that ties sizes together, and each spelling that is only almost right (no abbreviation is guessed)."""
    sentence = refusal(flags, world_size)
    assert all(needle in sentence for needle in needles), sentence


def flags_of(kind):
    return [flag_name(one.name) for one in setting.flag_settings(Config) if one.type is kind]


@pytest.mark.parametrize("flag", flags_of(int))
def test_no_whole_number_may_be_negative_huge_or_something_else(refusal, flag):
    """Every flag of Config, those to come included: a size of 10^30 would overflow deep in the run, a traceback."""
    for value in ("-1", "1" + 30 * "0", "", "1.5", "1e3", "nan"):
        sentence = refusal([f"{flag}={value}"])
        assert flag in sentence and (value in sentence if value else "''" in sentence), sentence


@pytest.mark.parametrize("flag", flags_of(float))
def test_no_rate_may_be_infinite_or_no_number(refusal, flag):
    """NaN compares false with everything: a check written as `value < 0` would let it pass."""
    for value, said in [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("-1", "-1.0"), ("1e400", "inf"), ("", "''"),
                        ("high", "'high'")]:
        sentence = refusal([f"{flag}={value}"])
        assert flag in sentence and said in sentence, sentence


@pytest.mark.parametrize("flag", flags_of(str))
def test_no_name_may_be_empty(refusal, flag):
    """`--data-path "$DATA"` with DATA unset must not train on something else, nor `--run-dir ""` fill this folder."""
    assert flag in refusal([f"{flag}="])


# The data folder

def change_meta(**changes):
    def change(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**meta, **changes}))
    return change


def write_meta(text):
    return lambda folder: (folder / "meta.json").write_text(text)


def resize(split, count):
    """Cut the split's file, and not what meta.json says about it, to `count` bytes; from the end if negative."""
    return lambda folder: (folder / f"{split}.bin").write_bytes((folder / f"{split}.bin").read_bytes()[:count])


def shorten(split, tokens):
    """A split that honestly has this few tokens."""
    def change(folder):
        resize(split, 2 * tokens)(folder)
        change_meta(tokens={**json.loads((folder / "meta.json").read_text())["tokens"], split: tokens})(folder)
    return change


AGAIN = "prepare the text again"
BAD_FOLDERS = {
    "broken JSON": (write_meta('{"format": '), "meta.json is damaged", AGAIN),
    "JSON without end": (write_meta(100_000 * "["), "meta.json is damaged", AGAIN),
    "a list": (write_meta("[1, 2]"), "meta.json is damaged", AGAIN),
    "an empty meta.json": (write_meta(""), "meta.json is damaged", AGAIN),
    "no vocabulary": (change_meta(vocab_size=0), "end_of_text 256 and vocab_size 0", AGAIN),
    "a negative vocabulary": (change_meta(vocab_size=-257), "vocab_size -257", AGAIN),
    "a number for a file's name": (change_meta(vocab_file=7), "gives '7' as vocab_file", "a file beside it", AGAIN),
    "a file elsewhere": (change_meta(vocab_file="../../encoder.json"), "as vocab_file", "a file beside it", AGAIN),
    "a folder for a file": (change_meta(merge_file=".."), "as merge_file", "a file beside it", AGAIN),
    "an entropy that is no number": (change_meta(unigram_entropy=float("nan")), "entropies of nan", "must be finite",
                                     AGAIN),
    "an endless entropy": (change_meta(bigram_entropy=float("inf")), "must be finite", AGAIN),
    "an endless vocabulary": (change_meta(vocab_size=float("inf")), "meta.json is damaged", AGAIN),
    "more words than numbers": (change_meta(vocab_size=70_000), "vocab_size <= 65536", "vocab_size 70000", AGAIN),
    "end-of-text outside": (change_meta(end_of_text=257), "end_of_text 257 and vocab_size 257", AGAIN),
    "an unknown dtype": (change_meta(dtype="float32"), "meta.json is damaged", "float32", AGAIN),
    "a negative count": (change_meta(tokens=dict(train=-1, valid=9, test=9)), "should hold -1 tokens", AGAIN),
    "train.bin missing": (lambda folder: (folder / "train.bin").unlink(), "train.bin is missing", AGAIN),
    "train.bin empty": (resize("train", 0), "train.bin should hold", "has 0 bytes", AGAIN),
    "valid.bin truncated": (resize("valid", -2), "valid.bin should hold", AGAIN),
    "no training text": (shorten("train", 0), "train split", "has 0 tokens", "+ 1 = 129", "lower --seq-length"),
    "a token too few": (shorten("train", 128), "train split", "has 128 tokens", "+ 1 = 129", "lower --seq-length"),
}


@pytest.mark.parametrize("change, needles", [(change, rest) for change, *rest in BAD_FOLDERS.values()],
                         ids=BAD_FOLDERS.keys())
def test_a_folder_that_is_no_whole_corpus_is_refused_with_its_name(refusal, corpus, tmp_path, change, needles):
    """Found before the ranks meet: a truncated file would otherwise fail on the one replica that reads its end."""
    folder = tmp_path / "copy"
    shutil.copytree(corpus, folder)
    change(folder)
    for world_size in (1, 4):
        sentence = refusal(["--data-path", str(folder)], world_size)
        assert str(folder) in sentence and all(needle in sentence for needle in needles), sentence


def test_a_split_of_exactly_one_sample_is_enough(attempt, corpus, tmp_path):
    """The neighbour of 'a token too few'; validation that is too short is left out, not refused."""
    shutil.copytree(corpus, tmp_path / "copy")
    shorten("train", 129)(tmp_path / "copy")
    shorten("valid", 5)(tmp_path / "copy")
    with pytest.raises(ReachedTheGroup):
        attempt(["--data-path", str(tmp_path / "copy")])


def test_a_name_that_no_disk_can_hold_is_a_folder_that_is_not_there(refusal):
    """The system answers 'file name too long', which must not end as a traceback."""
    assert "no data folder" in refusal(["--data-path", 5000 * "d"])
    assert "File name too long" in refusal(["--run-dir", 5000 * "r"], ranks=[0])


def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(corpus, tmp_path):
    """Too slow to look for at the start of a big run; on a GPU it would be a device-side assert."""
    shutil.copytree(corpus, tmp_path / "copy")
    (tmp_path / "copy" / "train.bin").write_bytes(b"\xff" * (corpus / "train.bin").stat().st_size)
    with pytest.raises(UserError, match="token id 65535, outside the vocabulary of 257; prepare the text again"):
        TokenDataset(load_corpus(tmp_path / "copy"), "train", 16, seed=1).batch(0, 0, 0, 1, 2, 2)


# The run folder, which only rank 0 makes

def test_a_run_folder_that_cannot_be_used_is_refused(refusal, tmp_path):
    """Before the first step, and without touching what is there."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("precious")
    for name, message in [("file", "file is a file; choose another"),
                          ("old", "old holds a metrics.jsonl but no config.json"),
                          ("file/run", "can't be written to (Not a directory); choose another")]:
        assert message in refusal(["--run-dir", name], 4, ranks=[0])
    assert (tmp_path / "file").read_text() == (tmp_path / "old" / "metrics.jsonl").read_text() == "precious"


@needs_proc
def test_a_run_folder_that_takes_no_files_is_refused(refusal):
    """It exists, so making it succeeds; the first write would fail, even root's, with the group already formed."""
    assert "/proc can't be written to" in refusal(["--run-dir", "/proc"], ranks=[0])


def test_a_refused_start_leaves_nothing_behind(refusal, tmp_path):
    """Neither a folder of its own nor a lock in somebody else's."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("precious")
    for flags in (["--run-dir", "old"], ["--load", "nowhere"], ["--load", "old"],
                  ["--load", "old", "--run-dir", "new/run"]):
        refusal(flags, ranks=[0])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["old", "old/metrics.jsonl"]


@needs_proc
def test_a_new_run_on_a_full_disk_is_refused_and_leaves_nothing_behind(refusal, tmp_path):
    """A file can be made there, which is not yet a file that holds anything."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        (tmp_path / "ballast").write_bytes(bytes(60_000))
        for flags in ([], ["--run-dir", "mine/run"]):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path)
                assert "can't be written to (No space left on device); choose another" in refusal(flags, ranks=[0])
        assert [path.name for path in tmp_path.iterdir()] == ["ballast"]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_lock_that_is_a_link_is_not_written_through(refusal, tmp_path):
    """Not even to a file of the same user."""
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    sentence = "--run-dir run can't be written to (Too many levels of symbolic links)"
    assert sentence in refusal(["--run-dir", "run"], ranks=[0])
    assert (tmp_path / "precious").read_text() == "precious"


def test_what_a_kill_has_left_is_gone_at_the_next_start(attempt, tmp_path):
    """Of a save and of a start. It may be large, and no save may ever come."""
    run, left = tmp_path / "run", ("checkpoints/.step-00000005.unfinished", "checkpoints/.step-00000003.discarded")
    for name in left:
        (run / name).mkdir(parents=True)
        (run / name / "__0_0.distcp").write_text("half")
    (run / ".shared-abc").touch()
    (run / ".mine").touch()
    with pytest.raises(ReachedTheGroup):
        attempt(["--run-dir", "run"], ranks=[0])
    assert sorted(path.name for path in run.iterdir()) == [".mine", "checkpoints", "lock"]
    assert not list((run / "checkpoints").iterdir())


def test_the_next_free_run_folder_is_found_or_refused(attempt, refusal, tmp_path):
    """A link `runs` into nowhere (a disk that is not mounted) once made the search for a free number endless."""
    for _ in range(2):
        with pytest.raises(ReachedTheGroup):
            attempt("", ranks=[0])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["nano-001", "nano-002"]
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").symlink_to(tmp_path / "not mounted")
    assert "--run-dir runs can't be written to" in refusal("", ranks=[0])
    (tmp_path / "runs").unlink()
    (tmp_path / "runs").write_text("a file")
    assert "--run-dir runs is a file" in refusal("", ranks=[0])


def look_together(run_dir, full):
    """Runs in a worker. Ranks in `full` can make a file, and not fill it: the disk's quota of their host is used up."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        check_shared_folder(Path(run_dir))
        return ""
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_run_folder_that_some_host_sees_and_cannot_write_to_is_refused_by_all(pool, tmp_path):
    """At the start, not at the first checkpoint, hours later; and nothing is left there."""
    sentence = (f"--run-dir {tmp_path} can't be written to by rank 1 (File too large), 2 (File too large); choose a "
                f"folder that all "
                "hosts can write to")
    for full, said in (((), ""), ((1, 2), sentence)):
        assert pool.run(look_together, str(tmp_path), full, world_size=3) == [said] * 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("output, split, message", [
    (300 * "o", "949,50,1", "File name too long"), ("loop", "949,50,1", "cannot prepare"),
    ("loop/out", "949,50,1", "cannot prepare"), ("out", "1e308,1e308,1e308", "three numbers train,valid,test"),
    ("out", "1,nan,1", "but is 1,nan,1")], ids=lambda value: value[:20])
def test_a_corpus_that_cannot_be_prepared_is_refused(tmp_path, output, split, message):
    """More of these are in test_data.py. Three shares whose sum is infinite would each come to 0."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "text.txt", tmp_path / output, split=split, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "text.txt"]


# The machine and the launcher

@pytest.mark.parametrize("gpus, world_size, flags, needles", [
    (0, 1, "--device cuda", ("--device cuda needs a GPU", "there is none", "try --device cpu")),
    (2, 4, "--device cuda", ("4 processes on this host", "there are 2", "--nproc_per_node 2", "--device cpu")),
    (3, 4, "--device auto", ("4 processes on this host", "there are 3", "--nproc_per_node 3", "--device cpu"))])
def test_too_few_gpus_are_counted(refusal, monkeypatch, gpus, world_size, flags, needles):
    """Two ranks on one GPU would hang in NCCL."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sentence = refusal(flags, world_size)
    assert all(needle in sentence for needle in needles), sentence


LAUNCHED = dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="localhost",
                MASTER_PORT="29500")


@pytest.mark.parametrize("changes, needles", [
    (dict(MASTER_ADDR=None), ("has RANK", "not MASTER_ADDR", "start with torchrun")),
    (dict(MASTER_ADDR=""), ("not MASTER_ADDR", "start with torchrun")),
    (dict(MASTER_PORT=None), ("not MASTER_PORT", "start with torchrun")),
    (dict(WORLD_SIZE=None, LOCAL_WORLD_SIZE=None), ("has RANK, LOCAL_RANK", "not WORLD_SIZE, LOCAL_WORLD_SIZE")),
    (dict(RANK=""), ("has WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE but not RANK", "start with torchrun")),
    (dict(RANK="one"), ("RANK must be a whole number", "'one'", "start with torchrun")),
    (dict(RANK="-1"), ("RANK must be a whole number", "'-1'")),
    (dict(RANK="1.0"), ("RANK must be a whole number", "'1.0'")),
    (dict(RANK="²"), ("RANK must be a whole number", "'²'")),        # str.isdigit() calls it a number, int() does not
    (dict(MASTER_PORT="http"), ("MASTER_PORT must be a whole number", "'http'")),
    (dict(RANK="4"), ("RANK 4 must be below WORLD_SIZE 4", "start with torchrun")),
    (dict(LOCAL_RANK="7"), ("LOCAL_RANK 7 below LOCAL_WORLD_SIZE 4", "start with torchrun")),
    (dict(WORLD_SIZE="0"), ("RANK 1 must be below WORLD_SIZE 0", "start with torchrun"))], ids=str)
def test_half_an_environment_is_refused(changes, needles):
    """Left by a cluster or a shell; guessing the rest would make all believe to be rank 0, or wait for nobody."""
    environment = {name: value for name, value in {**LAUNCHED, **changes}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        read_launch_environment(environment)
    assert all(needle in str(caught.value) for needle in needles), str(caught.value)


def test_a_whole_environment_or_none_is_a_place():
    """What the refusals above are measured against."""
    assert read_launch_environment(LAUNCHED) == LaunchInfo(1, 4, 1, 4, launched=True)
    assert read_launch_environment({}) == read_launch_environment(dict(MASTER_ADDR="localhost",
                                                                       HOME="/")) == LaunchInfo()


@pytest.mark.parametrize("rank, error, waits, begin", [
    (0, UserError("heads 3; try 4"), False, "error: heads 3; try 4\n"),
    (3, UserError("heads 3; try 4"), True, "error: heads 3; try 4\n"),
    (2, ValueError("mine"), False, "rank 2 failed: ValueError: mine\n"),
    (2, RuntimeError("Connection closed by peer"), True, "rank 2 lost its peers: "),
    (2, RuntimeError("writev: Broken pipe"), True, "rank 2 lost its peers: "),
    (2, RuntimeError("NCCL error: remote process exited"), True, "rank 2 lost its peers: ")], ids=str)
def test_who_may_be_only_an_echo_waits_before_it_speaks(monkeypatch, capsys, rank, error, waits, begin):
    """But it does speak: an id outside the vocabulary is found by a single replica, which may not hold rank 0."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        report_and_exit(LaunchInfo(rank, 4, rank, 4, launched=True), error)
    assert caught.value.code != 0 and bool(slept) == waits and all(seconds <= 13 for seconds in slept)
    last = capsys.readouterr().err.splitlines(keepends=True)[-1]        # after a traceback, where there is one
    assert last.startswith(begin)


# What a shell sees

def shell(*arguments, processes=0, script=SCRIPT, **environment):
    """The command and environment of `python train.py`, or of torchrun with so many processes."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    clean.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    return [sys.executable, *launcher, str(script), *map(str, arguments)], {**clean, **environment}


def complete(tmp_path, *arguments, **options):
    command, environment = shell(*arguments, **options)
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)


def test_one_process_says_one_sentence_and_ends_with_code_two(tmp_path):
    """No traceback, no folder made, no group waited for."""
    done = complete(tmp_path, "--slices", 0)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --slices must be at least 1, but is 0\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_four_processes_say_one_sentence_under_torchrun(tmp_path, corpus):
    """Rank 0 alone finds the mistake, while the others already wait for it."""
    shutil.copytree(corpus, tmp_path / "copy")
    flags = "--data-path copy --device cpu --run-dir copy/meta.json".split()
    done = complete(tmp_path, *flags, processes=4)
    output = done.stdout + done.stderr
    assert done.returncode != 0 and output.count("error: ") == 1, output
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert "--run-dir copy/meta.json is a file; choose another name" in last, "torchrun's report must not bury it"
    assert "error: --run-dir copy/meta.json is a file; choose another name\n" in output, output
    assert f'File "{SCRIPT}"' not in output and "failed:" not in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
