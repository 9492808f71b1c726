"""Fused attention's backward is one call of its autograd node; attention with dropout goes through autograd's engine.

The engine hands each GPU's work over to a thread of its own and waits for it: at every layer and slice, with nothing to
do meanwhile. exactness/test_layouts.py compares the gradients of both ways.
"""

import pytest
import torch
from support.fake_world import fake_world
from support.harness import build, random_data, tiny

import train
from nanodomino.layers.attention_mask import AttentionInputs


@pytest.mark.parametrize("rank", [0, 7], ids=["first-stage", "last-stage"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_in_a_step_the_engine_runs_for_the_loss_alone(monkeypatch, rank, dropout):
    """Once per microbatch on the last stage, and once per attention and slice if there is attention dropout."""
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
