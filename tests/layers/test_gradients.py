"""Fused attention's backward is one call of its autograd node; attention with dropout goes through autograd's engine.

The engine hands each GPU's work over to a thread of its own and waits for it: at every layer and slice, with nothing to
do meanwhile. Both ways give the gradients of plain autograd.
"""

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny

import train
from nanodomino.layers.attention_mask import AttentionInputs


@pytest.fixture
def engine_runs(monkeypatch):
    """Return a list that grows by one entry each time autograd's engine runs."""
    runs, run = [], torch.autograd._engine_run_backward
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", lambda *arguments, **options: (
        runs.append(1) or run(*arguments, **options)))
    return runs


@pytest.mark.parametrize("dropout, runs", [(0.0, 0), (0.3, 1)], ids=["fused", "by-hand"])
def test_attentions_gradient_is_autograds_with_the_engine_and_without(engine_runs, dropout, runs):
    config, generator = tiny(2, tensor_model_parallel_size=2), torch.Generator().manual_seed(1)
    with fake_world(0, 2):
        _, model, _, _ = build(config)
    attention = model.chunks[0].sublayers[0]
    b, s, heads, h = 2, config.seq_length, attention.groups, config.hidden_size // 2
    qkv = torch.randn(b, s, 3 * h, generator=generator, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(b, s, h, generator=generator, dtype=torch.float64)
    mask = (torch.rand(b, heads, s, s, generator=generator) > dropout).double() / (1 - dropout) if dropout else None
    inputs = AttentionInputs(mask, None, None)
    expected = attention.core(qkv, inputs)
    (expected_gradient,) = torch.autograd.grad(expected, qkv, gradient)
    engine_runs.clear()
    with torch.no_grad():
        forward, backward = attention.kernels(lambda function: function)
        activation, kept = attention.core_forward(forward, qkv.detach(), inputs, training=True)
        found = attention.core_backward(backward, gradient, kept)
    assert len(engine_runs) == runs and torch.equal(activation, expected)
    assert torch.allclose(found, expected_gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("rank", [0, 7], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_in_a_step_the_engine_runs_for_the_loss_alone(engine_runs, rank, dropout):
    """Once per microbatch on the last stage, and once per attention and slice if there is attention dropout."""
    config = tiny(8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3, num_layers=4,
                  attention_dropout=dropout)
    with fake_world(rank, 8):
        mesh, model, optimizer, stage = build(config, warm=False)
        train.train_step(1, stage, optimizer, random_data(config, 1), config, mesh)
    attentions = len(model.layers) * config.slices if dropout else 0
    assert len(engine_runs) == config.microbatches * (model.post_process + attentions)


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
