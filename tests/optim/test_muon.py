"""Muon computes what torch.optim.Muon computes, on every layout, and resumes on another one."""

from pathlib import Path

import pytest
import torch
from support.fake_world import fake_world
from support.harness import (FAMILIES, build, difference, full_tensors, relative, tiny, train_rank, train_steps,
                             weights_and_data)
from support.runs import make_corpus, train_in_pool

import train
from nanodomino.checkpoint import load, save
from nanodomino.checkpoint.load import newest_intact_checkpoint
from nanodomino.estimate.rank import dry_run
from nanodomino.optim.muon import orthogonal

STEPS, MUON = 3, dict(optimizer="muon", lr=0.02, muon_momentum=0.8, weight_decay=0.3, global_batch_size=12)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24)


def test_all_directions_of_an_update_have_about_the_same_size():
    """Newton-Schulz' coefficients bring each singular value close to 1, and leave the directions as they are."""
    matrix = torch.randn(3, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ orthogonal(matrix, matrix.dtype) @ vh.mT
    assert (s.max(-1).values / s.min(-1).values > 2).all()
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all() and (found - torch.diag_embed(diagonal)).abs().max() < 1e-9


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-8, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_scale_of_a_gradient_makes_no_difference(scale, dtype):
    """fp16 rounds 1e-8 to 0 or 6e-8, and cannot hold the square of 1e3; fp32 cannot hold that of 1e-30."""
    matrix = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = orthogonal(matrix, matrix.dtype), orthogonal((matrix * scale).float(), dtype)
    assert (found - expected).norm() < expected.norm() * (1e-5 if dtype == torch.float32 else 0.1)
    assert orthogonal(matrix.float() * 0, dtype).count_nonzero() == 0


def test_a_run_trains_with_its_own_settings_and_adamws(pool, tmp_path):
    """With the estimate of memory that precedes it."""
    assert tiny(1, lr=None, optimizer="muon").lr == 2 * tiny(1, lr=None).lr, "by default"
    make_corpus(tmp_path)
    ended = train_in_pool(pool, tmp_path, "--optimizer", "muon", "--muon-momentum", 0.9, "--adam-beta1", 0.8,
                          "--train-iters", 1, "--run-dir", tmp_path / "run")
    assert ended.code == 0, ended.output


def test_each_step_is_torchs(monkeypatch):
    """torch rounds to bfloat16, which the test prevents. Gate and up, and q, k and v are updated by themselves."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    config = tiny(1, **FAMILIES["llama"], kv_channels=6, **MUON)       # q and k have more rows than columns
    weights, data = weights_and_data(config, STEPS)
    with fake_world(0, 1):
        outcome = train_rank(config, weights, data, STEPS)
        specs = {name: weight.spec for name, weight in train.model_builder(config, build(config)[0]).named_parameters()}
    ours, q_heads = {name: weight for name, (weight, _) in outcome.weights.items()}, config.num_attention_heads // 4
    matrices, others, rows = {}, {}, {}
    for name, weight in weights.items():
        inside, numbers = name.startswith("layers.") and weight.dim() == 2, torch.arange(len(weight))
        rows[name] = numbers.chunk(specs[name].shape[0] if len(specs[name].shape) == 3 else 1)
        if name.endswith("qkv.weight"):
            heads = numbers.view(4, q_heads + 2, config.kv_channels)
            rows[name] = [part.flatten() for part in heads.split([q_heads, 1, 1], dim=1)]
        (matrices if inside else others)[name] = [torch.nn.Parameter(weight[part]) for part in rows[name]]
    assert sorted(map(len, matrices.values())) == sorted([1, 1, 2, 3] * config.num_layers) and q_heads == 2
    decayed, plain = ([part for parts in others.values() for part in parts if (part.dim() > 1) == decays]
                      for decays in (True, False))
    muon = torch.optim.Muon([part for parts in matrices.values() for part in parts], weight_decay=config.weight_decay,
                            momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([dict(params=decayed, weight_decay=config.weight_decay),
                               dict(params=plain, weight_decay=0.0)],
                              betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    for step in range(STEPS):
        clip = min(1.0, config.clip_grad / (outcome.norms[step] + 1e-6))
        for name, parts in (matrices | others).items():
            for part, its_rows in zip(parts, rows[name]):
                part.grad = outcome.gradients[step][name][0][its_rows] * clip
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = train.learning_rate(step + 1, config)
            optimizer.step()
    theirs = {name: torch.cat(parts).detach()[torch.cat([*rows[name]]).argsort()]
              for name, parts in (matrices | others).items()}
    assert difference(ours, theirs) < 1e-9


LAYOUTS = [dict(tensor_model_parallel_size=2, slices=2, zero_stage=0), dict(data_parallel_size=4, bucket_size=500),
           dict(tensor_model_parallel_size=2, data_parallel_size=2, zero_stage=2, sequence_parallel=True),
           dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2, schedule="zb-h1"),
           dict(data_parallel_size=2, context_parallel_size=2, slices=2)]
CASES = [(layout, FAMILIES["llama"]) for layout in LAYOUTS] + [
    (dict(data_parallel_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2), EXPERTS)]


def world(layout) -> int:
    return torch.tensor([size for name, size in layout.items()
                         if name.endswith("parallel_size") and "expert" not in name]).prod().item()


@pytest.mark.parametrize("layout, model", CASES, ids=lambda value: "-".join(map(str, value.values()))[:40])
def test_every_layout_computes_what_one_process_computes(pool, layout, model):
    """A matrix may be cut over tp, and partitions of ZeRO may begin and end inside it."""
    alone, config = tiny(1, **MUON, **model), tiny(world(layout), **MUON, **model, **layout)
    weights, data = weights_and_data(alone, STEPS)
    (expected,) = pool.run(train_rank, alone, weights, data, STEPS, world_size=1)
    outcomes = pool.run(train_rank, config, weights, data, STEPS, world_size=config.world_size)
    assert relative(outcomes[0].losses, expected.losses) < 1e-9
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights),
                      full_tensors([expected], lambda outcome: outcome.weights)) < 1e-9


def save_rank(config, weights, data, folder):
    """Train two steps and save."""
    mesh, model, optimizer, _ = built = build(config, weights)
    train_steps(built, config, data, range(1, 3))
    saver = save.Saver(Path(folder), mesh, keep_last=1)
    saver.save(2, model, optimizer, config)
    saver.wait()
    assert saver.failure() is None


def resume_rank(config, data, folder):
    """Load the checkpoint and train the third step."""
    mesh, model, optimizer, _ = built = build(config)
    load.restore(newest_intact_checkpoint(Path(folder)), model, optimizer, mesh)
    return train_steps(built, config, data, range(3, 4))


def test_a_run_resumes_on_another_layout(pool, tmp_path):
    """With the momentum of Muon and the moments of AdamW."""
    first, second = (tiny(4, **MUON, **layout) for layout in LAYOUTS[1:3])
    weights, data = weights_and_data(first, STEPS)
    straight = pool.run(train_rank, first, weights, data, STEPS, world_size=4)
    pool.run(save_rank, first, weights, data, str(tmp_path), world_size=4)
    resumed = pool.run(resume_rank, second, data, str(tmp_path), world_size=4)
    assert difference(full_tensors(resumed, lambda outcome: outcome.weights),
                      full_tensors(straight, lambda outcome: outcome.weights)) < 1e-9


def test_a_dry_run_counts_what_the_gathers_send():
    """Each step gathers the updates of all buckets of matrices over dp, and this rank's matrices over tp."""
    config = tiny(4, tensor_model_parallel_size=2, data_parallel_size=2, num_layers=1, device="cpu", **MUON)
    adamw, muon = (dry_run(train, tiny(4, tensor_model_parallel_size=2, data_parallel_size=2, num_layers=1,
                                       device="cpu", **MUON | dict(optimizer=name))) for name in ("adamw", "muon"))
    h, ffn = config.hidden_size, config.ffn_hidden_size
    matrices = 8 * (4 * h * h + 2 * h * ffn)
    (old_calls, old_bytes), (calls, bytes_) = (run.traffic["dp", "all_gather"] for run in (adamw, muon))
    assert bytes_ - old_bytes == matrices // config.tp and calls > old_calls      # each rank's shards
    assert ("tp", "all_gather") not in adamw.traffic
    calls, bytes_ = muon.traffic["tp", "all_gather"]
    assert 2 <= calls <= 4 and matrices // 2 <= bytes_ <= matrices     # the half of the matrices that this rank updates
