"""Bad input ends in one sentence with the rule, the numbers and the fix, the same on every rank.

    TABLE            a command, its flags, what is wrong in its folder, and parts of the sentence. Checked in this
                     process: main() runs for the first and the last rank, up to where a process group would form.
    PROCESS_TABLE    mistakes that show only between processes. Checked by forks (support/fork_server.py): they must end
                     soon and print the sentence once.

Each row starts in a folder with a corpus, data/, and a run of two steps, run/, of a model of width 16. Rules between
settings have a table of their own in tests/settings/test_rules.py.
"""

import json
import shlex
import shutil
import socket
import sys
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


LIMIT = 300             # seconds until the processes of a row count as stuck; on an idle machine they take 5
STEP = "run/checkpoints/step-00000002"
META, MANIFEST, SHARD = "data/meta.json", f"{STEP}/manifest.json", f"{STEP}/rank-00000.safetensors"
PREPARE_AGAIN = "prepare the text again"


# ---- what may be wrong in the folder

def remove(name: str):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def cut(name: str, end: int):
    """Keep the first bytes of a file, as in content[:end]."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def flip(name: str):
    """Flip one bit of the last byte of a file."""
    return lambda folder: (folder / name).write_bytes(
        (content := (folder / name).read_bytes())[:-1] + bytes([content[-1] ^ 1]))


def change_meta(**changes):
    """Change entries of meta.json, and correct its checksums. None: remove."""
    def change(folder):
        digests = {split: sha256(folder / f"data/{split}.bin") for split in data.prepare.SPLITS}
        meta = json.loads((folder / META).read_text()) | dict(sha256=digests) | changes
        (folder / META).write_text(json.dumps({key: value for key, value in meta.items() if value is not None}))
    return change


def shorten(split: str, tokens: int):
    """Make the split this short, in its file and in meta.json."""
    def change(folder):
        cut(f"data/{split}.bin", 2 * tokens)(folder)
        change_meta(tokens=json.loads((folder / META).read_text())["tokens"] | {split: tokens})(folder)
    return change


def forge(folder):
    """Let a checkpoint name a data folder that is gone, and correct its checksum."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["config"]["data_path"] = "moved/data"
    (folder / MANIFEST).write_text(manifest_text(manifest))


def foreign_tokens(folder):
    (folder / "data/train.bin").write_bytes(22894 * b"\xff")
    change_meta()(folder)


def leave(folder):
    """Change nothing."""


HELP = "--help lists every flag"
TRAIN, GENERATE, PREPARE = train.main, nanodomino.generate.__main__.main, data.prepare.main
TABLE = [
    # settings that only the data or the machine show to be wrong
    (TRAIN, "--seq-length 20000", leave, "train split", "has 11447 tokens", "seq-length + 1 = 20001", "lower --seq"),
    (TRAIN, "--hidden-size 4000000 --num-attention-heads 4", leave, "would need at least", "more processes (--tp, "),
    (TRAIN, "--load run --finetune --mtp-num-layers 2", leave, "mtp-num-layers 2 must be at most the 0 of run/check",
     "can drop depths but not add any; try --mtp-num-layers 0"),
    (TRAIN, "--load run --finetune --seq-length 32", leave, "max-position-embeddings 16; try --seq-length 16"),
    (TRAIN, "--load run --finetune --max-position-embeddings 32", leave, "embeddings 16, but this run has 32"),
    # the data folder
    (TRAIN, "", remove(META), "there is no data folder data with a meta.json; give", "data/prepare.py --input TEXT"),
    (TRAIN, "--data-path run/config.json", leave, "--input run/config.json --output run/config.json-prepared"),
    (TRAIN, "", cut(META, 99), "data/meta.json is damaged", PREPARE_AGAIN),
    (TRAIN, "", change_meta(end_of_text=None), "meta.json is damaged (it has no 'end_of_text')", PREPARE_AGAIN),
    (TRAIN, "", change_meta(tokens=7), "meta.json is damaged ('int' object", PREPARE_AGAIN),
    (TRAIN, "", remove("data/valid.bin"), "data/valid.bin should hold", "but has 0 bytes", PREPARE_AGAIN),
    (TRAIN, "", cut("data/train.bin", -1), "tokens in 22894 bytes, but has 22893", PREPARE_AGAIN),
    (TRAIN, "", shorten("train", 128), "train split", "has 128 tokens", "+ 1 = 129", "lower --seq-length"),
    (TRAIN, "--run-dir run", flip("data/valid.bin"), "data/valid.bin has changed since it was prepared", PREPARE_AGAIN),
    # checkpoints and the run's folder
    (TRAIN, "--load data/meta.json", leave, "data/meta.json is no folder to load from; give"),
    (GENERATE, "--load data", leave, "data is neither a checkpoint nor a run's folder; give either"),
    (TRAIN, "--load " + "a" * 5000, leave, "aaa: File name too long", "choose another file or folder"),
    (TRAIN, "--load run", flip(SHARD), "holds no intact checkpoint; give another"),
    (TRAIN, "--load run", remove(STEP), "no intact checkpoint (a run saves its first after --save-interval steps, an"),
    (TRAIN, f"--load {STEP}", flip(SHARD), "damaged", "use another"),
    (TRAIN, "--run-dir data", leave, "--run-dir data holds no run, but other files (meta.json, test.bin, train.bin ...)"
     "; choose a new or an empty folder"),
    (TRAIN, "--run-dir run", flip(SHARD), "run holds only damaged checkpoints", "restore a checkpoint, or mo"),
    # other commands
    (GENERATE, "--load run --temperature -1", leave, "--temperature must be at least 0 and at most 3.40282e+38, but"),
    (GENERATE, "--load run --num-samples 0", leave, "--num-samples must be at least 1 and at most", "but is 0"),
    (GENERATE, "--load run --prompts no", leave, "--prompts no can't be read as UTF-8 text (No such file", "give a te"),
    (GENERATE, "--load run --max-token 9", leave, "arguments: --max-token 9; did you mean --max-tokens? python", HELP),
    (GENERATE, "--load run --device cuda", leave, "--device cuda needs a GPU that torch can see", "try --device cpu"),
    (GENERATE, "--prompt def", leave, "the following arguments are required: --load", HELP),
    (GENERATE, "--load run --data-path data", change_meta(vocab_size=300), "tokenizer of data has 300 tokens, but the "
     "model has only 257", "give the data folder that the model was trained"),
    (GENERATE, "--load run", forge, "stored with the training data, but the folder moved/data no longer exists",
     "new path as --data-path"),
    (GENERATE, "--load run --prompt \udcff", leave, "--prompt is not UTF-8 text"),
    (PREPARE, "--input none*.txt --output out", leave, "no file or folder matches the input none*", "check the path"),
    (PREPARE, "--input data --output /proc/out", leave, "/proc/.out", "No such file", "choose another"),
    (PREPARE, "--input data --output out --split 1,inf,1", leave, "--split must be three numbers"),
    (PREPARE, "--input data --output out --tokenizer word", leave, "unknown tokenizer 'word'", "try one of byte, gpt2")]


class ReachedTheGroup(Exception):
    """The input was accepted: the next thing would be to communicate with other ranks."""


@pytest.fixture(scope="module")
def intact(fork_server, tmp_path_factory):
    """A folder with data/ and run/."""
    folder = tmp_path_factory.mktemp("intact") / "folder"
    folder.mkdir()
    make_corpus(folder).rename(folder / "data")
    flags = [*TINY, "--num-attention-heads", "4", "--data-path", "data", "--run-dir", "run", "--train-iters", "2"]
    ended = fork_server.launch("train.py", [(flags, place) for place in launcher_environments(2)], folder, LIMIT)
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
    """refuse(main, flags): the sentence of a command on four processes. Raises ReachedTheGroup if it is accepted."""
    def reached(*_):
        raise ReachedTheGroup

    for module in (session, nanodomino.generate.__main__):
        monkeypatch.setattr(module, "start_world", reached)
    monkeypatch.setattr("nanodomino.run.folder.lock_folder", lambda _: None)    # it lasts as long as the process
    monkeypatch.setattr("nanodomino.estimate.stages.fullest_rank_bytes", lambda *_: 0)               # to save time

    def refuse(main, flags):
        arguments, sentences = shlex.split(flags), []
        for rank in (3, 0) if main is not PREPARE else (0,):   # rank 0 alone looks for folders, local rank 0 at texts
            try:
                if main is PREPARE:
                    monkeypatch.setattr(sys, "argv", ["data/prepare.py", *arguments])
                    main()
                else:
                    files = ["--data-path", "data", "--device", "cpu"] if main is TRAIN else []
                    main([*files, *arguments], LaunchInfo(rank, 4, rank, 4, launched=True))
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
    for flags in ("", "--run-dir run", f"--load {STEP}", "--seq-length 16"):
        with pytest.raises(ReachedTheGroup):
            refuse(TRAIN, flags)
        shorten("train", 129)(folder) if flags else shorten("valid", 5)(folder)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].__module__} {row[1][:50]} {row[3][:30]}")
def test_bad_input_is_refused_with_the_rule_the_numbers_and_a_fix(refuse, folder, row):
    """Before a process group forms, and without touching the run that is there."""
    main, flags, damage, *says = row
    damage(folder)
    metrics = (folder / "run/metrics.jsonl").read_bytes()
    sentence = refuse(main, flags)
    assert all(part in sentence for part in says) and ("; " in sentence or "must be" in sentence), sentence
    assert (folder / "run/metrics.jsonl").read_bytes() == metrics


def test_a_missing_package_is_found_before_anything_starts(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "--tensorboard-dir needs the package tensorboard" in refuse(TRAIN, "--tensorboard-dir board")


# ---- the launcher's environment

LAUNCHED = dict(zip(LAUNCHER, ("1", "4", "1", "4", "localhost", "29500"), strict=True))


def test_copies_that_would_train_separate_models_and_an_incomplete_environment_are_refused():
    """`srun python train.py`, and `srun torchrun --standalone`, whose world has one host. But srun may start one
    torchrun per host, or a single process; sbatch and salloc set only the other variables."""
    copies = "copies were started, .*; start one torchrun per host, without --standal"
    for environment, sentence in ((dict(SLURM_STEP_NUM_TASKS="2"), copies), (dict(PMI_SIZE="2"), copies),
                                  (LAUNCHED | dict(SLURM_STEP_NUM_TASKS="4", GROUP_WORLD_SIZE="1"), copies),
                                  (LAUNCHED | dict(RANK=""), "that torchrun sets, RANK must be set, too; start with t"),
                                  (LAUNCHED | dict(LOCAL_RANK=""), "that torchrun sets, LOCAL_RANK must be set, too")):
        with pytest.raises(UserError, match=sentence):
            read_launch_environment(environment)
    two_hosts = LAUNCHED | dict(SLURM_STEP_NUM_TASKS="2", GROUP_WORLD_SIZE="2")
    assert read_launch_environment(two_hosts) == LaunchInfo(1, 4, 1, 4, launched=True)
    assert read_launch_environment(dict(SLURM_NTASKS="4", SLURM_PROCID="0", PMI_SIZE="1")) == LaunchInfo()


# ---- between processes: (their number, flags, damage, changes of the launcher's environment, parts of the sentence).
#      {port} is a port in use, {rank} (in flags) the rank.

PROCESS_TABLE = [
    (4, "--run-dir data/meta.json", leave, {}, "meta.json can't be written to (it is a file); choose"),    # on rank 0
    (4, "--seq-length 16", foreign_tokens, {}, "token id 65535, outside the vocabulary of 257", PREPARE_AGAIN),
    (4, "--timeout 1", leave, dict(MASTER_PORT="{port}"), "MASTER_PORT {port}", "choose a free port"),
    (1, "--timeout 1 --pp 2", leave, dict(WORLD_SIZE="2"), "the 2 processes cannot connect", "and start all 2"),
    (4, "--seed {rank}", leave, {}, "rank 1 has other settings or data than rank 0", "give all hosts", "--no-compile")]


@pytest.mark.parametrize("row", PROCESS_TABLE, ids=lambda row: f"{row[1]} {row[4][:20]}")
def test_processes_end_soon_with_one_sentence(fork_server, folder, row):
    """Whether all ranks find the mistake, or one finds it while the others wait for it in a collective."""
    processes, flags, damage, environment, *says = row
    damage(folder)
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        port = in_use.getsockname()[1]
        ranks = [([*TINY, "--data-path", "data", "--train-iters", "3", *shlex.split(flags.format(rank=rank))],
                  place | {name: value.format(port=port) for name, value in environment.items()})
                 for rank, place in enumerate(launcher_environments(processes))]
        ended = fork_server.launch("train.py", ranks, folder, LIMIT)
    assert ended.code == 2 and "Traceback" not in ended.output, ended
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert all(part.format(port=port) in sentence for part in says), sentence


def test_help_is_printed_once_with_exit_code_0(fork_server, intact):
    ended = fork_server.launch("train.py", [(["--help"], place) for place in launcher_environments(4)], intact, LIMIT)
    assert (ended.code, ended.output.count("usage: train.py")) == (0, 1) and "error" not in ended.output, ended.output
