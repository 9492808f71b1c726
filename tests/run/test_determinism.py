"""Which kernels a run chooses. Copies of a parameter that differ in a bit are named."""

import os

import pytest
import torch
from support.harness import build, random_data, tiny
from support.runs import TINY, main_on_rank, make_corpus

import train
from nanodomino.comm.device import choose_kernels
from nanodomino.run.session import drift_warning


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
        choose_kernels(tiny(2, compile=True, **layout), torch.device("cpu"))
        assert inductor.deterministic == deterministic


def test_gathered_keys_need_a_bias_if_heads_are_too_large_for_varlen_attention():
    found = [tiny(2, context_parallel_size=2, dtype="bfloat16", kv_channels=size).uses_attention_bias
             for size in (192, 256)]
    assert found == [False, True]


BOX = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=12)
EXPERTS = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, num_experts=4, num_layers=2,
               disable_bias_linear=True, moe_router_enable_expert_bias=True)


def nudged_rank(config, data, nudges):
    """Return the warnings before and after each (rank, name, place) of `nudges` changes the last bit of an element."""
    mesh, model, optimizer, stage = build(config)
    train.train_step(1, stage, optimizer, data, config, mesh)
    before = drift_warning(model, mesh)
    for rank, name, place in nudges:
        if rank == torch.distributed.get_rank():
            numbers = dict(model.named_parameters())[name].detach().view(-1)
            numbers.view({4: torch.int32, 2: torch.int16}[numbers.element_size()])[place] ^= 1
    return before, drift_warning(model, mesh)


@pytest.mark.parametrize("options, nudges", [
    (BOX, [(1, "layers.0.attention.norm.weight", 0), (2, "layers.0.mlp.dense_h_to_4h.weight", 5)]),     # tp and dp
    (BOX, [(7, "embedding.word_embeddings.weight", 9)]),                                                # tied
    (BOX, [(4, f"layers.2.{name}", 1) for name in ("attention.norm.bias", "mlp.norm.bias", "mlp.norm.weight")]),
    # with four replicas and ep 2, an expert has a copy two replicas away
    (EXPERTS, [(4, "layers.0.mlp.experts.dense_h_to_4h", 5)]), (EXPERTS, [(5, "layers.1.mlp.router.expert_bias", 2)])],
    ids=["tp and dp", "tied", "many", "expert", "expert bias"])
def test_copies_that_differ_in_a_bit_are_named(pool, options, nudges):
    """Replicated parameters over tp, all over dp, the tied embedding on the first and last stage, the router on all
    ranks: each is compared only with its own copies."""
    config = tiny(8, **options, dtype="bfloat16")
    results = pool.run(nudged_rank, config, random_data(config, 1), nudges)
    names = [name for _, name, _ in nudges]
    assert len(set(results)) == 1 and results[0][0] == ""
    assert f"have drifted apart ({', '.join(names)}), so" in results[0][1], results[0][1]
