"""The checks of `bench.py gpu` that train, and the list of all checks.

A check takes a Run and adds its numbers. It raises UserError if the machine computes something wrong; on several ranks,
every rank must raise it. What the tests or other questions of bench.py already answer is started here as a command.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

import train
from benchmarks.gpu_kernels import (Run, attention, documents, expert_matmuls, fp8_matmuls, machine,
                                    weight_gradients)
from benchmarks.runner import BENCH, RandomTokens, gathered
from nanodomino.comm import scatter_and_gather
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.errors import require
from nanodomino.mesh import make_mesh
from nanodomino.options.fp8 import RECIPES
from nanodomino.run.check_copies import checksum
from nanodomino.run.kernels import choose_kernels
from nanodomino.zero import ZeroOptimizer

LAUNCHES = [(dist, name) for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv")] + [
    (scatter_and_gather, name) for name in ("exchange", "native_reduce_scatter", "native_all_gather")]
SMALL = dict(num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250, micro_batch_size=4,
             make_vocab_size_divisible_by=64, lr_warmup_fraction=0.0, tensor_model_parallel_size=1,
             pipeline_model_parallel_size=1, dtype="bfloat16", bucket_size=20_000, compile=False)
TP2 = dict(tensor_model_parallel_size=2, slices=2)
# {feature: its settings on 2 ranks; on more, data parallelism takes the rest}
FEATURES = dict(
    slices=dict(TP2, columns=2), pipeline=dict(pipeline_model_parallel_size=2, schedule="zb-v"),
    experts=dict(num_experts=4, moe_ffn_hidden_size=128, disable_bias_linear=True, expert_model_parallel_size=2,
                 slices=2),
    sequence_parallel=dict(TP2, sequence_parallel=True, recompute_granularity="selective"), zero_2=dict(zero_stage=2),
    llama=dict(TP2, swiglu=True, position_embedding_type="rope", num_query_groups=2, qk_layernorm=True,
               recompute_granularity="full"),
    context=dict(context_parallel_size=2), context_a2a=dict(context_parallel_size=2, cp_comm_type="a2a"),
    documents=dict(TP2, reset_position_ids=True, reset_attention_mask=True), depths=dict(TP2, mtp_num_layers=1))


@dataclass(frozen=True)
class Check:
    """Says what a check needs. ranks: the possible numbers of processes, () for one without a process group; gpus:
    the number of GPUs; capability: a GPU's least compute capability; needs_gpu: whether it can't run on CPUs; quick:
    whether --quick includes it; limit: seconds."""
    part: str
    function: Callable[[Run], None]
    ranks: tuple = ()
    gpus: int = 1
    capability: tuple = (0, 0)
    needs_gpu: bool = False
    quick: bool = True
    limit: int = 600


def built(run: Run, **settings):
    """Return (config, mesh, optimizer, stage, data) of this rank, warmed up. settings: replace those of SMALL."""
    config = Config(**dict(SMALL, device=run.device.type, global_batch_size=8 * run.world_size) | settings)
    config = config.resolve(run.world_size).with_device(run.device).with_vocabulary(config.vocab_size)
    choose_kernels(config, run.device)
    mesh = make_mesh(config.pp, config.dp, config.tp, run.device, **config.mesh_options,
                     thread_blocks=config.thread_blocks)
    model = train.model_builder(config, mesh)
    optimizer, stage = ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns, config.compiler)
    train.warm_up(stage, optimizer, config, mesh)
    return config, mesh, optimizer, stage, RandomTokens(config, run.device)


def same_bits(run: Run, name: str, disturbances, **settings) -> list[float]:
    """Train once within each of these context managers, from the same start. Returns the losses.
    Raises UserError on every rank unless losses and all ranks' weights are equal, bit for bit."""
    found = []
    for disturbance in disturbances:
        with disturbance:
            config, mesh, optimizer, stage, data = built(run, deterministic_mode=True, **settings)
            losses = [train.train_step(step, stage, optimizer, data, config, mesh).loss for step in (1, 2, 3)]
        found.append((losses, gathered([int(checksum(weight)) for weight in stage.model.parameters()])))
    require(all(one == found[0] for one in found), f"{name}: the losses {[losses for losses, _ in found]} or the "
            "weights of a rank differ, but each run must give the same bits")
    return losses


def features_here(run: Run) -> dict:
    """Return {feature: its settings}: all on GPUs, three on CPUs, one with --quick."""
    return dict(list(FEATURES.items())[:1 if run.quick else None if run.cuda else 3])


def features(run: Run):
    """Each feature in bfloat16 and fp8 is as close to fp32 as rounding allows, and its second run has the same bits."""
    for name, settings in features_here(run).items():
        expected = same_bits(run, name, [nullcontext()], **settings | dict(dtype="float32"))
        fp8 = RECIPES if run.has_fp8 and not run.quick and name != "experts" else ()      # experts have none
        for case, more in {"bf16": {}, **{each: dict(fp8_format="hybrid", fp8_recipe=each) for each in fp8}}.items():
            losses = same_bits(run, f"{name} {case}", [nullcontext(), nullcontext()], **settings, **more)
            error = run.numbers[f"{name} {case}"] = max(abs(a / b - 1) for a, b in zip(losses, expected))
            require(error <= 0.02, f"{name} {case}: losses {losses}, but {expected} in fp32; at most 2 % may differ")


@contextmanager
def delays(run: Run, seed: int):
    """Delay every launch of a collective by a random time. On GPUs the stream that launches it sleeps; the other ranks'
    collectives then wait for this rank's, while their own kernels go on. On CPUs the process sleeps."""
    draw = random.Random(seed)

    def late(launch, *arguments, **options):
        seconds = draw.random() / 100
        torch.cuda._sleep(int(seconds * 1e9)) if run.cuda else time.sleep(seconds)      # cycles, at about 1 GHz
        return launch(*arguments, **options)

    with ExitStack() as stack:
        for place, name in LAUNCHES:
            stack.enter_context(mock.patch.object(place, name, partial(late, getattr(place, name))))
        yield


def races(run: Run):
    """Random delays before each collective, different on each rank, change no bit of losses and weights."""
    for name, settings in features_here(run).items():
        late = [delays(run, 1000 * number + dist.get_rank()) for number in range(1 if run.quick else 3)]
        run.numbers[name] = same_bits(run, f"{name} with delays", [nullcontext(), *late], **settings)


def third_step(run: Run, microbatches: int) -> Counter:
    """Train three steps. Return how often the third compiled, called cudaMalloc, and waited for the GPU, by place; on
    CPUs a call of item() counts as a wait."""
    from torch._dynamo.utils import counters                   # imported here, because it takes longer than torch

    def state():
        mallocs = torch.cuda.memory_stats(run.device)["num_device_alloc"] if run.cuda else 0
        return Counter({"graphs compiled": counters["stats"]["unique_graphs"], "cudaMalloc": mallocs})

    config, mesh, optimizer, stage, data = built(run, global_batch_size=4 * microbatches, compile=run.cuda)
    reads, item = [], torch.Tensor.item
    for step in (1, 2, 3):
        before, _ = state(), reads.clear()
        with (warnings.catch_warnings(record=True) as warned,
              mock.patch.object(torch.Tensor, "item", lambda tensor: reads.append(1) or item(tensor))):
            warnings.simplefilter("always")
            if run.cuda:
                torch.cuda.set_sync_debug_mode("warn" if step == 3 else "default")
            train.train_step(step, stage, optimizer, data, config, mesh)
    waits = [f"{Path(one.filename).name}:{one.lineno}" for one in warned if "synchroniz" in str(one.message)]
    return state() - before + Counter(waits if run.cuda else {"item()": len(reads)})


def silence(run: Run):
    """After the warm-up a step compiles and allocates nothing, and waits for the GPU only at its end."""
    few, many = (third_step(run, microbatches) for microbatches in (2, 4))
    require(few == many, f"the host waits for the device {dict(few)} in a step of 2 microbatches and {dict(many)} in "
            "one of 4; a microbatch must not make it wait")
    require(not few["graphs compiled"] + few["cudaMalloc"], f"the third step has {dict(few)}, but must only wait")
    run.numbers.update(few)


def command(words: str) -> str:
    """Run `python WORDS` in the repository. Returns its standard output. Raises UserError if it fails."""
    done = subprocess.run([sys.executable, *words.split()], cwd=BENCH.parent, stdout=subprocess.PIPE, text=True)
    require(done.returncode == 0, f"{done.stdout[-3000:]}python {words} ended with exit code {done.returncode}")
    return done.stdout


def ask(run: Run, *questions: str):
    """Add the numbers of `python bench.py QUESTION` on this device. Raises UserError if it says that they are wrong."""
    for question in questions:
        here = "" if question.startswith("plan") else f" --device {run.device.type}" + " --dtype bfloat16" * run.cuda
        record = json.loads(command(f"bench.py {question}{here}").splitlines()[-1])
        require(record.get("exact", True), f"bench.py {question}: a real step is not its dry run's: {record}")
        run.numbers[question] = {name: value for name, value in record.items() if isinstance(value, float)}


def ranks_here(run: Run, most=8) -> int:
    """Return a power of two: as many ranks as there are GPUs, or 2 on CPUs, but at most `most`."""
    return 1 << min(most, torch.cuda.device_count() if run.cuda else 2).bit_length() - 1


def exactness(run: Run):
    """Every layout equals one plain process to 1e-9 in float64: the tests' own cases, on this device."""
    tests = "tests/exactness/test_dense.py" + " tests/exactness/test_layouts.py" * run.cuda
    run.numbers["pytest"] = command(f"-m pytest -n 0 -o addopts= -rs --tb=short -p no:cacheprovider --on-device="
                                    f"{run.device.type} {tests}").splitlines()[-1]
    require(" passed" in run.numbers["pytest"], f"no test ran: {run.numbers['pytest']}")


def interruptions(run: Run):
    """A run ends in time when a rank is killed or stopped, and resumes with the bits of a run without interruption."""
    kills = f"tests/random_kills.py --kills {6 if run.cuda else 2} --minutes 8 --device {run.device.type}"
    run.numbers[kills] = "\n" + command(kills).rstrip()


def traffic_and_memory(run: Run):
    """The collectives and the bytes of a real step are those of the dry run on which every estimate rests."""
    tp = ranks_here(run, 2)
    layout = f"--tp {tp} --pp {ranks_here(run, 4) // tp} --dp 1 --slices 2"
    ask(run, f"collectives {layout}", f"memory {layout}")


def throughput(run: Run):
    """The speed of one process, beside that of the same model in plain torch.nn."""
    sizes = "--model gpt2 --micro-batch-size 16" if run.cuda else "--num-layers 2 --micro-batch-size 4"
    ask(run, f"throughput {sizes} --global-batch-size 16 --repeats 3")


def overlap(run: Run):
    """The share of tensor parallelism's communication that Domino hides on this machine's links."""
    hidden, heads, length = (4096, 32, 4096) if run.cuda else (128, 4, 64)
    ask(run, *[f"overlap --tp {ranks_here(run)} --hidden-size {hidden} --num-attention-heads {heads} --seq-length "
               f"{length} --micro-batch-size 2 --slices {slices} --repeats 3" for slices in (1, 2)])


def launched(run: Run, ranks: int, *flags: str, metric="loss") -> list:
    """Run train.py under torchrun once for each of `flags`, in one folder: each launch resumes from the previous one.
    Returns the values of one metric."""
    with tempfile.TemporaryDirectory() as folder:
        for more in flags:
            command(f"-m torch.distributed.run --standalone --nproc_per_node {ranks} train.py --run-dir {folder}/run "
                    f"--device {run.device.type} --bf16 --log-interval 1 --sample-tokens 0 {more}")
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return [line[metric] for line in lines if metric in line]


def steps(run: Run):
    """The time of a step of train.py, beside the estimate of bench.py plan."""
    gpus, gpu = torch.cuda.device_count(), "A100" if "A100" in torch.cuda.get_device_name() else "H100"
    llama = "--model llama3-8b --tp 8 --sequence-parallel"
    models = [llama, *[f"{llama} --fp8-format hybrid --fp8-recipe {recipe}" for recipe in RECIPES]] * (gpus >= 8)
    for flags in [f"{model} --pp 1 --micro-batch-size 2 --global-batch-size 32 --slices {slices}"
                  for model in ("--model gpt2-xl --tp 1", *models) for slices in (1, 2)]:
        ask(run, f"plan --gpus {gpus} --gpu {gpu} {flags}")
        run.numbers[f"{flags}, tokens/s"] = median(launched(
            run, gpus, f"{flags} --train-iters 12 --eval-interval 100 --eval-iters 1", metric="tokens_per_second")[4:])


def learning(run: Run):
    """The losses of bfloat16 and fp8 agree, and so do those of a run that changes its layout halfway."""
    ranks, last = ranks_here(run, 2), 400 if run.cuda else 20
    flags = f"--pp 1 --eval-interval {last} --eval-iters 4 --train-iters {last}" + (
        " --model gpt2 --global-batch-size 64 --micro-batch-size 8" * run.cuda)
    wide = f"{flags} --tp {ranks} --dp 1"
    halves = f"{wide} --exit-interval {last // 2} --save-interval {last // 2}", f"{flags} --tp 1 --dp {ranks}"
    for name, given in {"bf16": [wide], "fp8": [f"{wide} --fp8-format hybrid"] * run.has_fp8, "halves": halves}.items():
        if given:
            loss = run.numbers[name] = launched(run, ranks, *given)[-1]
            require(abs(loss / run.numbers["bf16"] - 1) < 0.03, f"after {last} steps the losses are {run.numbers}; "
                    f"{name}'s differs by more than 3 % from bf16's")


CHECKS = {
    "machine": Check("machine", machine, limit=120),
    "weight-gradients": Check("kernels", weight_gradients),
    "fp8-matmuls": Check("kernels", fp8_matmuls, capability=(8, 9)),
    "expert-matmuls": Check("kernels", expert_matmuls),
    "attention": Check("kernels", attention),
    "documents": Check("kernels", documents, capability=(8, 0), needs_gpu=True),
    "exactness": Check("exactness", exactness, gpus=2, limit=1800),
    "features": Check("exactness", features, ranks=(2, 4, 8), gpus=2, limit=1800),
    "races": Check("races", races, ranks=(2, 4, 8), gpus=2),
    "interruptions": Check("races", interruptions, gpus=2, quick=False, limit=1200),
    "silence": Check("silence", silence, ranks=(1,)),
    "traffic-and-memory": Check("speed", traffic_and_memory, quick=False),
    "throughput": Check("speed", throughput),
    "overlap": Check("speed", overlap, gpus=2, quick=False, limit=1800),
    "steps": Check("speed", steps, needs_gpu=True, quick=False, limit=3600),
    "learning": Check("learning", learning, quick=False, limit=3600),
}
