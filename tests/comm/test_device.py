"""A GPU that can't do what a run asks: one sentence before the ranks connect, or the run goes on in another way."""

import re
import signal
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support import ROOT
from support.fake_cuda import show_gpus
from support.fake_world import fake_world
from support.harness import build, tiny
from support.runs import make_corpus, train_in_pool

import train
from nanodomino.comm.device import find_device
from nanodomino.comm.world import LaunchInfo
from nanodomino.domino import Domino
from nanodomino.errors import UserError
from nanodomino.estimate.stages import require_memory
from nanodomino.generate import __main__ as generate
from nanodomino.settings.config import Config

GPU = torch.device("cuda", 0)
AMD = dict(capability=(9, 4), architectures=["gfx942"])
CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120".split()
WHEEL = r"pip install torch==[\d.]+ --index-url https://download.pytorch.org/whl/cu126, or try --device cpu"


def too_old():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
                       "driver by downloading and installing a new version from the URL: http://www.nvidia.com/")


@pytest.mark.parametrize("gpus, settings, sentence", [
    (dict(init=too_old), {}, r"can't use .*too old \(found CUDA 12.4\)\); update .*for CUDA 12 " + WHEEL),
    (dict(capability=(6, 0), architectures=CUDA_13), {}, f"a GPU has compute capability 6.0, .*{WHEEL}"),
    (dict(capability=(7, 0), architectures=CUDA_13), {}, f"a GPU has compute capability 7.0, .*{WHEEL}"),
    (dict(capability=(7, 5), architectures=CUDA_13), {}, None), (dict(architectures=CUDA_13), {}, None),
    (dict(capability=(13, 1), architectures=CUDA_13), {}, None), (AMD, {}, None),
    (AMD, dict(fp8_format="hybrid"), "--fp8-format needs a GPU")])
def test_a_gpu_that_this_torch_cannot_use(monkeypatch, gpus, settings, sentence):
    """Before it counts GPUs, torch asks NVML, which also works where CUDA does not. An AMD GPU with the number 9.4 has
    none of Hopper's kernels, and another 8-bit type."""
    show_gpus(monkeypatch, **gpus)
    monkeypatch.setattr(torch.version, "hip", "7.0" if gpus is AMD else None)
    with pytest.raises(UserError, match=sentence) if sentence else nullcontext():
        assert find_device(Config(**settings), LaunchInfo()) == GPU


@pytest.mark.parametrize("capability, problem, settings, warning", [
    ((9, 0), None, dict(dtype="bfloat16"), None), ((7, 5), None, dict(dtype="float16"), None),
    ((7, 5), None, dict(dtype="bfloat16"), "for bfloat16 8.0; instead of --bf16 try --fp16"),
    ((6, 0), None, dict(dtype="float16"), "torch.compile needs compute capability 7.0"),
    ((9, 0), RuntimeError("Failed to find C compiler."), {}, r"gcc and python3-dev .* \(Failed to find C compiler.\)"),
    ((9, 0), AssertionError("libcuda.so cannot found!\n"), {}, r"ldconfig -p \(libcuda.so cannot found!\)"),
    ((9, 0), AttributeError("half installed"), {}, r"ldconfig -p \(half installed\)"),
    ((9, 0), "missing", {}, "the packages triton, gcc and python3-dev"),
    ((9, 0), AssertionError(), dict(compile=False), None),
    ((9, 0), AssertionError(), dict(compile_backend="aot_eager"), None)])
def test_a_compiler_that_cannot_work_is_turned_off(monkeypatch, capsys, capability, problem, settings, warning):
    """Triton compiles a file of C when it is first asked for its driver. A broken one can raise any error. A host warns
    once."""
    class Driver:
        @property
        def active(self):
            if problem:
                raise problem
            return self

    show_gpus(monkeypatch, capability=capability)
    monkeypatch.setitem(sys.modules, "triton", None if problem == "missing" else ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=Driver()))
    for local_rank in (0, 1):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, str(local_rank))
        assert Config(**settings).with_device(GPU).compile == (not warning and settings.get("compile", True))
    said = capsys.readouterr().err
    assert re.fullmatch(f"warning: running with --no-compile: .*{warning}.*\n" if warning else "", said), said


def test_a_backend_that_fuses_nothing_leaves_the_cross_entropy_in_blocks():
    """Whole, it would need temporaries as large as the logits."""
    with fake_world(0, 1):
        for backend in ("aot_eager", "inductor"):
            _, model, *_ = build(tiny(1, compile_backend=backend))
            ends = Domino(model, compiled=lambda function: function).ends
            assert (getattr(ends.scaled_exp_of_rows, "__name__", "") == "by_blocks") == (backend == "aot_eager")


def test_the_memory_that_others_use_on_a_gpu_does_not_count(monkeypatch):
    """This process's CUDA context does: it exists already, so it takes none of the free memory."""
    monkeypatch.setattr("nanodomino.estimate.stages.MARGIN", 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 10**9))
    free = 10**7
    assert "MiB" in require_memory(train, tiny(1), GPU, 1)
    free = 10**5
    with pytest.raises(UserError, match="each can have 0.5 GB here"):
        require_memory(train, tiny(1), GPU, 1)


def test_an_a100_generates_from_a_model_that_was_trained_in_fp8(pool, tmp_path, monkeypatch):
    """Generation multiplies in 16 bits."""
    make_corpus(tmp_path)
    train_in_pool(pool, tmp_path, "--run-dir", tmp_path / "run", "--train-iters", 1, "--bf16", "--fp8-format", "e4m3")
    show_gpus(monkeypatch, capability=(8, 0))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(generate, "start_world", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate.main(["--load", str(tmp_path / "run"), "--device", "cuda"], LaunchInfo())


def test_what_joins_a_grid_of_gpus_has_chosen_their_kernels():
    """train.py, generate and every benchmark, by the same function."""
    files = [path.read_text() for path in [*ROOT.glob("nanodomino/*/*.py"), *ROOT.glob("benchmarks/*.py")]]
    joining = [text for text in files if " start_world(" in text and "def start_world" not in text]
    assert len(joining) >= 4 and all("choose_kernels(" in text for text in joining)
