"""bench.py gpu: it runs, reports and skips checks, and each check fails if what it checks is wrong."""

import json
import shlex
import subprocess
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.fork_server import LAUNCHER, is_alive
from support.runs import wait_until

import train
from bench import QUESTIONS
from benchmarks import gpu, gpu_kernels, plan
from benchmarks.gpu import CHECKS
from benchmarks.gpu_kernels import Run
from benchmarks.runner import main, parse
from nanodomino.errors import UserError
from nanodomino.options import fp8


def test_checks_are_reported_and_those_that_passed_are_skipped_the_next_time(tmp_path, capsys, monkeypatch):
    run_check, verdicts = gpu.run_check, {"machine": "passed", "attention": "failed"}
    monkeypatch.setattr(gpu, "run_check", lambda name, flags: run_check(name, flags) if name not in verdicts else dict(
        verdict=verdicts[name], message="why", numbers={}, seconds=1.0))
    command = f"gpu --device cpu --quick --report {tmp_path} --only machine attention".split()
    assert main(QUESTIONS, "", [*command, "weight-gradients"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == ["attention"]
    text = (tmp_path / "report.md").read_text()
    assert "| kernels | attention | failed | 1 |" in text and "17 x 40 x 24: 0.0" in text
    verdicts.update(machine="failed", attention="passed")
    assert main(QUESTIONS, "", command) == 0
    assert "[1/2] machine: passed before" in capsys.readouterr().out


def test_a_check_that_exceeds_its_limit_ends_with_all_its_processes(monkeypatch):
    """A process and its child ignore SIGTERM. Each prints what fork() gives it: the child's id, or 0."""
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    script = "import os, signal, time; signal.signal(15, 1); os.write(1, b'%d\\n' % os.fork()); time.sleep(60)"
    process = subprocess.Popen(["python", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = max(int(process.stdout.readline()), int(process.stdout.readline()))
    assert is_alive(child) and gpu.end(process, limit=0.1) is None
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_gpu_one_sentence_says_what_to_do(capsys, monkeypatch, rank):
    """Rank 1 first waits ten seconds, in which rank 0 prints the sentence and its end ends the others."""
    for name in LAUNCHER[:4]:
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setattr("time.sleep", (slept := []).append)
    assert main(QUESTIONS, "", ["gpu"]) == 2 and slept == [10 * rank]
    assert "--device cuda needs a GPU that torch can see, and there is none; try --devi" in capsys.readouterr().err
    assert gpu.run_check("steps-tp", SimpleNamespace(device="cpu", quick=True))["message"] == "needs 8 GPUs"


def test_the_report_names_a_kernel_below_its_floor(monkeypatch):
    """An H100 would copy the 2 MB in 3.57 us: 2 for the start, the rest at 80 % of 3.35 TB/s."""
    monkeypatch.setattr(gpu_kernels, "MEASURABLE", 2e-6)
    run = Run(torch.device("cpu"), quick=True)
    run.gpu = "H100"
    run.speed("copy", torch.ones(2**20, dtype=torch.bfloat16).clone)
    monkeypatch.setattr(gpu, "Run", lambda *_: run)
    found = gpu.answer(SimpleNamespace(run="machine", device="cpu", quick=True), SimpleNamespace(world_size=1))[1]
    assert found["message"] == "below the floor: copy" and found["numbers"]["copy, GB/s"].endswith(", floor 588")


@pytest.mark.parametrize("name", ["RTX 4090", pytest.param("H100", marks=pytest.mark.exhaustive)])
def test_the_flags_of_measured_steps_are_right_and_the_models_fit_on_eight_h100(monkeypatch, name):
    """Plans each model's last variant in a dry run without a GPU. A wrong flag of any variant raises UserError."""
    plans, run = [], SimpleNamespace(gpu=name, world_size=8, large=True, has_fp8=True, cuda=False)
    monkeypatch.setattr(gpu, "ask", lambda run, words: plans.append(parse(plan, shlex.split(words))) or dict(
        fits=False, memory=[{}]))
    for check in [check for check in CHECKS.values() if check.function is gpu.steps]:
        gpu.steps(run, *check.arguments)
        assert set(map(plan.processes, plans)) == {1} and plans[-1].gpu == name
        assert name != "H100" or plan.answer(plans[-1], None)[1]["fits"]


def test_torchs_warning_about_its_debug_mode_is_no_wait(monkeypatch, recwarn):
    once = ["a prototype feature and does not yet detect all synchronizing operations"]
    monkeypatch.setattr(gpu, "built", lambda *_, **__: SimpleNamespace(
        step=lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1)))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: once and warnings.warn(once.pop(), stacklevel=1))
    gpu.silence(run := SimpleNamespace(cuda=True, device=None, numbers={}), {})
    assert sum(run.numbers.values()) == 1


@pytest.mark.table
def test_the_docs_say_what_each_part_proves():
    assert all(f"| {check.part} | " in (ROOT / "docs" / "running.md").read_text() for check in CHECKS.values())


def test_the_quicker_launch_order_is_named(monkeypatch):
    monkeypatch.setattr(gpu, "launched", lambda *_, NCCL_LAUNCH_ORDER_IMPLICIT: 30 * [
        {"step_ms": 50 + 6 * int(NCCL_LAUNCH_ORDER_IMPLICIT)}])
    run = Run(torch.device("cpu"), quick=True)
    gpu.launch_order(run)
    assert run.numbers["faster here"] == "NCCL_LAUNCH_ORDER_IMPLICIT=0, by 12.0%"


def without_wait(*arguments, async_op=False, right=dist.all_reduce, **options):
    work = right(*arguments, async_op=async_op, **options)
    return work and SimpleNamespace(wait=lambda: None, get_future=work.get_future)


FAILING = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=1, stdout=""), PIPE=None)
FAULTS = {                                      # {check: (where, what, the fault, what the error says)}
    "weight-gradients": (gpu_kernels, "add_weight_gradient", lambda total, *_: None, "1 x 48 x 32: relative error"),
    "fp8-matmuls": (fp8, "to_8_bits", lambda x, *to, right=fp8.to_8_bits: right(1.15 * x, *to), "16 forward: relative"),
    "expert-matmuls": (gpu_kernels, "grouped_linear", lambda x, w, dispatch, right=gpu_kernels.grouped_linear: right(
        x, w, SimpleNamespace(ends=[min(end + 1, len(x)) for end in dispatch.ends])), "experts W with"),
    "attention": (gpu_kernels, "fused_attention", lambda q, *kv, bias, right=gpu_kernels.fused_attention: right(
        1.15 * q, *kv, bias), "output: relative error"),
    **dict.fromkeys(("exactness", "interruptions", "throughput", "overlap", "launch-order", "steps"), (
        gpu, "subprocess", FAILING, "ended with exit code 1")),
    "feature-slices": (train, "loss_func", lambda mask, losses: (losses.sum() * torch.rand(()), mask.sum()), "bf16: "),
    "feature-slices: races": (dist, "all_reduce", without_wait, "weights of a rank differ"),
    **dict.fromkeys(("silence", "silence-tp-pp"), (train, "loss_func", lambda mask, losses: (
        losses.sum(), int(mask.sum().item())), "the host waits")),
    "traffic-and-memory": (gpu, "command", lambda words: '{"exact": false}', "is not its dry run's"),
    "learning": (gpu, "launched", lambda *given: [{"loss": 5.0 if "--tp 1" in given[-1] else 3.0}],
                 "halves's differs")}
# of the pool; other checks run here
RANKS = {"silence": 1, "silence-tp-pp": 4, "steps": 1, "feature-slices": 2, "feature-slices: races": 2}


def check_fault(name):
    (where, what, fault, says), check = FAULTS[name], CHECKS[name.partition(":")[0]]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=says):
        patch.setattr(where, what, fault)
        check.function(Run(torch.device("cpu"), quick=True, world_size=RANKS.get(name, 1)), *check.arguments)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.exhaustive if name == "silence" or RANKS.get(name, 0) > 1 else [])
    for name in FAULTS])
def test_a_check_fails_if_what_it_checks_is_wrong(pool, name):
    pool.run(check_fault, name, world_size=RANKS[name]) if name in RANKS else check_fault(name)
