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
from nanodomino.comm.device import capability_of, find_device
from nanodomino.comm.world import LaunchInfo
from nanodomino.domino import Domino
from nanodomino.errors import UserError
from nanodomino.estimate.stages import require_memory
from nanodomino.generate import __main__ as generate
from nanodomino.settings.config import Config

GPU = torch.device("cuda", 0)
CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120".split()
WHEEL = r"pip install torch==[\d.]+ --index-url https://download.pytorch.org/whl/cu126, or try --device cpu"


def too_old():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
                       "driver by downloading and installing a new version from the URL: http://www.nvidia.com/")


def test_a_driver_that_is_older_than_torch(monkeypatch):
    """Before it counts GPUs, torch asks NVML, which also works where CUDA does not."""
    show_gpus(monkeypatch, init=too_old)
    with pytest.raises(UserError, match=r"can't use .*too old \(found CUDA 12.4\)\); update .*of CUDA 12 " + WHEEL):
        find_device(Config(), LaunchInfo())


@pytest.mark.parametrize("capability, runs", [((6, 0), False), ((7, 0), False), ((7, 5), True), ((9, 0), True),
                                              ((13, 1), True)])
def test_a_gpu_that_is_older_than_all_for_which_torch_is_compiled(monkeypatch, capability, runs):
    show_gpus(monkeypatch, capability=capability, architectures=CUDA_13)
    sentence = f"a GPU has compute capability {'.'.join(map(str, capability))}, .*{WHEEL}"
    with nullcontext() if runs else pytest.raises(UserError, match=sentence):
        assert find_device(Config(), LaunchInfo()) == GPU


def install_triton(monkeypatch, problem=None):
    """Install a triton that, unless there is a problem, compiles the file of C that it needs."""
    class Driver:
        @property
        def active(self):
            if problem:
                raise problem
            return self

    for name, module in {"triton": ModuleType("triton"), "triton.runtime": SimpleNamespace(driver=Driver())}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("capability, problem, settings, warning", [
    ((9, 0), None, dict(dtype="bfloat16"), None), ((7, 5), None, dict(dtype="float16"), None),
    ((7, 5), None, dict(dtype="bfloat16"), "for bfloat16 8.0; instead of --bf16 try --fp16"),
    ((6, 0), None, dict(dtype="float16"), "torch.compile needs compute capability 7.0"),
    ((9, 0), RuntimeError("Failed to find C compiler."), {}, r"gcc and python3-dev .* \(Failed to find C compiler.\)"),
    ((9, 0), AssertionError("libcuda.so cannot found!\n"), {}, r"ldconfig -p \(libcuda.so cannot found!\)"),
    ((9, 0), AssertionError(), dict(compile=False), None),
    ((9, 0), AssertionError(), dict(compile_backend="aot_eager"), None)])
def test_a_compiler_that_cannot_work_is_turned_off(monkeypatch, capsys, capability, problem, settings, warning):
    show_gpus(monkeypatch, capability=capability)
    install_triton(monkeypatch, problem)
    for local_rank in (0, 1):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, str(local_rank))
        compile = Config(**settings).with_device(GPU).compile
        assert compile == (not warning and settings.get("compile", True))
    said = capsys.readouterr().err
    assert re.fullmatch(f"warning: running with --no-compile: .*{warning}.*\n" if warning else "", said), said


def test_a_broken_triton_does_not_crash_the_start(monkeypatch, tmp_path):
    """Its import can raise any error."""
    show_gpus(monkeypatch)
    (tmp_path / "triton.py").write_text("raise AttributeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert not Config().with_device(GPU).compile


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


def test_amds_numbers_are_not_nvidias(monkeypatch):
    """A gfx942 says 9.4. It has none of Hopper's kernels, and another 8-bit type."""
    show_gpus(monkeypatch, capability=(9, 4), architectures=["gfx942"])
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert capability_of(GPU) == (8, 0) and find_device(Config(), LaunchInfo()) == GPU
    with pytest.raises(UserError, match="--fp8-format needs a GPU"):
        find_device(Config(fp8_format="hybrid"), LaunchInfo())


def test_what_joins_a_grid_of_gpus_has_chosen_their_kernels():
    """train.py, generate and every benchmark, by the same function."""
    files = [path.read_text() for path in [*ROOT.glob("nanodomino/*/*.py"), *ROOT.glob("benchmarks/*.py")]]
    joining = [text for text in files if " start_world(" in text and "def start_world" not in text]
    assert len(joining) >= 4 and all("choose_kernels(" in text for text in joining)
