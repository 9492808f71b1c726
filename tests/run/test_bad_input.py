"""Bad input ends in one sentence with the rule, the numbers and the fix, the same on every rank.

    TABLE            a command, its flags, what is wrong in its folder, and parts of the sentence. Checked in this
                     process: main() runs for the first and the last rank, up to where a process group would form.
    PROCESS_TABLE    mistakes that show only between processes. Checked by forks (support/fork_server.py): they must end
                     soon and print the sentence once.

Each row starts in a folder with a corpus, data/, and a run of two steps, run/, of a model of width 16.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.fork_server import LAUNCHER, launcher_environments
from support.jobs import TINY, make_corpus

import data.prepare
import nanodomino.checkpoint.__main__
import nanodomino.generate.__main__
import nanodomino.plot.__main__
import nanodomino.timeline.__main__
import train
from nanodomino.checkpoint.manifest import file_digest, manifest_text
from nanodomino.comm.world import LaunchInfo, read_launch_environment
from nanodomino.config import setting
from nanodomino.config.command_exit import sentence_and_code
from nanodomino.config.config import Config
from nanodomino.config.setting import flag_name
from nanodomino.corpus.prepared_folder import SPLITS, sample_sha256
from nanodomino.errors import UserError
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.optim.optimizers import OPTIMIZERS
from nanodomino.run.rank_failure import report_and_exit
from nanodomino.schedules.definitions import SCHEDULES

LIMIT = 20              # seconds until all processes of a row have ended; more if the machine is busy
STEP = "run/checkpoints/step-00000002"
PREPARE_AGAIN, ANOTHER, TORCHRUN = "prepare the text again", "use another", "start with torchrun, which sets"
COMMANDS = {"train.py": train.main, "nanodomino.generate": nanodomino.generate.__main__.main,
            "nanodomino.checkpoint": nanodomino.checkpoint.__main__.main, "data/prepare.py": data.prepare.main,
            "nanodomino.plot": nanodomino.plot.__main__.main, "nanodomino.timeline": nanodomino.timeline.__main__.main}


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
    code: int = 2                                       # exit code; only in PROCESS_TABLE

    def __str__(self):
        return " ".join(filter(None, (self.command, self.flags[:60], self.what)))


# ---- flags

MOE = "--num-experts 6 --disable-bias-linear"

TABLE = [Bad(flags, says, processes=(n,)) for n, flags, *says in [
    # the layout
    (8, "--tp 16", "world size 8 must equal", "16 x 1 x 1 = 16", "start 16 processes with torchrun"),
    (8, "--dp 3", "world size 8", "x 3 = 6", "start 6 processes"),
    (8, "--tp 2 --pp 2 --dp 4", "world size 8", "2 x 2 x 4 = 16", "change --tp, --pp, --dp"),
    (4, "--tp 1 --pp 1 --dp 2", "world size 4", "1 x 1 x 2 = 2", "start 2 processes"),
    (1, "--tp 2", "world size 1", "2 x 1 x 1 = 2", "start 2 processes with torchrun"),
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
    (2, "--schedule 1f1b --virtual-stages 2", "virtual-stages must be 1 with schedule 1f1b", "but is 2",
     "try --virtual-stages 1 or --schedule interleaved or --schedule zb-v"),
    (2, "--schedule zb-v --virtual-stages 1", "virtual-stages must be 2 with schedule zb-v", "but is 1",
     "try --virtual-stages 2 or --schedule 1f1b"),
    (2, "--schedule interleaved --virtual-stages 1", "virtual-stages must be from 2 to 999", "but is 1",
     "try --virtual-stages 2"),
    (2, "--num-virtual-stages-per-pipeline-rank 1000", "must be from 2 to 999 with schedule interleaved",
     "but is 1000", "try --virtual-stages 999"),
    # divisibility
    (1, "--hidden-size 4", "hidden-size 4", "divisible by num-attention-heads 8", "try --hidden-size 8"),
    (4, "--tp 4 --num-attention-heads 6", "heads 6", "parallel-size 4", "try --tp 1, 2, 3, 6"),
    (4, "--tp 4 --ffn-hidden-size 10", "ffn-hidden-size 10", "tensor-model-parallel-size 4", "try --tp 1, 2, 5, 10"),
    (4, "--tp 4 --make-vocab-size-divisible-by 1", "of 257", "size 4", "try --make-vocab-size-divisible-by 512"),
    (8, "--tp 8 --make-vocab-size-divisible-by 5", "of 260", "size 8", "try --make-vocab-size-divisible-by 1024"),
    (4, "--tp 4 --pp 1 --sequence-parallel --seq-length 126", "seq-length 126",
     "parallel-size 4 with --sequence-parallel", "try --seq-length 128"),
    # context parallelism
    (2, "--cp 2 --seq-length 6", "seq-length 6 must be divisible by 2 x context-parallel-size = 4", "--seq-length 8"),
    (8, "--cp 2 --tp 4 --pp 1 --sequence-parallel --seq-length 12", "seq-length 12", "and by cp x tp = 8",
     "try --seq-length 16"),
    (4, "--cp 4 --cp-comm-type a2a --num-attention-heads 2", "must be divisible by tp x cp = 1 x 4 = 4",
     "try --cp-comm-type all_gather"),
    (1, "--cp-comm-type a2a", "--cp-comm-type a2a needs --cp above 1 to have an effect"),
    (4, "--cp 3 --seq-length 12", "data x context parallel = 1 x 1 x 1 x 3 = 3", "--tp, --cp, --pp, --dp"),
    # multi-token prediction
    (1, "--mtp-num-layers 8 --seq-length 8", "mtp-num-layers 8 must be below seq-length 8", "try --mtp-num-layers 7"),
    (1, "--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor 0.3 needs --mtp-num-layers to have an effect"),
    (1, "--load run --finetune --mtp-num-layers 2", "mtp-num-layers 2 must be at most the 0 of run/checkpoints/step-",
     "can drop depths but not add any; try --mtp-num-layers 0"),
    # fp8
    (1, "--fp8-format hybrid --num-layers 2 --first-last-layers-bf16", "num-layers 2 must be at least 3 with --first",
     "no layer multiplies in 8 bits; try --num-layers 3, or leave out --first-last-layers-bf16"),
    (1, "--fp8-format hybrid --dtype float64", "adds up in fp32, so --dtype must not be float64; try --bf16"),
    (1, "--fp8-recipe rowwise", "--fp8-recipe rowwise needs --fp8-format to have an effect"),
    # experts
    (4, f"{MOE} --dp 4 --ep 3", "expert-model-parallel-size 3", "must divide num-experts 6", "size 4; try --ep 1, 2"),
    (6, f"{MOE} --dp 6 --ep 4", "expert-model-parallel-size 4", "must divide num-experts 6", "try --ep 1, 2, 3, 6"),
    (2, "--ep 2", "--expert-model-parallel-size 2 needs --num-experts to have an effect",
     "but --num-experts is not given; change that"),
    (1, f"{MOE} --moe-router-topk 7", "moe-router-topk 7 must be at most num-experts 6", "try --moe-router-topk 6"),
    (1, f"{MOE} --moe-router-topk 1", "moe-router-topk must be at least 2 with --moe-router-score-function softmax",
     "but is 1: the softmax over a single chosen expert is always 1", "add --moe-router-pre-softmax"),
    (1, "--num-experts 6", "experts have no biases, so --num-experts needs --disable-bias-linear; add it"),
    (4, f"{MOE} --tp 4 --moe-ffn-hidden-size 10", "moe-ffn-hidden-size 10 must be divisible by",
     "size 4; try --moe-ffn-hidden-size 12"),
    (4, f"{MOE} --tp 4 --moe-shared-expert-intermediate-size 6", "moe-shared-expert-intermediate-size 6 must be",
     "size 4; try --moe-shared-expert-intermediate-size 8"),
    (1, f"{MOE} --moe-router-score-function sigmoid --moe-router-pre-softmax",
     "--moe-router-pre-softmax needs --moe-router-score-function softmax to have an effect"),
    *((1, f"{MOE} {flag}", f"{flag.split('=')[0].split()[0]} is refused, because no token is dropped",
       "the layout would change the loss; leave it out")
      for flag in ("--moe-expert-capacity-factor 1.25", "--moe-expert-capacity-factor=2",
                   "--moe-token-drop-policy probs", "--moe-pad-expert-input-to-capacity")),
    # the batch
    (3, "--pp 1", "global-batch-size 16", "4 x 3 = 12", "try --global-batch-size 24"),
    (4, "--tp 1 --pp 1 --micro-batch-size 3", "global-batch-size 16", "3 x 4 = 12", "try --global-batch-size 24"),
    (4, "--micro-batch-size 1 --slices 2", "slices 2", "micro-batch-size 1", "--columns"),
    (1, "--columns 97", "columns 97 must be at most hidden-size 96", "try 2 or 4"),
    # sizes
    (1, "--global-batch-size 10000000000", "--global-batch-size", "at most 2147483647", "but is 10000000000"),
    (1, "--seq-length 64 --max-position-embeddings 63", "seq-length 64", "try --max-position-embeddings 64"),
    (4, "--vocab-size 256", "vocabulary of 257 tokens does not fit --vocab-size 256", "give at least 257"),
    (4, "--seq-length 20000", "train split", "has 11447 tokens", "seq-length + 1 = 20001", "lower --seq-length"),
    (4, "--num-layers 2000000000", "--num-layers must be at least 1 and at most 4096, but is 2000000000"),
    (1, "--hidden-size 4000000 --num-attention-heads 4", "would need at least", "more processes (--tp, --pp)"),
    (1, "--micro-batch-size 40000000 --global-batch-size 160000000", "GB of memory, and each has",
     "lower --micro-batch-size"),
    (1, "--eval-iters -1", "--eval-iters must be at least 0 and at most 2147483647", "but is -1"),
    # rates
    (1, "--lr -0.001", "--lr must be at least 0 and at most 3.40282e+38", "-0.001"),
    (1, "--lr inf", "--lr must be at least 0 and at most 3.40282e+38", "but is inf"),
    (1, "--min-lr 1", "min-lr 1.0 must be at most lr 0.004", "lower --min-lr, or leave it out"),
    (1, "--adam-eps 0", "--adam-eps must be above 0 and at most 3.40282e+38", "0.0"),
    (1, "--adam-eps 1e-50", "--adam-eps must be above 0", "but is 1e-50, which is 0 in fp32"),
    (1, "--adam-beta1 0.99999999999", "at least 0 and below 1, but is 0.99999999999, which is 1 in fp32"),
    (1, "--model nano-llama --rotary-base 1e-308", "--rotary-base must be at least 1", "but is 1e-308"),
    (1, "--layernorm-epsilon 1e300", "--layernorm-epsilon must be above 0 and at most 1, but is 1e+300"),
    (1, "--weight-decay 1e300", "--weight-decay must be at least 0 and at most 3.40282e+38, but is 1e+300"),
    (1, "--lr-warmup-fraction 1.5", "--lr-warmup-fraction must be at least 0 and at most 1, but is 1.5"),
    (1, "--temperature 1e-60", "--temperature must be at least 0", "but is 1e-60, which is 0 in fp32"),
    (1, "--loss-scale 1e-40", "--loss-scale must be at least 5.96046e-08 and below 3.40282e+38", "1e-40"),
    (1, "--adam-beta2 1", "--adam-beta2 must be at least 0 and below 1", "1.0"),
    (1, "--attention-dropout -0.1", "--attention-dropout must be at least 0 and below 1", "-0.1"),
    (1, "--loss-scale 0", "--loss-scale must be at least 5.96046e-08 and below 3.40282e+38", "0.0"),
    (1, "--fp16 --min-loss-scale 65536", "min-loss-scale 65536 must be at most initial-loss-scale 32768",
     "try --min-loss-scale 32768"),
    # flags that contradict each other
    (1, "--bf16 --dtype float32", "--bf16 and --dtype float32 contradict each other", "give one"),
    (1, "--bf16 --fp16", "--fp16 and --bf16 contradict each other", "give one"),
    # flags without effect
    (1, "--rotary-base 500000", "--rotary-base 500000.0 needs --position-embedding-type rope to have an effect",
     "but --position-embedding-type is learned_absolute; change that, or leave out --rotary-base"),
    (1, "--model nano-llama --rope-scaling-factor 2", "--rope-scaling-factor 2.0 needs --use-rope-scaling"),
    (1, "--use-rope-scaling", "--use-rope-scaling needs --position-embedding-type rope"),
    (1, "--add-qkv-bias", "--add-qkv-bias needs --disable-bias-linear"),
    (1, "--sequence-parallel", "--sequence-parallel needs --tp above 1", "--tensor-model-parallel-size is 1"),
    (1, "--checkpoint-in-cpu", "--checkpoint-in-cpu needs --recompute-granularity full to have an effect"),
    (1, "--optimizer lion --adam-beta2 0.9", "--adam-beta2 0.9 needs --optimizer adamw", "--optimizer is lion"),
    (1, "--lion-beta1 0.8", "--lion-beta1 0.8 needs --optimizer lion to have an effect", "--optimizer is adamw"),
    (1, "--lr-decay-style constant --min-lr 0", "--min-lr 0.0 needs --lr-decay-style cosine or linear"),
    (1, "--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy needs --fp16", "--dtype is float32", "change that"),
    (1, "--bf16 --hysteresis 3", "--hysteresis 3 needs --fp16 to have an effect, but --dtype is bfloat16"),
    (1, "--fp16 --loss-scale 8 --loss-scale-window 9", "needs no --loss-scale to have an effect", "is 8.0"),
    (1, "--dtype bfloat16 --no-bf16", "--no-bf16 and --dtype bfloat16 contradict each other", "give another --dtype"),
    (1, "--position-embedding-type none --reset-position-ids", "needs --position-embedding-type rope or learned"),
    (1, "--top-k 5 --sample-tokens 0", "--top-k 5 needs --sample-tokens above 0 to have an effect", "is 0"),
    (1, "--top-k 5 --temperature 0 --sample-tokens 9", "--top-k 5 needs --temperature above 0 to have an effect"),
    (1, "--model nano-moe --ffn-hidden-size 48 --moe-ffn-hidden-size 16", "--ffn-hidden-size 48 needs --moe-layer-freq "
     "above 1 or no --moe-ffn-hidden-size"),
    (1, "--compile-backend aot_eager", "--compile-backend aot_eager needs --compile to have an effect"),
    (1, f"--load {STEP} --init-method-std 0.1", "--init-method-std 0.1 needs random initial weights", "--load is"),
    (1, "--finetune", "--finetune needs a checkpoint to take the weights from", "add --load FOLDER"),
    (1, "--trace 5", "--trace must be FIRST:LAST", "but is 5;", "try --trace 10:12"),
    (1, "--trace 5:2", "--trace must be FIRST:LAST", "but is 5:2;", "try --trace 10:12"),
    (1, "--trace 5:201", "--trace 5:201 must not go beyond --train-iters 200", "lower LAST, or raise --train-iters"),
    # names
    (1, "--model gpt5", "--model: invalid choice: 'gpt5'", "gpt2-xl", "--help lists every flag"),
    (4, "--dtype float8", "--dtype", "'float8'", "float32", "bfloat16", "float64"),
    (4, "--schedule zigzag", "--schedule", "'zigzag'", *SCHEDULES),
    (1, "--zero-stage 3", "--zero-stage", "3", "0, 1"),
    (1, "--optimizer abacus", "--optimizer", "'abacus'", *OPTIMIZERS),
    (1, "--normalization abnormal", "--normalization", "'abnormal'", *NORMALIZATIONS),
    (1, "--device tpu", "--device", "'tpu'", "cpu", "cuda"),
    (1, "--lr-decay-style step", "--lr-decay-style", "'step'", "cosine", "linear"),
    (4, "--tensor-parallel 2", "unrecognized arguments: --tensor-parallel 2", "--help lists every flag"),
    (1, "--num-layer 3", "--num-layer 3", "--help lists every flag"),
    (1, "gpt2", "gpt2", "--help lists every flag"),
    (1, "--seq-length twelve", "--seq-length", "'twelve'", "--help lists every flag"),
    (1, "--seq-length", "--seq-length: expected one argument", "--help lists every flag")]]

TABLE += [Bad(flags, says, command="nanodomino.generate") for flags, *says in [
    ("--load run --temperature -1", "--temperature must be at least 0 and at most 3.40282e+38, but is -1.0"),
    ("--load run --max-tokens -1", "--max-tokens must be at least 0 and at most 2147483647, but is -1"),
    ("--load run --num-samples 0", "--num-samples must be at least 1 and at most", "but is 0"),
    ("--load run --prompt FILE:nowhere", "--prompt nowhere can't be read (No such file", "give a text file that"),
    ("--load run --prompt \udcff", "--prompt must be UTF-8 text", "convert it"),
    ("--load run --max-token 9", "unrecognized arguments: --max-token 9", "--help lists every flag"),
    ("--load run --device cuda", "--device cuda needs a GPU that torch can see, and there is none", "try --device cpu"),
    ("--load ''", "--load must not be empty, but is ''", "give a value, or leave it out"),
    ("--load run --data-path=", "--data-path must not be empty", "give a value, or leave it out"),
    ("--prompt def", "the following arguments are required: --load", "--help lists every flag"),
    ("--load run --data-path nowhere", "there is no data folder nowhere", "data/prepare.py --output nowhere")]]

TABLE += [Bad(flags, says, command="nanodomino.checkpoint", processes=(1,)) for flags, *says in [
    ("", "the following arguments are required: verify | export", "--help lists every flag"),
    ("verify", "the following arguments are required: DIR", "--help lists every flag"),
    ("export nowhere out.pt", "there is no folder nowhere to load from", "give a checkpoint or the folder of a run"),
    (f"export {STEP} {STEP}/manifest.json", "would lie in a checkpoint", "choose another folder"),
    (f"export {STEP} {STEP}/out.pt", "would lie in a checkpoint", "choose another folder"),
    (f"export {STEP} data", "data can't be written (Is a directory)", "choose another"),
    (f"export {STEP} /proc/out.pt", "/proc/out.pt can't be written (No such file or directory)", "choose another")]]

TABLE += [Bad(flags, says, command="data/prepare.py", processes=(1,)) for flags, *says in [
    ("--input none*.txt --output out", "no file or folder matches the input none*.txt", "check the path"),
    ("--input data --output data/meta.json", "meta.json is a file", "choose another --output"),
    ("--input data --output /proc/out", "cannot prepare /proc/out", "choose another --input or --output"),
    ("--input data --output out --split 1,2", "--split must be three numbers", "but is 1,2", "try 949,50,1"),
    ("--input data --output out --split 1,nan,1", "--split must be three numbers", "but is 1,nan,1"),
    ("--input data --output out --split 1e308,1e308,1e308", "--split must be three numbers"),      # the sum is infinite
    ("--input data --output " + 300 * "o", "File name too long", "choose another"),
    ("--input data --output out --tokenizer word", "unknown tokenizer 'word'", "try one of byte, gpt2"),
    ("--input data/meta.json --output data --overwrite", "the input", "lies in the output", "choose another --output"),
    ("--input data --output ''", "--output must not be empty", "give a value, or leave it out"),
    ("--outputs out", "unrecognized arguments: --outputs out", "--help lists every flag"),
    ("--verify data --input data", "--verify only checks a folder, so --input has no effect", "leave out --verify or"),
    ("--verify run", "run is not a folder made by data/prepare.py", "give another folder")]]

TABLE += [Bad(flags, [says, "--help lists every flag"], command=f"nanodomino.{name}", processes=(1,))
          for name, flags, says in [("plot", "run --outputs x.svg", "unrecognized arguments: --outputs x.svg"),
                                    ("plot", "", "the following arguments are required: RUN"),
                                    ("timeline", "x.json", "the following arguments are required: --output"),
                                    ("timeline", "x.json --output x.svg --step one", "invalid int value: 'one'")]]


# ---- files

def write(name: str, content: bytes):
    """Replace a file or folder by a file with this content."""
    def change(folder):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (folder / name).write_bytes(content)
    return change


def cut(name: str, count: int):
    """Keep a file's first `count` bytes; if negative, all but the last ones."""
    return lambda folder: write(name, (folder / name).read_bytes()[:count])(folder)


def remove(name: str):
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def link_to(name: str, target: str):
    """Replace a file or folder by a symbolic link."""
    def change(folder):
        if (folder / name).exists():
            remove(name)(folder)
        (folder / name).symlink_to(target)
    return change


def named_pipe(name):
    """Replace a file by a named pipe: opening it would wait forever."""
    def change(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    return change


def change_meta(**changes):
    """Change entries of meta.json. None: remove."""
    def change(folder):
        meta = json.loads((folder / "data/meta.json").read_text()) | changes
        write(META, json.dumps({key: value for key, value in meta.items() if value is not None}).encode())(folder)
    return change


def shorten(split: str, tokens: int):
    """Make the split this short, in its file and in meta.json."""
    def change(folder):
        cut(f"data/{split}.bin", 2 * tokens)(folder)
        counts = json.loads((folder / "data/meta.json").read_text())["tokens"]
        change_meta(tokens={**counts, split: tokens})(folder)
        correct_samples(folder)
    return change


def correct_samples(folder):
    """Let meta.json describe the files that are there."""
    change_meta(sample_sha256={split: sample_sha256(folder / f"data/{split}.bin") for split in SPLITS})(folder)


TABLE += [Bad(f"--input data --output {output}", ["cannot prepare", "choose another"], link_to("loop", "loop"),
              "that links to itself", "data/prepare.py", (1,)) for output in ("loop", "loop/out")]
META, BESIDE = "data/meta.json", "a file beside it"
TABLE += [Bad("--sample-tokens 5", says, damage, f"with {what}") for what, damage, *says in [
    ("no data folder", remove("data"), "there is no data folder data", "make one with data/prepare.py --output data"),
    ("a file for a folder", write("data", b"text"), "data is a file, not a data folder",
     "data/prepare.py --input data"),
    ("no meta.json", remove(META), "data is not a folder made by data/prepare.py", "give another folder"),
    ("half a meta.json", cut(META, 99), "data/meta.json is damaged", PREPARE_AGAIN),
    ("an empty meta.json", write(META, b""), "meta.json is damaged", PREPARE_AGAIN),
    ("bytes for a meta.json", write(META, b"\xff\x00"), "data/meta.json is damaged", PREPARE_AGAIN),
    ("a list for a meta.json", write(META, b"[1, 2]"), "meta.json is damaged", PREPARE_AGAIN),
    ("an endless meta.json", write(META, 100_000 * b"["), "meta.json is damaged", PREPARE_AGAIN),
    ("another program's data", change_meta(format="megatron"), "meta.json is of format 'megatron'", PREPARE_AGAIN),
    ("no end-of-text", change_meta(end_of_text=None), "meta.json is damaged (KeyError: 'end_of_text')", PREPARE_AGAIN),
    ("one split", change_meta(tokens=dict(train=5)), "meta.json is damaged (KeyError: 'valid')", PREPARE_AGAIN),
    ("an unknown tokenizer", change_meta(tokenizer="llama"), "tokenizer 'llama'", "byte, gpt2", PREPARE_AGAIN),
    ("an unknown dtype", change_meta(dtype="float32"), "meta.json is damaged", "float32", PREPARE_AGAIN),
    ("another vocabulary", change_meta(vocab_size=300), "vocabulary of 300", "byte has 257", PREPARE_AGAIN),
    ("no vocabulary", change_meta(vocab_size=0), "end_of_text 256 and vocab_size 0", PREPARE_AGAIN),
    ("a negative vocabulary", change_meta(vocab_size=-257), "vocab_size -257", PREPARE_AGAIN),
    ("an infinite vocabulary", change_meta(vocab_size=float("inf")), "meta.json is damaged", PREPARE_AGAIN),
    ("a vocabulary beyond uint16", change_meta(vocab_size=70_000), "vocab_size <= 65536", "vocab_size 70000",
     PREPARE_AGAIN),
    ("end-of-text outside", change_meta(end_of_text=257), "end_of_text 257 and vocab_size 257", PREPARE_AGAIN),
    ("a number for a file's name", change_meta(tokenizer_file=7), "gives '7' as tokenizer_file", BESIDE, PREPARE_AGAIN),
    ("a folder for a file", change_meta(tokenizer_file=".."), "as tokenizer_file", BESIDE, PREPARE_AGAIN),
    ("an entropy that is no number", change_meta(unigram_entropy=float("nan")), "entropies of nan", "must be finite",
     PREPARE_AGAIN),
    ("an infinite entropy", change_meta(bigram_entropy=float("inf")), "must be finite", PREPARE_AGAIN),
    ("a negative count", change_meta(tokens=dict(train=-1, valid=9, test=9)), "should hold -1 tokens", PREPARE_AGAIN),
    ("no train.bin", remove("data/train.bin"), "train.bin is missing", PREPARE_AGAIN),
    ("no valid.bin", remove("data/valid.bin"), "data/valid.bin is missing", PREPARE_AGAIN),
    ("an empty train.bin", cut("data/train.bin", 0), "train.bin should hold", "has 0 bytes", PREPARE_AGAIN),
    ("half a token too few", cut("data/train.bin", -1), "tokens in 22894 bytes, but has 22893", PREPARE_AGAIN),
    ("other text", write("data/train.bin", 22894 * b"\0"), "train.bin holds other tokens than those", PREPARE_AGAIN),
    ("a truncated valid.bin", cut("data/valid.bin", -2), "valid.bin should hold", PREPARE_AGAIN),
    ("no training text", shorten("train", 0), "train split", "has 0 tokens", "+ 1 = 129", "lower --seq-length"),
    ("one token too few", shorten("train", 128), "train split", "has 128 tokens", "+ 1 = 129", "lower --seq-length")]]
TABLE += [Bad("--data-path " + 5000 * "d", ["there is no data folder ddd"])]


def flip(name: str, after=None):
    """Flip one bit, in the middle of a file or after these bytes."""
    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[content.index(after) + len(after) if after else len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    return change


def forge(change=leave, **changes):
    """Change a checkpoint and its manifest (config: settings to change; None: remove), and correct the checksums."""
    def forged(folder):
        change(folder)
        path = folder / STEP / "manifest.json"
        manifest = json.loads(path.read_text())
        files = {name: file_digest(folder / STEP / name) for name in manifest["files"]}
        manifest |= dict(files=files) | changes | dict(config=manifest["config"] | changes.get("config", {}))
        path.write_text(manifest_text({name: value for name, value in manifest.items() if value is not None}))
    return forged


MANIFEST, INDEX, SHARD = f"{STEP}/manifest.json", f"{STEP}/index.json", f"{STEP}/rank-00000.bin"

TABLE += [Bad(f"--load {STEP}", says, damage, f"with {what}") for what, damage, *says in [
    ("no manifest", remove(MANIFEST), "is not a complete checkpoint", ANOTHER),
    ("an empty manifest", write(MANIFEST, b""), "is not a complete checkpoint", ANOTHER),
    ("a flipped bit in its manifest", flip(MANIFEST, after=b'"num_layers": '), "manifest.json is damaged", ANOTHER),
    ("a pipe for a manifest", named_pipe(MANIFEST), "not a regular file", ANOTHER),
    ("no list of files", forge(files=None), "manifest.json lacks files", ANOTHER),
    ("a list for its table of files", forge(files=["a"]), "manifest.json lacks files", ANOTHER),
    ("no files", forge(files={}), "does not list index.json", ANOTHER),
    ("a file elsewhere", forge(files={"../../data/meta.json": {"size": 1, "sha256": ""}}), "files beside it", ANOTHER),
    ("an absolute file", forge(files={"/etc/passwd": {"size": 1, "sha256": ""}}), "files beside it", ANOTHER),
    ("a file without a size", forge(files={"index.json": 7}), "must list files beside it", ANOTHER),
    ("a step below 0", forge(step=-5), "must be from 0 to", ANOTHER),
    ("an endless step", forge(adam_steps=10**30), "must be from 0 to", ANOTHER),
    ("a later format", forge(format="nanodomino-checkpoint-9"), "has format 'nanodomino-checkpoint-9'",
     "use the version that wrote it"),
    ("an endless number of layers", forge(config=dict(num_layers=10**9)), "manifest says num_layers 1000000000",
     ANOTHER),
    ("a missing file", remove(SHARD), "rank-00000.bin is missing", ANOTHER),
    ("a truncated file", cut(f"{STEP}/rank-00001.bin", -1), "rank-00001.bin should have", ANOTHER),
    ("a flipped bit in a file", flip(SHARD), "rank-00000.bin is damaged", ANOTHER),
    ("a flipped bit in its index", flip(INDEX), "index.json is damaged", ANOTHER)]]
TABLE += [Bad(f"export {STEP} out.pt", says, forge(damage), f"with {what}", "nanodomino.checkpoint", (1,))
          for what, damage, *says in [
    ("half an index", cut(INDEX, -40), "index.json is not an index of tensors", ANOTHER)]]
TABLE += [Bad(flags, says, damage, what) for flags, what, damage, *says in [
    ("--load nowhere", "", leave, "there is no folder nowhere to load from",
     "give a checkpoint or the folder of a run"),
    ("--load data/meta.json", "", leave, "data/meta.json is a file, not a folder to load from"),
    ("--load data", "", leave, "data is not a complete checkpoint", ANOTHER),
    ("--load " + "a" * 5000, "", leave, "aaa: File name too long", "choose another file or folder"),
    ("--load run", "with no intact checkpoint", flip(SHARD), "holds no intact checkpoint", "give another"),
    (f"--load {STEP} --hidden-size 32", "", leave, "hidden-size 16, but this run has 32", "go back to the old value"),
    (f"--load {STEP} --vocab-size 300", "", leave, "vocab-size 257, but this run has 300", "go back to the old value"),
    ("--run-dir data/meta.json", "", leave, "--run-dir data/meta.json is a file", "choose another name"),
    ("--run-dir data/meta.json/run", "", leave, "can't be written to (Not a directory)", "choose another"),
    ("--run-dir data", "that is no run", leave, "--run-dir data holds no run, but other files (meta.json, test.bin, "
     "train.bin ...); choose a new or an empty folder"),
    ("--run-dir run", "with a device for its settings", link_to("run/config.json", "/dev/zero"),
     "run holds a config.json that is not a regular file", "remove it, or choose another folder"),
    ("--run-dir run", "with a pipe for its settings", named_pipe("run/config.json"),
     "run holds a config.json that is not a regular file", "remove it, or choose another folder"),
    ("--run-dir run", "with a pipe for its metrics", named_pipe("run/metrics.jsonl"),
     "run holds a metrics.jsonl that is not a regular file", "remove it, or choose another folder"),
    ("--tensorboard-dir data/meta.json/board", "", leave,
     "--tensorboard-dir data/meta.json/board can't be written to (Not a directory)", "choose another folder"),
    ("--run-dir " + 5000 * "r", "", leave, "(File name too long)", "choose another folder"),
    ("--run-dir run --seed 5", "", leave, "made with seed 1234, but this run has 5", "start another run"),
    ("--run-dir run --seed 5", "killed before its first checkpoint", remove("run/checkpoints"),
     "--run-dir run was made with seed 1234, but this run has 5", "start another run"),
    ("--run-dir run", "with a damaged checkpoint", flip(SHARD), "holds no intact one now (1 damaged)",
     "move the folder away to start over"),
    ("--run-dir run", "without its checkpoint", remove(STEP), "no intact one now (0 damaged)",
     "restore a checkpoint"),
    ("--run-dir run", "with checkpoints on a missing disk", link_to("run/checkpoints", "not mounted"),
     "run can't be written to (File exists)", "choose another folder"),
    ("--run-dir run", "with a file named checkpoints", write("run/checkpoints", b""),
     "run can't be written to (File exists)", "choose another folder")]]
TABLE += [Bad(flags, says, damage, what, "nanodomino.generate") for flags, what, damage, *says in [
    ("--load nowhere", "", leave, "there is no folder nowhere to load from"),
    ("--load run", "with a truncated file", cut(f"{STEP}/rank-00001.bin", -1), "holds no intact checkpoint"),
    ("--load run --data-path data", "with a larger tokenizer", change_meta(vocab_size=300),
     "tokenizer of data has 300 tokens, but the model has only 257", "give the data folder that the model was trained"),
    ("--load run", "with settings of a later version", forge(config=dict(rotary=True)),
     "settings that this version does not know (rotary)", "correct the name, or use the version that wrote the file"),
    ("--load run", "without its training text", forge(config=dict(data_path="moved/data")),
     "the tokenizer is stored with the training data, but the folder moved/data no longer exists",
     "new path as --data-path")]]


# ---- in this process

class ReachedTheGroup(Exception):
    """The input was accepted: the next thing would be to communicate with other ranks."""


@pytest.fixture(scope="module")
def folder_and_limit(fork_server, tmp_path_factory):
    """(a folder with data/ and run/, LIMIT on this machine; a run of two steps takes two seconds if it is idle)"""
    folder = tmp_path_factory.mktemp("intact") / "folder"
    folder.mkdir()
    make_corpus(folder).rename(folder / "data")
    flags = [*TINY, "--num-attention-heads", "4", "--data-path", "data", "--run-dir", "run", "--train-iters", "2"]
    ended = fork_server.launch("train.py", [(flags, place) for place in launcher_environments(2)], folder, 120)
    assert ended.code == 0 and (folder / STEP).is_dir(), ended.output
    return folder, max(LIMIT, 10 * ended.seconds)


@pytest.fixture
def folder(folder_and_limit, tmp_path, monkeypatch):
    """A copy of the folder, in which this process stands."""
    copy = Path(shutil.copytree(folder_and_limit[0], tmp_path / "folder"))
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def refuse(folder, monkeypatch):
    """refuse(flags, n, command): the sentence of the command on n processes. Raises ReachedTheGroup without one."""
    def reached(*_):
        raise ReachedTheGroup

    for module in (train, nanodomino.generate.__main__):
        monkeypatch.setattr(module, "start_world", reached)
    for name in ("lock_folder", "tolerate_closed_output"):      # what lasts as long as the process
        monkeypatch.setattr(f"nanodomino.run.run_folder.{name}", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def refuse(flags, n=1, command="train.py"):
        main, arguments = COMMANDS[command], shlex.split(flags) if isinstance(flags, str) else flags
        if command == "train.py":
            arguments = ["--data-path", "data", "--device", "cpu", *arguments]
        sentences = []
        for rank in sorted({n - 1, 0}, reverse=True):           # rank 0 alone looks for folders
            try:
                if command in ("train.py", "nanodomino.generate"):
                    main(arguments, LaunchInfo(rank, n, rank, n, launched=n > 1))
                elif command == "data/prepare.py":
                    monkeypatch.setattr(sys, "argv", [command, *arguments])
                    main()
                else:
                    main(arguments)
                pytest.fail("it was accepted")
            except (UserError, OSError) as error:
                sentences.append(sentence_and_code(error)[0])
            except ReachedTheGroup:
                if rank == 0:
                    raise
        assert len(set(sentences)) == 1 and "\n" not in sentences[0], sentences
        return sentences[0]

    return refuse


@pytest.mark.parametrize("n, flags", [
    (1, ""), (4, ""), (8, ""), (8, "--tp 8 --slices 4"), (8, "--pp 8"), (8, "--dp 2"), (8, "--tp 1 --pp 1 --dp 8"),
    (1, "--slices 4"), (1, "--columns 96"), (1, "--fp16 --dtype float16 --loss-scale 8"), (1, "--vocab-size 300"),
    (1, "--trace 5:5"), (1, "--seed 2147483647"), (2, "--run-dir run"), (4, f"--load {STEP}"),
    (1, "--eval-iters 0 --sample-tokens 0 --seed 0 --clip-grad 0 --lr 0"),
    (1, "--rotary-base 10000 --no-sequence-parallel --adam-beta1 0.9 --optimizer lion"),    # without effect, but true
    (1, "--lr-warmup-fraction 1 --layernorm-epsilon 1")])
def test_good_input_reaches_the_process_group(refuse, n, flags):
    """Otherwise every test below would pass even if everything were refused."""
    with pytest.raises(ReachedTheGroup):
        refuse(flags, n)


def test_one_sample_of_training_text_is_enough(refuse, folder):
    """The neighbour of 'one token too few'. A validation split that is too short is skipped, not refused."""
    shorten("train", 129)(folder)
    shorten("valid", 5)(folder)
    with pytest.raises(ReachedTheGroup):
        refuse("")


@pytest.mark.parametrize("bad", TABLE, ids=str)
def test_bad_input_is_refused_with_the_rule_the_numbers_and_a_fix(refuse, folder, bad):
    """Before a process group forms, and without touching the run that is there."""
    bad.damage(folder)
    path = folder / "run/metrics.jsonl"
    metrics = path.is_file() and path.read_bytes()
    for n in bad.processes:
        sentence = refuse(bad.flags.format(n=n), n, bad.command)
        assert all(part.format(n=n) in sentence for part in bad.says), sentence
        assert any(fix in sentence for fix in ("; ", "(choose from", "must be")), f"no fix: {sentence}"
    assert (path.is_file() and path.read_bytes()) == metrics


def flags_of(type):
    return [flag_name(flag.name) for flag in setting.flag_settings(Config) if flag.type is type]


@pytest.mark.parametrize("flag", flags_of(int))
def test_no_integer_may_be_negative_huge_or_something_else(refuse, flag):
    """For every flag of Config, also future ones: a size of 10^30 would overflow deep inside the run."""
    for value in ("-1", "1" + 30 * "0", "", "1.5", "1e3", "nan"):
        sentence = refuse([f"{flag}={value}"])
        assert flag in sentence and (value in sentence if value else "''" in sentence), sentence


@pytest.mark.parametrize("flag", flags_of(float))
def test_no_float_may_be_negative_infinite_or_nan(refuse, flag):
    """NaN compares false with everything: a check written as `value < 0` would accept it."""
    for value, shown in [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("-1", "-1.0"), ("1e400", "inf"),
                         ("", "''"), ("high", "'high'")]:
        sentence = refuse([f"{flag}={value}"])
        assert flag in sentence and shown in sentence, sentence


@pytest.mark.parametrize("flag", flags_of(str))
def test_no_name_may_be_empty(refuse, flag):
    """`--data-path "$DATA"` with DATA unset must not train on other data, nor `--run-dir ""` fill this folder."""
    assert flag in refuse([f"{flag}="])


@pytest.mark.parametrize("gpus, n, flags, says", [
    (0, 1, "--device cuda", ("--device cuda needs a GPU", "there is none", "try --device cpu")),
    (2, 4, "--device cuda", ("4 processes on this host", "there are 2", "--nproc_per_node 2", "--device cpu")),
    (3, 4, "--device auto", ("4 processes on this host", "there are 3", "--nproc_per_node 3", "--device cpu"))])
def test_two_ranks_never_share_a_gpu(refuse, monkeypatch, gpus, n, flags, says):
    """NCCL would hang."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sentence = refuse(flags, n)
    assert all(part in sentence for part in says), sentence


# ---- the launcher's environment

LAUNCHED = dict(zip(LAUNCHER, ("1", "4", "1", "4", "localhost", "29500"), strict=True))


@pytest.mark.parametrize("changes, says", [
    (dict(MASTER_ADDR=None), ("has RANK", "but not MASTER_ADDR;", TORCHRUN)),
    (dict(MASTER_ADDR=""), ("not MASTER_ADDR", TORCHRUN)),
    (dict(MASTER_PORT=None), ("but not MASTER_PORT;", TORCHRUN)),
    (dict(WORLD_SIZE=None, LOCAL_WORLD_SIZE=None), ("has RANK, LOCAL_RANK", "not WORLD_SIZE, LOCAL_WORLD_SIZE")),
    (dict(RANK=""), ("has WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE but not RANK", TORCHRUN)),
    (dict(RANK="one"), ("RANK must be a whole number, but the environment has 'one'", TORCHRUN)),
    (dict(RANK="-1"), ("RANK must be a whole number", "'-1'")),
    (dict(RANK="1.0"), ("RANK must be a whole number", "'1.0'")),
    (dict(RANK="²"), ("RANK must be a whole number", "'²'")),        # a digit for str.isdigit(), but not for int()
    (dict(LOCAL_RANK="x"), ("LOCAL_RANK must be a whole number", TORCHRUN)),
    (dict(MASTER_PORT="http"), ("MASTER_PORT must be a whole number", "'http'")),
    (dict(MASTER_PORT="99999"), ("MASTER_PORT must be from 1 to 65535, but", "has 99999", TORCHRUN)),
    (dict(RANK="4"), ("RANK 4 must be below WORLD_SIZE 4", TORCHRUN)),
    (dict(LOCAL_RANK="7"), ("LOCAL_RANK 7 below LOCAL_WORLD_SIZE 4", TORCHRUN)),
    (dict(WORLD_SIZE="0"), ("RANK 1 must be below WORLD_SIZE 0", TORCHRUN))], ids=str)
def test_an_incomplete_launch_environment_is_refused(changes, says):
    """A cluster or a shell left it. If the rest were guessed, every rank could believe to be rank 0."""
    environment = {name: value for name, value in {**LAUNCHED, **changes}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        read_launch_environment(environment)
    assert all(part in str(caught.value) for part in says), str(caught.value)


def test_a_complete_launch_environment_and_none_at_all_are_accepted():
    """torchrun always counts its restarts. If 0 were taken for a restart, a new run could continue in an old folder."""
    for restarts, restarted in (({}, False), ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
                                ({"TORCHELASTIC_RESTART_COUNT": "2"}, True)):
        assert read_launch_environment(LAUNCHED | restarts) == LaunchInfo(1, 4, 1, 4, launched=True,
                                                                          restarted=restarted)
    assert read_launch_environment({}) == read_launch_environment(dict(MASTER_ADDR="localhost")) == LaunchInfo()


@pytest.mark.parametrize("rank, error, waits, start", [
    (0, UserError("heads 3; try 4"), False, "error: heads 3; try 4\n"),
    (0, OSError(5, "bad disk", "data"), False, "error: data: bad disk; fix that, or choose another file or folder\n"),
    (3, UserError("heads 3; try 4"), True, "error: heads 3; try 4\n"),
    (2, ValueError("mine"), False, "rank 2 failed: ValueError: mine\n"),
    (2, RuntimeError("Connection closed by peer"), True, "rank 2 lost its peers: "),
    (2, RuntimeError("writev: Broken pipe"), True, "rank 2 lost its peers: "),
    (2, RuntimeError("NCCL error: remote process exited"), True, "rank 2 lost its peers: ")], ids=str)
def test_a_rank_whose_error_is_probably_an_echo_waits_before_it_prints(monkeypatch, capsys, rank, error, waits, start):
    """But it does print: a token id outside the vocabulary is found by one replica, which may not hold rank 0."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        report_and_exit(LaunchInfo(rank, 4, rank, 4, launched=True), error)
    assert caught.value.code != 0 and bool(slept) == waits and all(seconds <= 13 for seconds in slept)
    last = capsys.readouterr().err.splitlines(keepends=True)[-1]        # after a traceback, if there is one
    assert last.startswith(start)


# ---- between processes

# {n} is the number of processes, {more} one more, {port} a port in use, {rank} (in flags) the rank.
PROCESS_TABLE = [
    Bad("--slices 5 --micro-batch-size 4", ["slices 5 must be at most micro-batch-size 4", "try --slices 4"]),
    Bad("--run-dir data/meta.json", ["--run-dir data/meta.json is a file", "choose another name"]),     # rank 0 alone
    Bad("--load run --draft --temperature 0", ["--draft needs a depth", "leave out"], command="nanodomino.generate"),
    Bad(f"--load {STEP}", ["after the end of rank-00000.bin", ANOTHER],
        forge(write(SHARD, b"x" * 100)), "with a shorter file"),
    Bad(f"--load {STEP} --num-layers 3 --tp {{n}}", ["holds 2 layers, but its manifest says num_layers 3", ANOTHER],
        forge(config=dict(num_layers=3)), "without a layer"),
    Bad("--seq-length 16", ["token id 65535, outside the vocabulary of 257", PREPARE_AGAIN],
        lambda folder: [change(folder) for change in (write("data/train.bin", 22894 * b"\xff"), correct_samples)],
        "with tokens outside the vocabulary"),
    *(Bad(flags, ["fff: File name too long", "choose another file or folder"],
          forge(files={name: {"size": 1, "sha256": ""} for name in (5000 * "f", "index.json")}),
          "with a file with a long name", command, (n,), code=1)
      for command, flags, n in (("train.py", f"--load {STEP}", 4), ("nanodomino.checkpoint", f"export {STEP} out", 1))),
    Bad("verify nowhere", ["nowhere is not a complete checkpoint", ANOTHER], command="nanodomino.checkpoint",
        processes=(1,)),
    Bad("nonsense", ["there is no question 'nonsense'", "try one of overlap"], command="bench.py", processes=(1,)),
    Bad("--timeout 1", ["has WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE but not RANK"], environment=dict(RANK=None)),
    Bad("--timeout 1", ["MASTER_PORT {port}", "choose a free port"], environment=dict(MASTER_PORT="{port}")),
    Bad("--timeout 1", ["cannot connect at MASTER_ADDR nobody.invalid",
                        "choose a free port on a host that every process can reach"],
        environment=dict(MASTER_ADDR="nobody.invalid")),
    Bad("--timeout 1 --tp 1 --pp {more} --num-layers 5",
        ["the {more} processes cannot connect", "and start all {more}"], environment=dict(WORLD_SIZE="{more}")),
    Bad("--timeout 9", ["GLOO_SOCKET_IFNAME=dead0, which does not exist", "unset it, or name one of lo"],
        environment=dict(GLOO_SOCKET_IFNAME="dead0")),
    Bad("--seed {rank}", ["rank 1 has a different seed than rank 0", "give all hosts the same flags"],
        processes=(4,))]


@pytest.mark.parametrize("bad, n", [
    pytest.param(bad, n, id=f"{bad} {''.join(bad.environment)} on {n}",
                 marks=pytest.mark.exhaustive if n < max(bad.processes) else [])
    for bad in PROCESS_TABLE for n in bad.processes])
def test_processes_end_soon_with_one_sentence(fork_server, folder_and_limit, folder, bad, n):
    """Whether all ranks find the mistake, or one finds it while the others wait for it in a collective."""
    bad.damage(folder)
    places = launcher_environments(n) if n > 1 or bad.environment else [{}]
    base = [*TINY, "--num-attention-heads", "4", "--data-path", "data", "--train-iters", "3"]
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        numbers = dict(n=n, more=n + 1, port=in_use.getsockname()[1])
        ranks = [((base if bad.command == "train.py" else []) + shlex.split(bad.flags.format(rank=rank, **numbers)),
                  {name: value.format(**numbers) for name, value in (place | bad.environment).items() if value})
                 for rank, place in enumerate(places)]
        ended = fork_server.launch(bad.command, ranks, folder, folder_and_limit[1])
    assert not ended.late and ended.code == bad.code and "Traceback" not in ended.output, ended
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert all(part.format(**numbers) in sentence for part in bad.says), sentence


@pytest.mark.parametrize("command, flags, n, says", [
    ("train.py", "--help", 4, "usage: train.py"), ("data/prepare.py", "--verify data", 1, "data is intact"),
    ("nanodomino.checkpoint", f"verify {STEP}", 1, "is intact: step 2"),
    ("nanodomino.generate", "--load run --max-tokens 3 --prompt def", 1, "def")], ids=lambda value: str(value)[:20])
def test_good_input_ends_with_exit_code_0_and_one_answer(fork_server, folder_and_limit, command, flags, n, says):
    environments = launcher_environments(n) if n > 1 else [{}]
    ended = fork_server.launch(command, [(shlex.split(flags), place) for place in environments], *folder_and_limit)
    assert (ended.code, ended.output.count(says)) == (0, 1) and "error" not in ended.output, ended.output


# ---- what a shell sees

def in_shell(folder, *flags, processes=0):
    """The finished `python train.py FLAGS`, or torchrun with so many processes."""
    script = str(Path(train.__file__).resolve())
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    return subprocess.run([sys.executable, *launcher, script, *flags], env=environment, cwd=folder,
                          capture_output=True, text=True, timeout=60)


def test_one_process_prints_one_sentence_and_makes_no_folder(fork_server, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    ended = fork_server.launch("train.py", [(["--slices", "0"], {})], folder, LIMIT)
    assert (ended.code, ended.output) == (2, "error: --slices must be at least 1 and at most 2147483647, but is 0\n")
    assert not list(folder.iterdir())


@pytest.mark.exhaustive
def test_the_sentence_goes_to_standard_error(tmp_path):
    done = in_shell(tmp_path, "--slices", "0")
    assert (done.returncode, done.stdout, done.stderr) == (
        2, "", "error: --slices must be at least 1 and at most 2147483647, but is 0\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_four_processes_under_torchrun_print_one_sentence_last(folder):
    """Rank 0 alone finds the mistake, while the others already wait for it. torchrun's report must not bury it."""
    done = in_shell(folder, "--data-path", "data", "--device", "cpu", "--run-dir", "data/meta.json", processes=4)
    output, sentence = done.stdout + done.stderr, "--run-dir data/meta.json is a file; choose another name"
    assert done.returncode != 0 and output.count("error: ") == 1 and f"error: {sentence}\n" in output, output
    assert sentence in [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert 'train.py"' not in output and "failed:" not in output, output
    assert sorted(path.name for path in folder.iterdir()) == ["data", "run", "text.txt"]
