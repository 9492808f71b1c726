"""Which kernels a run chooses."""

import os

import pytest
import torch
from support.harness import tiny
from support.runs import TINY, main_on_rank, make_corpus

from nanodomino.comm.world import StandIn, standing_for
from nanodomino.run import kernels


def kernels_of_a_run(flags):
    """Return (exit code, torch's choices) after a run of train.py."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    code = main_on_rank(flags, ()).code
    return code, dict(strict=torch.get_deterministic_debug_mode() == 2, cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
                      fills=torch.utils.deterministic.fill_uninitialized_memory,
                      workspace=os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


USUAL = dict(strict=False, cudnn=True, fills=True, workspace=None)


@pytest.mark.parametrize("flags, changes", [
    ([], {}), (["--reset-attention-mask"], dict(cudnn=False)),
    (["--deterministic-mode"], dict(strict=True, cudnn=False, fills=False, workspace=":4096:8"))],
    ids=["usual", "documents", "deterministic"])
def test_the_kernels_of_a_run(pool, tmp_path, flags, changes):
    """In torch's warn-only mode the backward of fused attention would stay nondeterministic. With a mask, the backward
    of cuDNN's attention may return NaN."""
    make_corpus(tmp_path)
    flags = [*TINY, "--seq-length", "12", "--data-path", str(tmp_path / "tokens"), "--train-iters", "2", *flags,
             "--run-dir", str(tmp_path / "run"), "--sample-tokens", "2"]
    assert pool.run(kernels_of_a_run, flags, world_size=1) == [(0, USUAL | changes)]


@pytest.mark.parametrize("layout, deterministic", [
    (dict(tensor_model_parallel_size=2), True), (dict(data_parallel_size=2), False)])
def test_the_compiler_chooses_the_same_kernels_on_each_tensor_parallel_rank(layout, deterministic):
    from torch._inductor import config as inductor
    with inductor.patch(deterministic=False):
        kernels.choose_kernels(tiny(2, compile=True, **layout), torch.device("cpu"))
        assert inductor.deterministic == deterministic


@pytest.mark.parametrize("device, capability, installed, used", [
    ("cuda", (9, 0), True, True), ("cuda", (8, 0), True, False), ("cuda", (10, 0), True, False),
    ("cuda", (9, 0), False, False), ("cpu", (9, 0), True, False)])
def test_flash_attention_3_is_used_where_it_runs(monkeypatch, device, capability, installed, used):
    """On Hopper, without --deterministic-mode. Only a GPU shows whether its numbers are right."""
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if installed else None)
    with standing_for(StandIn(capability=capability)):
        kernels.choose_kernels(tiny(1), torch.device(device))
        assert not kernels.can_use_flash_attention_3(tiny(1, deterministic_mode=True), torch.device(device))
    assert activated == ["FA3"] * used and "FA3" in torch.nn.attention.list_flash_attention_impls()


def test_gathered_keys_need_a_bias_if_heads_are_too_large_for_varlen_attention():
    found = [tiny(2, context_parallel_size=2, dtype="bfloat16", kv_channels=size).uses_attention_bias
             for size in (192, 256)]
    assert found == [False, True]


@pytest.mark.parametrize("dtype, precision, said", [("float32", "highest", True), ("float32", "high", False),
                                                    ("bfloat16", "highest", False), ("float64", "highest", False)])
def test_the_start_says_if_a_gpus_matrix_units_stay_idle(monkeypatch, dtype, precision, said):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    config = tiny(1, dtype=dtype)
    assert ("without TF32 (--bf16 is" in kernels.in_words(config, torch.device("cuda"))) == said
    assert kernels.in_words(config, torch.device("cpu")) == ""
