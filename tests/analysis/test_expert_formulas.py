"""The formulas for models with experts: against published numbers, by hand, and against ranks that run."""

import dataclasses
import math
from unittest import mock

import pytest
import torch
from support.harness import tiny
from support.measured_ranks import PEAK, check_memory, held_rank
from support.published_sizes import cluster, machine

from benchmarks import comm, plan
from nanodomino.analysis import expected_memory, expected_traffic, sizes, step_time
from nanodomino.analysis.sublayer_memory import layer_tape_bytes
from nanodomino.layers.router import Router
from nanodomino.model import meta_stage

EP2, EP4 = (dict(expert_model_parallel_size=ep) for ep in (2, 4))
EXPERTS = dict(num_experts=4, disable_bias_linear=True)
SHARED = dict(moe_shared_expert_intermediate_size=64)
SIGMOID = dict(moe_router_score_function="sigmoid")


def moe(world_size, **changes):
    """Return the Config of qwen3-30b-a3b, or of another preset, with its published vocabulary."""
    return cluster(world_size, **{"model": "qwen3-30b-a3b", "vocab_size": 151936, "tensor_model_parallel_size": 1,
                                  "pipeline_model_parallel_size": 1, **changes})


# ---- by hand

@pytest.mark.parametrize("model, vocabulary, active", [
    ("mixtral-8x7b", 32000, 12_879_925_248), ("qwen3-30b-a3b", 151936, 3_353_032_704)])
def test_a_token_uses_the_published_number_of_parameters(model, vocabulary, active):
    """12.9 and 3.3 billion; the FLOPs count these."""
    config = moe(1, model=model, vocab_size=vocabulary)
    assert sizes.active_parameter_count(config) == active
    heads = config.num_attention_heads * config.kv_channels
    assert sizes.flops_per_token(config) == 6 * active + 12 * config.num_layers * heads * config.seq_length


def test_without_experts_all_parameters_are_active():
    config = cluster(1)
    assert sizes.active_parameter_count(config) == sizes.parameter_count(config)


def test_the_ranks_of_ep_and_expert_dp():
    """The grid of 2 stages x 4 replicas x 2 tp ranks; ep 2: replicas 0, 1 share the experts, and so do 2, 3."""
    config = tiny(16, **EXPERTS, **EP2, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, num_layers=2)
    at = sizes.mesh_at(config, pp_rank=1, dp_rank=3, tp_rank=1)
    assert at.rank_of(1, 3, 1) == 15
    assert {name: sizes.group_ranks(at, name) for name in ("dp", "ep", "expert_dp")} == {
        "dp": [9, 11, 13, 15], "ep": [13, 15], "expert_dp": [11, 15]}


@pytest.mark.parametrize("zero_stage, dtype, fixed, shared", [
    (1, "bfloat16", 6, 12), (1, "float32", 8, 8), (2, "bfloat16", 2, 16), (0, "bfloat16", 18, 0)])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_the_state_of_experts_is_sharded_over_d_by_ep_replicas(zero_stage, dtype, fixed, shared, ep):
    config = moe(8, dtype=dtype, zero_stage=zero_stage, expert_model_parallel_size=ep)
    assert expected_memory.state_bytes_per_parameter(config, "expert_dp") == fixed + shared * ep / 8
    by_hand = 0
    for weight in meta_stage(config).parameters():
        replicas = 8 / ep if weight.spec.kind.replicas == "expert_dp" else 8
        by_hand += weight.numel() * (fixed + shared / replicas)
    state = expected_memory.state_bytes(config, sizes.mesh_at(config))
    assert sum(state.values()) == pytest.approx(by_hand, rel=1e-4)
    assert expected_memory.average_state_bytes(config) == pytest.approx(by_hand, rel=1e-3)


def test_the_average_state_counts_layers_with_and_without_experts():
    config = moe(1, moe_layer_freq=3, num_layers=12)
    held = sum(expected_memory.state_bytes(config, sizes.mesh_at(config)).values())
    assert expected_memory.average_state_bytes(config) == pytest.approx(held, rel=1e-3)


@pytest.mark.parametrize("granularity, stream, rows, inside", [("none", 4, 2, 3), ("selective", 4, 2, 2),
                                                                 ("full", 2, 2, 0)])
def test_experts_keep_their_rows_and_results_whatever_is_recomputed(granularity, stream, rows, inside):
    """Beside attention: (2 + 2 k) X, k ffn/h X after SwiGLU and 2 k ffn/h X before it."""
    config = moe(1, recompute_granularity=granularity)
    kept = layer_tape_bytes(config)
    x, k, ffn = sizes.hidden_bytes(config), 8, 768 / 2048
    assert kept.get("norm inputs", 0) + kept.get("column-parallel inputs", 0) == stream * x
    assert kept["experts' rows"] + kept["experts' results"] == rows * k * x
    assert kept.get("experts before activation", 0) + kept.get("experts after activation", 0) == inside * k * ffn * x
    assert kept["router"] + kept["row order"] < 0.05 * sum(kept.values())


def test_all_to_alls_of_a_layer():
    """Forward 2 k X and the counts, backward 2 k X; a slice makes as many calls as a microbatch would."""
    config = moe(8, **EP4, micro_batch_size=2, slices=2)
    at = sizes.mesh_at(config)
    counts, forward, backward = expected_traffic.expert_parallel_traffic(config, at)
    layers = config.num_layers * config.microbatches
    assert forward.bytes == backward.bytes == layers * 2 * 8 * sizes.hidden_bytes(config)
    assert forward.calls == backward.calls == 2 * layers * 2 and (forward.backward, backward.backward) == (False, True)
    assert counts.bytes == layers * 2 * 8 * 128 and counts.calls == layers * 2
    assert expected_traffic.bytes_sent("all_to_all", 1024, 4) == 1024 * 3 / 4
    assert not expected_traffic.expert_parallel_traffic(moe(8), at)


def test_the_matmuls_of_all_ranks_with_experts_are_the_models_flops():
    config = moe(32, expert_model_parallel_size=8, pipeline_model_parallel_size=4)
    forward = sum(sum(step_time.forward_flops(config, at, chunk)) for at in sizes.all_meshes(config)
                  for chunk in sizes.stage_chunks(config, at)) * config.microbatches
    looked_up = 6 * config.vocab_size * config.hidden_size
    said = (sizes.flops_per_token(config) - looked_up) * config.global_batch_size * config.seq_length
    assert 3 * forward == pytest.approx(said, rel=1e-3)


@pytest.mark.parametrize("slices, hidden", [(1, False), (2, True)])
def test_slices_hide_fast_all_to_alls(slices, hidden):
    """In forward, which has no weight gradients."""
    config = moe(8, **EP2, micro_batch_size=2, slices=slices)
    one, at = machine(matmul_rate=1e12, intra_host_rate=1e10), sizes.mesh_at(config)
    cost = step_time.action_costs(config, one, at)["forward", 0]
    wires = [found for found in expected_traffic.expert_parallel_traffic(config, at) if not found.backward]
    assert cost.communication == pytest.approx(
        step_time.communication_seconds(config, one, at, wires) / config.microbatches)
    assert 0 < cost.communication < cost.compute / 2
    assert step_time.action_seconds(config, cost) == pytest.approx(cost.compute + (not hidden) * cost.communication)


def test_columns_hide_no_all_to_all():
    plain, cut = (moe(16, **EP2, tensor_model_parallel_size=2, micro_batch_size=1, slices=1, columns=columns)
                  for columns in (1, 4))
    one, at = machine(matmul_rate=1e12, intra_host_rate=1e10), sizes.mesh_at(plain)
    waited = [step_time.action_seconds(config, cost) - cost.compute for config in (plain, cut)
              for cost in [step_time.action_costs(config, one, at)["forward", 0]]]
    cost = step_time.action_costs(plain, one, at)["forward", 0]
    assert 0 < cost.exchanges < cost.communication and waited[0] == pytest.approx(cost.communication)
    assert waited[1] == pytest.approx(cost.exchanges + (cost.communication - cost.exchanges) / 4)


def test_a_step_takes_as_long_as_slow_all_to_alls():
    config = moe(8, expert_model_parallel_size=8, micro_batch_size=2, slices=2, zero_stage=0, global_batch_size=16)
    one, at = machine(inter_host_rate=1e9, intra_host_rate=1e9, ranks_per_host=4), sizes.mesh_at(config)
    wires = step_time.communication_seconds(config, one, at, expected_traffic.expert_parallel_traffic(config, at))
    assert step_time.step_seconds(config, one)["tp wires"] == pytest.approx(wires)


def test_nccl_rings_of_ep_and_expert_dp():
    """Rows and counts have a ring each; the experts' gradients need one unless every replica has other experts."""
    rings = [expected_memory.communicator_bytes(dataclasses.replace(config, device="cuda"), sizes.mesh_at(config))
             / expected_memory.CONNECTION_BYTES / expected_memory.CHANNELS
             for config in (moe(8), moe(8, **EP2), moe(8, expert_model_parallel_size=8))]
    assert rings == [2, 5, 4]


# ---- against ranks that run

def balanced(self, logits):
    """Stand in for Router.choose: all experts are chosen equally often, by all samples alike."""
    experts = torch.arange(logits.shape[:2].numel() * self.topk) % self.num_experts
    return experts.view(*logits.shape[:2], -1), experts.bincount(minlength=self.num_experts)


def held_balanced(config):
    with mock.patch.object(Router, "choose", balanced):
        return held_rank(config)


def case(world_size, name, *options, exhaustive=False, **more):
    return pytest.param(world_size, {key: value for option in (*options, more) for key, value in option.items()},
                        id=name, marks=pytest.mark.exhaustive if exhaustive else [])


TP2, PP2 = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)


@pytest.mark.parametrize("world_size, changes", [
    case(1, "one-process", SHARED, slices=2, moe_router_enable_expert_bias=True, dtype="bfloat16"),
    case(2, "zero2", EP2, SIGMOID, zero_stage=2, moe_router_topk=1, moe_router_enable_expert_bias=True,
         dtype="bfloat16"),
    case(4, "tp2", EP2, TP2, SHARED, slices=2, sequence_parallel=True, recompute_granularity="selective"),
    case(4, "pp2", EP2, PP2, schedule="zb-h1", slices=2, moe_layer_freq=2, num_layers=3, swiglu=True),
    case(4, "expert-dp", EP2, SIGMOID, SHARED, recompute_granularity="full", dtype="float32", hidden_dropout=0.1),
    *(case(*one, exhaustive=True) for one in (
        (4, "ep4", EP4, dict(slices=2, moe_router_pre_softmax=True)),
        (4, "expert-dp-zero2", EP2, dict(zero_stage=2, moe_router_topk=4, dtype="bfloat16")),
        (4, "expert-dp-zero0", EP2, dict(zero_stage=0, moe_router_enable_expert_bias=True, optimizer="lion")),
        (8, "tp2-pp2", EP2, TP2, PP2, SHARED, dict(schedule="paired", slices=2, columns=2)),
        (8, "expert-dp-pp2", EP2, PP2, dict(schedule="interleaved", num_layers=4, micro_batch_size=2)))),
])
def test_with_balanced_experts_state_tapes_collectives_and_bytes_equal_the_formulas(pool, world_size, changes):
    sizes_of_the_model = dict(hidden_size=64, seq_length=32, ffn_hidden_size=128, micro_batch_size=2, num_layers=2,
                              global_batch_size=8, device="cpu")
    config = tiny(world_size, **sizes_of_the_model | EXPERTS | changes)
    for (held, said), (counted, expected) in pool.run(held_balanced, config, world_size=world_size):
        check_memory(held, said, peak=math.inf if config.zero_stage == 2 else PEAK)    # ZeRO-2: see test_plan.py
        assert counted == expected


def test_however_tokens_choose_the_bytes_of_all_to_alls_agree_in_total(pool):
    """Calls agree on each rank, but a rank with popular experts returns more results."""
    config = tiny(4, **EXPERTS, **EP4, global_batch_size=12, num_layers=2, slices=2, device="cpu")
    found = [traffic for _, traffic in pool.run(held_rank, config, world_size=4)]
    counted, expected = ([traffic[side] for traffic in found] for side in (0, 1))
    assert counted != expected and comm.comparable(counted) == comm.comparable(expected)
    text, record = comm.report(config, counted)
    assert record["exact"] is True and "its formula, if the bytes of all-to-alls are added up" in text
    assert {line.split()[-1] == "total" for line in text.splitlines() if "all_to_all" in line} == {True}
    wrong = [counted[0] | {("ep", "all_to_all"): (1, 2)}, *counted[1:]]
    assert comm.report(config, wrong)[1]["exact"] is False


# ---- as a person runs them

def test_a_plan_for_experts_names_active_parameters_and_proposes_more_expert_parallelism():
    config = dataclasses.replace(moe(64, **EP4), device="cuda")
    assert {"expert_model_parallel_size": 16} in plan.remedies(config)
    (line,) = plan.experts_text(config)
    assert "128 experts in a layer" in line and "3,353,032,704 parameters" in line and "6.75 bytes" in line
    assert not plan.experts_text(cluster(8))
