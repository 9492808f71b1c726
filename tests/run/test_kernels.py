"""Which kernels a run chooses, and which one of attention it names."""

import os

import pytest
import torch
from support.harness import tiny
from support.jobs import TINY, make_corpus
from support.train_in_pool import main_on_rank
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from nanodomino.layers.attention import fused_attention
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


class Operations(TorchDispatchMode):
    """Collects the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("documents", [True, False])
def test_the_kernel_that_is_named_is_the_kernel_that_runs(flash, documents):
    config = tiny(1, num_query_groups=2, reset_attention_mask=documents)
    q, k = (torch.randn(1, heads, config.seq_length, config.kv_channels, dtype=config.params_dtype)
            for heads in (config.num_attention_heads, config.num_query_groups))
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(flash)
    try:
        name = kernels.attention_kernel(config, torch.device("cpu"))
        with Operations() as operations:
            fused_attention(q, k, k, torch.zeros(1, 1, *2 * [config.seq_length]).to(q.dtype) if documents else None)
    finally:
        torch.backends.cuda.enable_flash_sdp(before)
    assert name == ("flash attention" if flash else "math")
    assert ("aten._scaled_dot_product_flash_attention_for_cpu.default" in operations.names) == flash


def test_the_start_names_the_kernel_of_a_gpu(monkeypatch):
    """It asks torch about a rank's heads, of whole samples, which need a gradient."""
    asked = []

    def choice(query, key, value, attn_mask, is_causal, enable_gqa):
        asked.append((query.shape, key.shape, query.dtype, attn_mask, is_causal, enable_gqa, query.requires_grad))
        return SDPBackend.CUDNN_ATTENTION.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    config = tiny(2, tensor_model_parallel_size=2, num_query_groups=2, dtype="bfloat16", kv_channels=4)
    with FakeTensorMode():
        assert kernels.in_words(config, torch.device("cuda")) == ", cudnn attention"
    s = config.seq_length
    assert asked == [((1, 4, s, 4), (1, 1, s, 4), torch.bfloat16, None, True, True, True)]
    assert kernels.in_words(config, torch.device("cpu")) == ""
    dropout, documents = tiny(2, attention_dropout=0.1), tiny(2, reset_attention_mask=True)
    assert kernels.in_words(dropout, torch.device("cuda")) == ", attention by matmuls and softmax"
    monkeypatch.setattr(kernels, "uses_varlen", lambda config, device: True)
    assert kernels.in_words(documents, torch.device("cuda")) == ", flash attention by document"


@pytest.mark.parametrize("dtype, precision, said", [("float32", "highest", True), ("float32", "high", False),
                                                    ("bfloat16", "highest", False), ("float64", "highest", False)])
def test_the_start_says_if_a_gpus_matrix_units_stay_idle(monkeypatch, dtype, precision, said):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    config = tiny(1, attention_dropout=0.1, dtype=dtype)
    assert ("without TF32 (--bf16 is" in kernels.in_words(config, torch.device("cuda"))) == said
    assert kernels.in_words(config, torch.device("cpu")) == ""
