"""Does everything work on this machine's GPUs? Runs checks in the order in which they matter, and writes a report.

    python bench.py gpu                               all checks, on all GPUs
    python bench.py gpu --quick --device cpu          small versions of the checks that need no GPU

Each check is a process of its own with a time limit. Its output is in NAME.log in the folder of --report, its result in
report.json and report.md. A check that has passed there is skipped the next time. The exit code is 1 if a check failed.

A check is a function that takes a Run and adds its numbers. It raises UserError if the machine computes something
wrong; on several ranks, every rank must raise it. Where a test or another question of bench.py has the answer, a check
starts that command. The checks of single kernels are in gpu_kernels.py.
"""

import gc
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import plan
from benchmarks.gpu_kernels import Run, attention, expert_matmuls, fp8_matmuls, machine, weight_gradients
from benchmarks.runner import BENCH, Training, bytes_text, config_of, gathered, parse, seconds_text, with_mesh
from benchmarks.slow_network import exit_on_signals
from benchmarks.timeline import record
from nanodomino.comm import collectives
from nanodomino.comm.device import capability_of, choose_kernels, find_device, has_flash_attention
from nanodomino.comm.world import LaunchInfo, start_world
from nanodomino.errors import require
from nanodomino.estimate.formulas import peak_memory
from nanodomino.files import make_folder, open_regular_file, read_file, write_file
from nanodomino.options.fp8 import RECIPES
from nanodomino.pictures.merged_trace import table
from nanodomino.settings.config import Config

ROUNDS = False               # no --repeats: a check gives --repeats to the questions that it asks
GRACE = 45                   # seconds from SIGTERM to SIGKILL; torchrun gives its ranks 30
LAUNCHES = [(dist, name) for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv")] + [
    (collectives, name) for name in ("exchange", "native_reduce_scatter", "native_all_gather")]
SMALL = dict(num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250, micro_batch_size=4,
             lr_warmup_fraction=0.0, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, dtype="bfloat16",
             bucket_size=20_000, compile=False)
TP2, PP2 = dict(tensor_model_parallel_size=2, slices=2), dict(pipeline_model_parallel_size=2)
# {feature: its settings on 2 ranks; on more, data parallelism takes the rest}
FEATURES = dict(
    slices=dict(TP2, columns=2), pipeline=dict(PP2, schedule="zb-v"),
    experts=dict(num_experts=4, disable_bias_linear=True, expert_model_parallel_size=2, slices=2),
    sequence_parallel=dict(TP2, sequence_parallel=True, recompute_granularity="selective"),
    llama=dict(TP2, swiglu=True, position_embedding_type="rope", num_query_groups=2, qk_layernorm=True),
    context=dict(context_parallel_size=2), context_a2a=dict(context_parallel_size=2, cp_comm_type="a2a"),
    zero_2=dict(zero_stage=2, recompute_granularity="full"), depths=dict(TP2, mtp_num_layers=1),
    documents=dict(TP2, reset_position_ids=True, reset_attention_mask=True))


@dataclass(frozen=True)
class Check:
    """Says what a check needs. function: returns None, or why it can't run on this machine; arguments: the function's
    after the Run; ranks: most processes, 0 for none that communicate; gpus: fewest; limit: seconds."""
    part: str
    function: Callable
    arguments: tuple = ()
    ranks: int = 0
    gpus: int = 1
    quick: bool = True
    limit: int = 1800


def built(run: Run, **settings) -> Training:
    """Return this rank's part of a small training run, warmed up. settings: replace those of SMALL."""
    config = Config(**dict(SMALL, global_batch_size=8 * run.world_size) | settings).resolve(run.world_size)
    config, run.mesh = with_mesh(config.with_vocabulary(config.vocab_size), run.device, run.mesh)
    return Training(config, run.mesh)


def same_bits(run: Run, name: str, disturbances, **settings) -> list[float]:
    """Train in each of these contexts from the same start. Returns the losses. Raises UserError if any bit differs."""
    found = []
    for disturbance in disturbances:
        with disturbance:
            ours = built(run, deterministic_mode=True, **settings)
            for _ in range(3):
                ours.step()
        found.append((ours.losses, gathered([torch.hash_tensor(weight.detach()).item()
                                            for weight in ours.model.parameters()])))
    require(all(one == found[0] for one in found), f"{name}: the losses {[losses for losses, _ in found]} or the "
            "weights of a rank differ, but each run must give the same bits")
    return ours.losses


@contextmanager
def delays(run: Run, seed: int):
    """Delay every launch of a collective by a random time. On GPUs, the stream that launches the collective sleeps."""
    draw = random.Random(seed)

    def late(launch, *arguments, **options):
        torch.cuda._sleep(int(1e7 * draw.random())) if run.cuda else time.sleep(draw.random() / 100)     # 1e9 cycles/s
        return launch(*arguments, **options)

    with ExitStack() as stack:
        for place, name in LAUNCHES:
            stack.enter_context(mock.patch.object(place, name, partial(late, getattr(place, name))))
        yield


def feature(run: Run, settings: dict):
    """The feature is as close to fp32 as rounding allows; random delays before each collective change no bit."""
    expected = same_bits(run, "fp32", [nullcontext()], **settings | dict(dtype="float32"))
    fp8 = RECIPES if run.has_fp8 and run.large and "num_experts" not in settings else ()          # experts have none
    for case, more in {"bf16": {}, **{each: dict(fp8_format="hybrid", fp8_recipe=each) for each in fp8}}.items():
        late = [delays(run, 1000 * number + dist.get_rank()) for number in range(1 if run.quick else 3)]
        losses = same_bits(run, case, [nullcontext(), *late], **settings, **more)
        error = run.numbers[case] = max(abs(a / b - 1) for a, b in zip(losses, expected))
        require(error <= 0.02, f"{case}: losses {losses}, but {expected} in fp32; at most 2 % may differ")


def third_step(run: Run, microbatches: int, layout: dict) -> Counter:
    """Train three steps. Return {place: how often the third step compiled, allocated or waited there}, on all ranks. On
    CPUs, item() is what waits."""
    from torch._dynamo.utils import counters                   # imported here, because it takes longer than torch

    def state():
        return Counter({"graphs compiled": counters["stats"]["unique_graphs"],
                        "cudaMalloc": torch.cuda.memory_stats(run.device).get("num_device_alloc", 0)})

    ours, reads = built(run, global_batch_size=4 * microbatches, compile=run.cuda, **layout), []
    ours.step(), ours.step()
    before = state()
    with (warnings.catch_warnings(record=True) as warned,
          mock.patch.object(torch.Tensor, "item", lambda x, item=torch.Tensor.item: reads.append(1) or item(x))):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn") if run.cuda else None
        ours.step()
    # torch also warns, but only once, that this mode does not yet detect all synchronizing operations
    waits = [f"{Path(one.filename).name}:{one.lineno}" for one in warned if "called a sync" in str(one.message)]
    return sum(gathered(state() - before + Counter(waits if run.cuda else {"item()": len(reads)})), Counter())


def silence(run: Run, layout: dict):
    """After the warm-up a step compiles and allocates nothing, and waits for the GPU only at its end."""
    few, many = (third_step(run, microbatches, layout) for microbatches in (2, 4))
    require(few == many and not few["graphs compiled"] + few["cudaMalloc"], f"the host waits {dict(few)} in a step of "
            f"2 microbatches, {dict(many)} in one of 4; it must wait equally often, and compile and allocate nothing")
    run.numbers.update(few)


def command(words: str, **variables: str) -> str:
    """Return the output of `python WORDS` in the repository, outside of this world. Raises UserError if it fails."""
    outside = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
    done = subprocess.run([sys.executable, *shlex.split(words)], cwd=BENCH.parent, stdout=subprocess.PIPE, text=True,
                          env=outside | variables)
    require(done.returncode == 0, f"{done.stdout[-3000:]}python {words} ended with exit code {done.returncode}")
    return done.stdout


def ask(run: Run, question: str) -> dict:
    """Add the numbers of `python bench.py QUESTION` here, and return them. Raises UserError unless they are exact."""
    here = "" if question.startswith("plan") else f" --device {run.device.type}" + " --dtype bfloat16" * run.cuda
    record = json.loads(command(f"bench.py {question}{here}").splitlines()[-1])
    require(record.get("exact", True), f"bench.py {question}: a real step is not its dry run's: {record}")
    run.numbers[question] = {name: value for name, value in record.items() if isinstance(value, (float, bool, dict))}
    return record


def ranks_here(cuda: bool, most=8) -> int:
    """Return a power of two: as many ranks as there are GPUs, or 2 on CPUs, but at most `most`."""
    return 1 << min(most, torch.cuda.device_count() if cuda else 2).bit_length() - 1


def run_tests(run: Run, tests: str):
    """Run these tests on this device. Raises UserError if one fails, or if none has run."""
    require(find_spec("pytest"), "this check runs tests and needs pytest; pip install -r requirements.txt brings it")
    pytest = "-m pytest -o addopts= -rs --tb=short -p no:cacheprovider --on-device"
    found = run.numbers[tests] = command(f"{pytest} {run.device.type} {tests}").splitlines()[-1]
    require(" passed" in found, f"no test ran: {found}")


def exactness(run: Run):
    """Every layout equals one plain process to 1e-9 in float64: the tests' own cases, on this device."""
    run_tests(run, "tests/exactness/test_dense.py" + " tests/exactness/test_layouts.py" * run.cuda)


def interruptions(run: Run):
    """A killed or stopped run ends in time and resumes with the same bits; on 4 GPUs a hanging rank is named."""
    names = "killed_during or stopped_run" + " or hangs" * (ranks_here(run.cuda) >= 4)
    run_tests(run, f"tests/run/test_interrupted_runs.py -k '{names}'")


def traffic_and_memory(run: Run):
    """The collectives and the bytes of a real step are those of the dry run on which every estimate rests."""
    ask(run, f"memory --tp {ranks_here(run.cuda, 2)} --pp {max(1, ranks_here(run.cuda, 4) // 2)} --dp 1 --slices 2")


def throughput(run: Run):
    """Speed beside that of the same model in plain torch.nn, in Transformers, and in torch's DDP and FSDP2."""
    sizes = "--model gpt2" if run.cuda else "--num-layers 1 --seq-length 64"
    samples = 16 if run.free > 4e10 else 2                     # a small GPU may not have flash attention
    others = "plain transformers" if find_spec("transformers") and not run.quick else "plain"
    ask(run, f"throughput {sizes} --micro-batch-size {samples} --global-batch-size 16 --repeats 3 --against {others}")
    if ranks_here(run.cuda) > 1 and not run.quick:
        sizes = " --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50304"
        ask(run, f"zero --dp {ranks_here(run.cuda)} --repeats 3" + sizes * run.cuda)


def overlap(run: Run):
    """The share of tensor parallelism's communication that Domino hides on this machine's links."""
    tokens = 4096 if has_flash_attention(run.device) else 1024             # without it a GPU keeps all scores
    sizes = f"--hidden-size 4096 --num-attention-heads 32 --seq-length {tokens}" if run.cuda else "--hidden-size 128"
    for more in ("1", "2", *[f"2 --tp-max-ctas {count}" for count in (4, 8, 16)] * run.cuda):
        ask(run, f"overlap --tp {ranks_here(run.cuda)} {sizes} --micro-batch-size 2 --repeats 3 --slices {more}")


def steps(run: Run, model: str, *variants: str):
    """The time, the memory and the exposed communication of a step stand beside the estimates of `bench.py plan`."""
    large = run.large and run.gpu                              # a plan needs the GPU's data sheet
    model = model if large else f"--model nano --num-layers 2 --global-batch-size 4 --tp {run.world_size}"
    for variant in [each for each in variants if run.has_fp8 or "fp8" not in each] if large else SLICES[1:]:
        words = f"plan --gpus {run.world_size} --gpu '{run.gpu or 'H100'}' {model} --pp 1 {variant}"
        need = (planned := ask(run, words))["memory"][0]       # on each rank, because each must raise an error
        if not planned["fits"] or run.cuda and sum(need.values()) > run.free:
            continue                                           # an A100 may have half the memory of its data sheet
        gc.collect()                                           # frees the previous model
        torch.cuda.reset_peak_memory_stats(run.device) if run.cuda else None
        flags = parse(plan, shlex.split(words))
        plan.processes(flags)                                  # gives the model the vocabulary of its published weights
        config, run.mesh = with_mesh(config_of(flags, run.world_size), run.device, run.mesh)
        if found := record(config, run.mesh, variant, repeats=5):      # on rank 0, whose numbers are in the report
            run.numbers[f"step of {words}"] = "\n".join([
                f"{seconds_text(max(event.end for event in sum(found.ranks, [])) / 1e9)}, "
                f"planned {seconds_text(planned['step_s'])}" + (
                    f"; {bytes_text(peak_memory(run.device))} in torch's tensors, planned "
                    f"{bytes_text(sum(need.values()) - need['CUDA and NCCL'])}" if run.cuda else ""), *table(found)])


def launched(run: Run, ranks: int, *flags: str, **variables: str) -> list[dict]:
    """Run train.py once with each of `flags`, resuming from the launch before. Return the metrics of all steps."""
    with tempfile.TemporaryDirectory() as folder:
        for more in flags:
            command(f"-m torch.distributed.run --standalone --nproc_per_node {ranks} train.py --run-dir {folder}/run "
                    f"--device {run.device.type} --bf16 --log-interval 1 --sample-tokens 0 {more}", **variables)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]


def launch_order(run: Run):
    """A step with NCCL_LAUNCH_ORDER_IMPLICIT, which starts collectives of all groups in order, and one without."""
    ranks, found = ranks_here(run.cuda), run.numbers
    flags = f"--tp 2 --pp {ranks // 4 or 1} --slices 2 --eval-iters 0 --train-iters 30" + (
        " --model gpt2 --global-batch-size 64 --micro-batch-size 4" * run.cuda)
    for value in ("1", "0") * 2:                               # in turn, because GPUs get slower as they get warm
        steps = launched(run, ranks, flags, NCCL_LAUNCH_ORDER_IMPLICIT=value)[10:]
        name, median = f"NCCL_LAUNCH_ORDER_IMPLICIT={value}", statistics.median(line["step_ms"] for line in steps)
        found[name] = min(median, found.get(name, median))
    quick, slow = sorted(found, key=found.get)
    found["faster here"] = f"{quick}, by {found[slow] / found[quick] - 1:.1%}"


def learning(run: Run):
    """The losses of bfloat16 and fp8 agree, and so do those of a run that changes its layout halfway."""
    fast = run.cuda and capability_of(run.device) >= (8, 0)    # older GPUs have no tensor cores for bfloat16
    ranks, last = ranks_here(run.cuda, 2), 400 if fast else 20
    flags = f"--pp 1 --eval-iters 0 --train-iters {last}" + (
        " --model gpt2 --global-batch-size 64 --micro-batch-size 8" * run.cuda)
    wide = f"{flags} --tp {ranks} --dp 1"
    halves = [f"{wide} --exit-interval {last // 2} --save-interval {last // 2}", f"{flags} --tp 1 --dp {ranks}"]
    fp8 = {"fp8": [f"{wide} --fp8-format hybrid"]} if run.has_fp8 else {}
    for name, launches in {"bf16": [wide], "halves": halves, **fp8}.items():
        loss = run.numbers[name] = launched(run, ranks, *launches)[-1]["loss"]
        require(abs(loss / run.numbers["bf16"] - 1) < 0.03, f"after {last} steps the losses are {run.numbers}; "
                f"{name}'s differs by more than 3 % from bf16's")


BATCH, SLICES = "--micro-batch-size 2 --global-batch-size 32", ("--slices 1", "--slices 2")
FP8 = [f"--slices 2 --fp8-format hybrid --fp8-recipe {recipe}" for recipe in RECIPES]
LARGE = dict(ranks=8, gpus=8, quick=False)
CHECKS = {
    "machine": Check("machine", machine),
    "weight-gradients": Check("kernels", weight_gradients),
    "fp8-matmuls": Check("kernels", fp8_matmuls),
    "expert-matmuls": Check("kernels", expert_matmuls),
    "attention": Check("kernels", attention),
    "exactness": Check("exactness", exactness, gpus=2),
    **{f"feature-{name}": Check("exactness", feature, (settings,), ranks=8, gpus=2, quick=name == "slices")
       for name, settings in FEATURES.items()},
    "interruptions": Check("interruptions", interruptions, gpus=2, quick=False),
    "silence": Check("silence", silence, ({},), ranks=1),
    "silence-tp-pp": Check("silence", silence, (TP2 | PP2,), ranks=4, gpus=4),
    "traffic-and-memory": Check("speed", traffic_and_memory, quick=False),
    "throughput": Check("speed", throughput),
    "overlap": Check("speed", overlap, gpus=2, quick=False),
    "launch-order": Check("speed", launch_order, gpus=2, quick=False),
    "steps": Check("speed", steps, (f"--model gpt2-xl --tp 1 {BATCH}", *SLICES, *FP8), ranks=8),
    "steps-tp": Check("speed", steps, (f"--model llama3-8b --tp 8 --sequence-parallel {BATCH}", *SLICES,
                                       "--slices 2 --columns 2", *FP8), **LARGE),
    "steps-ep": Check("speed", steps, (f"--model qwen3-30b-a3b --num-layers 16 --ep 8 --tp 1 {BATCH}",
                                       *SLICES), **LARGE),
    "steps-cp": Check("speed", steps, ("--model llama3-8b --seq-length 131072 --cp 8 --tp 1 --global-batch-size 2 "
                                       "--recompute-granularity full", "--slices 1"), **LARGE),
    "learning": Check("learning", learning, quick=False, limit=3600),
}


# ---- the command

def add_flags(parser):
    parser.add_argument("--quick", action="store_true", help="run small versions of the checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CHECKS, default=list(CHECKS),
                        help=f"run only these checks: {', '.join(CHECKS)}")
    parser.add_argument("--report", type=Path, metavar="DIR", default=Path("runs/gpu-report"),
                        help="folder of the report (default runs/gpu-report)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run what needs no GPU")
    parser.add_argument("--run", choices=CHECKS, metavar="NAME", help="run one check, without a limit and a report")


def processes(flags) -> int:
    """Return 1, or with --run the largest number of processes that the check allows on these GPUs (on CPUs: two)."""
    find_device(Config(device=flags.device), LaunchInfo())     # says why torch can't use a GPU
    return ranks_here(flags.device == "cuda", CHECKS[flags.run].ranks or 1) if flags.run else 1


def answer(flags, launch):
    if not flags.run:
        with exit_on_signals():
            return run_checks(flags)
    check, device = CHECKS[flags.run], torch.device(flags.device, launch.local_rank if flags.device == "cuda" else None)
    choose_kernels(Config(deterministic_mode=check.function is feature), device)       # NCCL asks when the world starts
    if check.ranks:
        start_world(launch, device, timeout=300)
    run = Run(device, flags.quick, launch.world_size)
    reason = check.function(run, *check.arguments)
    verdict, slow = "skipped" if reason else "passed", f"below the floor: {', '.join(run.slow)}" if run.slow else ""
    return f"{flags.run} {verdict}", {"verdict": verdict, "message": reason or slow, "numbers": run.numbers}


def run_checks(flags):
    """Run the checks one after the other, each in its process. Returns (text, record)."""
    make_folder(flags.report)
    path, about = flags.report / "report.json", {"device": flags.device, "quick": flags.quick}
    report = json.loads(read_file(path)) if path.exists() else {}
    report = report if about.items() <= report.items() else {**about, "checks": {}}
    for number, name in enumerate(flags.only, 1):
        found, again = report["checks"].get(name, {}), "before, "
        if found.get("verdict") != "passed":
            found, again = run_check(name, flags), ""
            report["checks"][name] = found
            write_file(path, json.dumps(report, indent=1).encode())
            write_file(path.with_suffix(".md"), markdown(report).encode())
        print(f"[{number}/{len(flags.only)}] {name}: {found['verdict']} {again}after {found['seconds']:.0f} s"
              f"{' - ' * bool(found['message'])}{found['message']}", flush=True)
    names = {verdict: [name for name in flags.only if report["checks"][name]["verdict"] == verdict]
             for verdict in ("passed", "skipped", "failed")}
    counts = ", ".join(f"{len(found)} {verdict}" for verdict, found in names.items())
    return f"{counts}; see {path.with_suffix('.md')}", {"failed": names["failed"]}


def run_check(name: str, flags) -> dict:
    """Run one check in a process of its own. Returns its entry of the report."""
    check, gpus = CHECKS[name], torch.cuda.device_count() if flags.device == "cuda" else 2
    if check.gpus > gpus or flags.quick and not check.quick:
        return {"verdict": "skipped", "numbers": {}, "seconds": 0.0, "message":
                f"needs {check.gpus} GPUs" if check.gpus > gpus else "--quick leaves it out"}
    command = [sys.executable, str(BENCH), "gpu", "--run", name, "--device", flags.device, *["--quick"] * flags.quick]
    log, start, limit = (flags.report / f"{name}.log").resolve(), time.monotonic(), check.limit
    with open_regular_file(log, "wb") as file:         # beside it NCCL's recorder writes what was in flight in a hang
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=BENCH.parent, start_new_session=True, env={
            **os.environ, "TORCH_FR_DUMP_TEMP_FILE": str(log.with_suffix(".in-flight-"))})
    code = end(process, limit)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    records = [json.loads(line) for line in lines if line.startswith('{"question": "gpu"')]
    errors = [line for line in lines if line.startswith("error: ")] + lines[-1:] + [f"exit code {code}"]
    reason = f"did not end within {limit} s" if code is None else errors[0]
    found = records[-1] if code == 0 and records else {"verdict": "failed", "message": reason, "numbers": {
        "end of the log": "\n" + "\n".join(lines[-40:])}}
    commit = subprocess.getoutput(f"git -C '{BENCH.parent}' describe --always --dirty --exclude='*'")
    return {**found, "seconds": time.monotonic() - start, "commit": commit, "time": time.strftime("%Y-%m-%d %H:%M")}


def end(process: subprocess.Popen, limit: float) -> int | None:
    """Return a process's exit code, or None after `limit` seconds. Ends its group, after GRACE seconds by SIGKILL."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):                 # raised if the group has no process left
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def markdown(report: dict) -> str:
    """Return report.md: a table of verdicts, then the numbers of each check."""
    details, lines = [], [
        f"# nanodomino: `python bench.py gpu --device {report['device']}{' --quick' * report['quick']}`", "",
        "| part | check | verdict | seconds | it proves | |", "|---|---|---|---|---|---|"]
    for name, found in report["checks"].items():
        check = CHECKS[name]
        lines.append(f"| {check.part} | {name} | {found['verdict']} | {found['seconds']:.0f} | "
                     f"{check.function.__doc__.split('. ')[0]} | {found['message']} |")
        if found["numbers"]:
            details += ["", f"## {name} ({found['commit']}, {found['time']})", "", "```",
                        *[f"{key}: {value}" for key, value in found["numbers"].items()], "```"]
    return "\n".join(lines + details) + "\n"
