"""Muon computes what torch.optim.Muon computes on every layout, and a run resumes on another layout."""

import dataclasses

import pytest
import torch
from support.checkpoints import train_from
from support.fake_world import fake_world
from support.harness import FAMILIES, build, difference, full_tensors, relative, tiny, train_rank, weights_and_data

import train
from nanodomino.checkpoint.load import checkpoints_of
from nanodomino.estimate.rank import dry_run
from nanodomino.optim.muon import orthogonal

STEPS, MUON = 3, dict(optimizer="muon", lr=0.02, muon_momentum=0.8, weight_decay=0.3, global_batch_size=12)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, moe_ffn_hidden_size=24)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-8, 1e3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_scale_of_a_gradient_makes_no_difference(scale, dtype):
    """fp16 rounds 1e-8 to 0 or 6e-8, and cannot hold the square of 1e3; fp32 cannot hold that of 1e-30."""
    matrix = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, found = orthogonal(matrix, matrix.dtype), orthogonal((matrix * scale).float(), dtype)
    assert (found - expected).norm() < expected.norm() * (1e-5 if dtype == torch.float32 else 0.1)
    assert orthogonal(matrix.float() * 0, dtype).count_nonzero() == 0


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


LAYOUTS = [(2, dict(tensor_model_parallel_size=2, slices=2, zero_stage=0)),
           (4, dict(data_parallel_size=4, bucket_size=500)),
           (4, dict(tensor_model_parallel_size=2, data_parallel_size=2, zero_stage=2, sequence_parallel=True)),
           (8, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="zb-h1")),
           (4, dict(data_parallel_size=2, context_parallel_size=2, slices=2))]


@pytest.mark.parametrize("world_size, options", [
    *((world_size, FAMILIES["llama"] | layout) for world_size, layout in LAYOUTS),
    (4, EXPERTS | dict(tensor_model_parallel_size=2, expert_model_parallel_size=2))],
    ids=["tp", "dp", "tp-dp", "tp-pp-dp", "cp-dp", "tp-ep"])
def test_every_layout_computes_what_one_process_computes(pool, world_size, options):
    """A matrix may be cut over tp, and partitions of ZeRO may begin and end inside it."""
    config = tiny(world_size, **MUON, **options)
    alone = tiny(1, **MUON, **(EXPERTS if config.num_experts else FAMILIES["llama"]))
    weights, data = weights_and_data(alone, STEPS)
    (expected,) = pool.run(train_rank, alone, weights, data, STEPS, world_size=1)
    outcomes = pool.run(train_rank, config, weights, data, STEPS, world_size=config.world_size)
    assert relative(outcomes[0].losses, expected.losses) < 1e-9
    assert difference(full_tensors(outcomes, lambda outcome: outcome.weights),
                      full_tensors([expected], lambda outcome: outcome.weights)) < 1e-9


def test_a_run_resumes_on_another_layout(pool, tmp_path):
    """With the momentum of Muon and the moments of AdamW."""
    first, second = (tiny(4, **MUON, **layout) for _, layout in LAYOUTS[1:3])
    weights, data = weights_and_data(first, STEPS)
    straight = pool.run(train_from, first, weights, data, 0, STEPS, world_size=4)
    pool.run(train_from, first, weights, data, 0, 2, None, str(tmp_path), world_size=4)
    (checkpoint,) = checkpoints_of(tmp_path)
    resumed = pool.run(train_from, second, None, data, 2, STEPS, str(checkpoint), world_size=4)
    found, expected = (full_tensors(outcomes, lambda outcome: outcome.weights) for outcomes in (resumed, straight))
    assert difference(found, expected) < 1e-9


def test_a_dry_run_counts_what_the_gathers_send():
    """Each step gathers the updates of all buckets of matrices over dp, and this rank's matrices over tp."""
    config = tiny(4, tensor_model_parallel_size=2, data_parallel_size=2, num_layers=1, device="cpu", **MUON)
    adamw, muon = (dry_run(train, dataclasses.replace(config, optimizer=name)) for name in ("adamw", "muon"))
    h, ffn = config.hidden_size, config.ffn_hidden_size
    matrices = 8 * (4 * h * h + 2 * h * ffn)
    (old_calls, old_bytes), (calls, bytes_) = (run.traffic["dp", "all_gather"] for run in (adamw, muon))
    assert bytes_ - old_bytes == matrices // config.tp and calls > old_calls      # each rank's shards
    assert ("tp", "all_gather") not in adamw.traffic
    calls, bytes_ = muon.traffic["tp", "all_gather"]
    assert 2 <= calls <= 4 and matrices // 2 <= bytes_ <= matrices     # the half of the matrices that this rank updates
