"""Attention: documents in torch's varlen_attn, and which backward goes through autograd's engine.

varlen_attn equals attention with a bias: losses, gradients and weights, in float64. It runs here on CPUs, on top of
stand-ins for its two kernels (support/flash_on_cpu.py).
"""

from types import SimpleNamespace

import pytest
import torch
from support.fake_world import fake_world
from support.flash_on_cpu import flash_on_cpu
from support.harness import FAMILIES, build, check_against_reference, random_data, tiny

import train
from nanodomino.comm.device import StandIn, standing_for
from nanodomino.layers.attention_mask import AttentionInputs, uses_varlen


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def by_varlen(function, *arguments):
    """Return (what the function returns, how many attention cores ran)."""
    with flash_on_cpu() as sequences:
        return function(*arguments), len(sequences)


DOCUMENTS = dict(reset_position_ids=True, reset_attention_mask=True)


@pytest.mark.parametrize("layout", [
    dict(FAMILIES["qwen3"], tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True,
         **DOCUMENTS),
    dict(FAMILIES["llama"], context_parallel_size=2, tensor_model_parallel_size=2, seq_length=16, **DOCUMENTS),
    dict(FAMILIES["llama"], context_parallel_size=4, seq_length=24),
    dict(FAMILIES["llama"], tensor_model_parallel_size=2, pipeline_model_parallel_size=2, window_size=3),
    dict(FAMILIES["llama"], context_parallel_size=2, tensor_model_parallel_size=2, seq_length=16, window_size=5,
         full_attention_layers=1, **DOCUMENTS),
    dict(FAMILIES["llama"], context_parallel_size=4, cp_comm_type="a2a", num_query_groups=4, seq_length=16,
         window_size=2, **DOCUMENTS)],
    ids=["tp2-pp2", "cp2-tp2", "cp4-no-documents", "window", "window-cp2-tp2", "window-cp4-a2a"])
def test_training_equals_one_plain_process(pool, layout):
    """The other side is a plain model with a mask. Evaluation and recomputation take the same kernel. With context
    parallelism by all_gather, attention takes it without documents too."""
    config = tiny(4, **layout, slices=3, num_layers=2, recompute_granularity="full", micro_batch_size=6,
                  global_batch_size=12)
    ran = []

    def run(*given, world_size):
        outcomes, cores = zip(*pool.run(by_varlen, *given, world_size=world_size))
        ran.extend(cores)
        return outcomes

    check_against_reference(SimpleNamespace(run=run), config, steps=2)
    forwards = 2 * 2 + 1                                         # with recomputation, and one evaluation
    microbatches = forwards * config.microbatches + 3 * (config.pp > 1)              # and a pipeline's warm-up
    assert sum(ran) == microbatches * config.num_layers * config.tp * config.cp * config.slices


def test_the_warm_up_runs_the_kernel():
    """A kernel that a GPU loads within the first step would wait for the whole device."""
    config = tiny(1, reset_attention_mask=True, num_layers=1)
    with fake_world(0, 1), flash_on_cpu() as sequences:
        build(config, warm=True)
    assert sequences == 2 * [[config.seq_length] * config.micro_batch_size]


@pytest.mark.parametrize("settings, fits", [
    ({}, True), (dict(dtype="float16"), True), (dict(dtype="float32"), False), (dict(dtype="float64"), False),
    (dict(attention_dropout=0.1), False), (dict(hidden_dropout=0.1), True), (dict(kv_channels=12), False),
    (dict(kv_channels=192), True), (dict(kv_channels=200), False)], ids=str)
def test_what_the_kernel_can_compute(monkeypatch, settings, fits):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert uses_varlen(tiny(1, **dict(dtype="bfloat16", kv_channels=8) | settings), CUDA) == fits


@pytest.mark.parametrize("device, built, capability, uses", [
    (CUDA, True, (8, 0), True), (CUDA, True, (9, 0), True), (CUDA, True, (7, 5), False), (CUDA, False, (9, 0), False),
    (CPU, True, (9, 0), False)])
def test_which_devices_have_the_kernel(monkeypatch, device, built, capability, uses):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    with standing_for(StandIn(capability=capability)):
        assert uses_varlen(tiny(1, dtype="bfloat16", kv_channels=8), device) == uses


# ---- backward

@pytest.mark.parametrize("rank", [0, 7], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_in_a_step_the_engine_runs_for_the_loss_alone(monkeypatch, rank, dropout):
    """Once per microbatch on the last stage, and once per attention and slice if there is attention dropout.
    The engine hands each GPU's work over to a thread of its own and waits for it, with nothing to do meanwhile."""
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3, num_layers=4,
                  attention_dropout=dropout)
    runs, run = [], torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", lambda *arguments, **options: (
        runs.append(1) or run(*arguments, **options)))
    with fake_world(rank, 8):
        mesh, model, optimizer, stage = build(config, warm=False)
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
    attentions = len(model.layers) * config.slices if dropout else 0
    assert len(runs) == config.microbatches * (model.post_process + attentions)


def test_scores_with_dropout_do_not_overflow_fp16():
    """Unscaled dot products of 64 numbers up to 40 would exceed fp16's 65504."""
    config = tiny(1, hidden_size=128, num_attention_heads=2, num_layers=1, dtype="float16")
    with fake_world(0, 1):
        _, model, _, _ = build(config)
    attention = model.chunks[0].sublayers[0]
    qkv = torch.full((1, config.seq_length, 3 * 128), 40.0, dtype=torch.float16)
    masks = torch.ones(1, 2, config.seq_length, config.seq_length)
    assert attention.core(qkv, AttentionInputs(masks, None, None)).isfinite().all()
    assert float((qkv[0, 0, :64].double() ** 2).sum()) > 65504
