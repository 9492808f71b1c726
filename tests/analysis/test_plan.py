"""bench.py comm, memory, recompute and plan: the formulas against measurements and real steps."""

import collections
import dataclasses
import json
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from support.fake_world import fake_world
from support import ROOT
from support.measured_ranks import ACTIVATIONS, PEAK, check_memory, held_rank
from support.published_sizes import cluster, machine
from support.harness import FAMILIES, tiny
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from benchmarks import comm, memory, plan
from benchmarks.common import RandomTokens, config_of, main, parse, seconds_text
from nanodomino import pipeline
from nanodomino.analysis import expected_memory, expected_traffic, sizes, step_time, sublayer_memory
from nanodomino.analysis.sizes import flops_per_token, parameter_count
from nanodomino.config.config import Config
from nanodomino.config.presets import PRESETS
from nanodomino.domino import Domino
from nanodomino.errors import UserError
from nanodomino.layers.fp8 import RECIPES
from nanodomino.layers.norms import NORMALIZATIONS
from nanodomino.mesh import make_mesh
from nanodomino.model import meta_stage
from nanodomino.overlap.recompute import GRANULARITIES
from nanodomino.schedules.definitions import SCHEDULES, Schedule
from nanodomino.schedules.simulation import peak_microbatches
from nanodomino.zero import ZeroOptimizer

TIME = 4.0               # a factor: on a machine that others use too
TP8 = dict(tensor_model_parallel_size=8)


# ---- formulas on their own

@pytest.mark.parametrize("model, parameters", [
    ("gpt2", 124_439_808), ("gpt2-xl", 1_557_611_200), ("gpt3-13b", 12_853_386_240), ("llama2-7b", 6_738_415_616),
    ("llama3-8b", 8_030_261_248), ("llama3.2-1b", 1_235_814_400), ("qwen2.5-0.5b", 494_032_768),
    ("qwen3-0.6b", 596_049_920), ("smollm2-135m", 134_515_008)])
def test_a_preset_with_its_published_vocabulary_has_the_published_number_of_parameters(model, parameters):
    """A plan for --model llama3-8b must not count GPT-2's vocabulary."""
    flags = parse(plan, ["plan", "--model", model, "--gpus", "1", "--tp", "1", "--pp", "1"])
    plan.processes(flags)
    assert parameter_count(config_of(flags, 1)) == parameters


@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl", "gpt3-13b"])
@pytest.mark.parametrize("tp, pp, untied", [(1, 1, False), (1, 1, True), (2, 4, False), (4, 3, True), (8, 2, False)])
def test_the_ranks_of_a_replica_hold_every_parameter_once(model, tp, pp, untied):
    """Shards add up; replicas, the copy of a tied matrix and the vocabulary's padding are left out."""
    heads = -(-PRESETS[model]["num_attention_heads"] // tp) * tp
    config = cluster(tp * pp, model=model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                     hidden_size=64 * heads, num_attention_heads=heads, untie_embeddings_and_output_weights=untied)
    held = sum(weight.numel() for at in sizes.all_meshes(config)
               for weight in sizes.stage_model(config, at).parameters()
               if weight.spec.kind.shards or at.tp_rank == 0)
    words = config.padded_vocab_size * config.hidden_size
    copies = (2 if untied or pp > 1 else 1) * words - (2 if untied else 1) * config.vocab_size * config.hidden_size
    assert held - copies == parameter_count(config)


@pytest.mark.parametrize("zero_stage, dtype, fixed, shared", [
    (1, "bfloat16", 6, 12), (1, "float32", 8, 8), (2, "bfloat16", 2, 16), (2, "float32", 4, 12),
    (0, "bfloat16", 18, 0)])
@pytest.mark.parametrize("dp", [1, 4])
def test_bytes_of_model_state_per_parameter(
        zero_stage, dtype, fixed, shared, dp):
    config = cluster(8 * dp, dtype=dtype, zero_stage=zero_stage, tensor_model_parallel_size=8)
    assert expected_memory.state_bytes_per_parameter(config) == fixed + shared / dp
    state = expected_memory.state_bytes(config, sizes.mesh_at(config))
    parameters = sum(weight.numel() for weight in meta_stage(config).parameters())
    assert sum(state.values()) / parameters == pytest.approx(fixed + shared / dp, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedule(schedule):
    """Two chunks of a stage are half a microbatch each: the 40 layers divide evenly."""
    for pp, m in [(1, 1), (2, 1), (4, 3), (4, 16), (10, 8)]:
        config = cluster(pp, pipeline_model_parallel_size=pp, schedule=schedule, global_batch_size=m)
        for stage, actions in enumerate(config.timetable.rows):
            alive = expected_memory.microbatches_in_flight(config, sizes.mesh_at(config, stage))
            assert alive == peak_microbatches(actions) / config.virtual_stages


def test_a_microbatch_in_flight_counts_by_its_chunks_layers():
    """Five layers in 2 x 2 chunks: the first stage's chunks have two layers and one."""
    config = cluster(2, pipeline_model_parallel_size=2, schedule="interleaved", num_layers=5, global_batch_size=2)
    first, last = (expected_memory.microbatches_in_flight(config, sizes.mesh_at(config, stage)) for stage in range(2))
    assert first == pytest.approx(2) and last == pytest.approx(1.5)


@pytest.mark.parametrize("schedule, fits", [("1f1b", 4), ("gpipe", 16), ("paired", 7), ("zb-h1", 4)])
def test_peak_number_of_tapes(schedule, fits):
    config = cluster(4, pipeline_model_parallel_size=4, schedule=schedule, global_batch_size=16)
    at = sizes.mesh_at(config)
    (chunk,) = sizes.stage_chunks(config, at)
    one = (10 * sum(sublayer_memory.layer_tape_bytes(config).values())
           + sum(expected_memory.chunk_ends_tape_bytes(config, at, chunk).values()))
    assert expected_memory.peak_tape_bytes(config, at) == pytest.approx(fits * one)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("granularity, stream, cut", [("none", 4, 12), ("selective", 4, 7), ("full", 2, 0)])
def test_activations_that_a_layer_keeps(granularity, stream, cut, tp, sequence_parallel):
    """(4 + 12/t) X; (4 + 7/t) X with selective and 2 X with full recomputation; sequence parallelism divides the 4 or 2
    by t. Norm statistics and log-sum-exp are small.
    """
    config = cluster(8, tensor_model_parallel_size=tp, recompute_granularity=granularity,
                     sequence_parallel=sequence_parallel)
    kept = sublayer_memory.layer_tape_bytes(config)
    small = sum(kept.pop(name, 0) for name in ("norm statistics", "logsumexp"))
    ours = (stream / tp if sequence_parallel else stream) + cut / tp
    assert sum(kept.values()) == ours * sizes.hidden_bytes(config) > 100 * small


def test_only_a_gpu_offloads_norm_inputs_to_its_host():
    """Full recomputation keeps 2 X per layer and microbatch in flight: here four of ten layers."""
    config = cluster(4, pipeline_model_parallel_size=4, global_batch_size=16, recompute_granularity="full",
                     device="cuda")
    at, away = sizes.mesh_at(config), dataclasses.replace(config, checkpoint_in_cpu=True)
    moved = 4 * 10 * 2 * sizes.hidden_bytes(config)
    assert expected_memory.peak_host_bytes(away, at) == moved and expected_memory.peak_host_bytes(config, at) == 0
    assert expected_memory.peak_tape_bytes(config, at) - expected_memory.peak_tape_bytes(away, at) == moved
    assert expected_memory.peak_tape_bytes(config, at) < 1.02 * moved + 5 * sizes.hidden_bytes(config)
    on_cpu, kept = (dataclasses.replace(one, device="cpu") for one in (away, config))
    assert expected_memory.peak_host_bytes(on_cpu, at) == 0
    assert expected_memory.peak_tape_bytes(on_cpu, at) == expected_memory.peak_tape_bytes(kept, at)


def test_split_weight_gradients_need_the_same_memory_with_recomputation():
    left = [sublayer_memory.layer_deferred_bytes(cluster(8, **TP8, recompute_granularity=one))
            for one in GRANULARITIES]
    assert left[0] == left[1] == left[2]


def test_split_weight_gradients_need_as_much_memory_as_the_tape_but_for_small_terms():
    """So delaying weight gradients leaves the peak memory as it is."""
    config = cluster(8, **TP8)
    kept, left = (sum(found.values()) for found in (sublayer_memory.layer_tape_bytes(config),
                                                    sublayer_memory.layer_deferred_bytes(config)))
    small = sublayer_memory.layer_tape_bytes(config)
    assert kept - left == small["norm statistics"] + small["logsumexp"] < 0.01 * kept


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_message_each_way_per_microbatch_and_stage_boundary(schedule, pp):
    config = cluster(pp, pipeline_model_parallel_size=pp, schedule=schedule, global_batch_size=8)
    sent = collections.Counter()
    for stage in range(pp):
        for one in expected_traffic.pipeline_traffic(config, sizes.mesh_at(config, stage)):
            sent[one.kind, one.why] += one.calls
            assert one.bytes == one.calls * sizes.hidden_bytes(config) and one.backward == (one.why == "gradients")
    inside = config.virtual_stages - 1 if pp == 1 or config.placement.folded else 0
    boundaries = (pp * config.virtual_stages - 1 - inside) * 8
    assert sent == ({(kind, why): boundaries for kind in ("send", "receive") for why in ("activations", "gradients")}
                    if boundaries else {})


def test_a_rings_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (1, 2, 8):
        scattered, gathered = (expected_traffic.bytes_sent(kind, 1024, ranks)
                               for kind in ("reduce_scatter", "all_gather"))
        assert expected_traffic.bytes_sent("all_reduce", 1024,
                                           ranks) == scattered + gathered == 2 * 1024 * (ranks - 1) / ranks


@pytest.mark.parametrize("slices, columns", [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("sequence_parallel, sums, calls", [(False, 4, 4), (True, 5, 10)])
def test_tensor_parallel_traffic_of_a_layer(slices, columns, sequence_parallel, sums, calls):
    """8 (t-1)/t X sent per layer and microbatch (1909.08053, section 3). With sequence parallelism four reduce-scatters
    and six all-gathers: two more all-gathers, 10 (t-1)/t X.
    """
    config = cluster(8, **TP8, micro_batch_size=2, slices=slices, columns=columns, sequence_parallel=sequence_parallel)
    found = [one for one in expected_traffic.tensor_parallel_traffic(config, sizes.mesh_at(config))
             if one.why.startswith("layers")]
    wire = sum(expected_traffic.bytes_sent(one.kind, one.bytes, 8) for one in found)
    assert wire / config.num_layers / config.microbatches == 2 * sums * 7 / 8 * sizes.hidden_bytes(config)
    assert sum(one.calls for one in found) == calls * config.num_layers * config.microbatches * slices * columns


def test_columns_are_counted_as_torch_cuts_them():
    """For example, 10 features in 8 chunks give only 5."""
    for size in range(1, 33):
        assert [expected_traffic.column_count(chunks, size) for chunks in range(1, size + 1)] == [
            len(torch.empty(size).chunk(chunks)) for chunks in range(1, size + 1)]


@pytest.mark.parametrize("model, depths", [("gpt3-13b", 0), ("llama3-8b", 0), ("llama3-8b", 2), ("qwen3-0.6b", 1)])
def test_the_matmuls_of_all_ranks_are_the_models_flops(model, depths):
    """Up to the vocabulary's padding, norms and biases; also with grouped queries, other head sizes and SwiGLU. With
    sequence parallelism no rank repeats another's part of a merge."""
    config = cluster(64, model=model, tensor_model_parallel_size=8, pipeline_model_parallel_size=4,
                     sequence_parallel=True, mtp_num_layers=depths)
    forward = sum(sum(step_time.forward_flops(config, at, chunk)) for at in sizes.all_meshes(config)
                  for chunk in sizes.stage_chunks(config, at)) * config.microbatches
    looked_up = 0 if config.tied else 6 * config.vocab_size * config.hidden_size       # of N, and no product
    said = (flops_per_token(config) - looked_up) * config.global_batch_size * config.seq_length
    assert 3 * forward == pytest.approx(said, rel=1e-3)


def test_zero_1_sends_6_bytes_per_parameter_and_4_per_tied_weight():
    """6 (d-1)/d per parameter; the owners of each 1/d of the tied embedding's V/t x h all-reduce it over two ranks."""
    config = cluster(32, **TP8, pipeline_model_parallel_size=2)
    at = sizes.mesh_at(config, 1)
    found = expected_traffic.optimizer_traffic(config, at)
    padded = sum(size for _, size in sizes.bucket_sizes(config, at))
    wire = {group: sum(expected_traffic.bytes_sent(one.kind, one.bytes, 2) for one in found if one.group == group)
            for group in ("dp", "embedding")}
    assert wire["dp"] == 6 * padded / 2
    assert wire["embedding"] == 4 * config.padded_vocab_size / 8 * config.hidden_size / 2


def test_zero_2_reduce_scatters_once_per_microbatch():
    """(4 m + 2)(d-1)/d per parameter; the tied embedding and the all-gather as in ZeRO-1."""
    one, two = (cluster(32, **TP8, pipeline_model_parallel_size=2, zero_stage=stage) for stage in (1, 2))
    at, m = sizes.mesh_at(two, 1), two.microbatches
    found = {stage: {(row.group, row.kind): row for row in expected_traffic.optimizer_traffic(config, at)}
             for stage, config in ((1, one), (2, two))}
    scattered = {stage: rows.pop(("dp", "reduce_scatter")) for stage, rows in found.items()}
    assert found[1] == found[2] and m == 512
    assert (scattered[2].calls, scattered[2].bytes) == (m * scattered[1].calls, m * scattered[1].bytes)


# ---- a step's time on imaginary machines

def test_with_free_communication_a_step_is_its_matmuls_and_a_bubble_of_p_minus_1_over_m():
    config = cluster(32, **TP8, pipeline_model_parallel_size=4, vocab_size=128, global_batch_size=16)
    parts = step_time.step_seconds(config, machine(matmul_rate=1e12))
    assert parts["bubble"] / parts["products"] == pytest.approx(3 / 16, rel=1e-3)
    assert sum(parts.values()) == pytest.approx(parts["products"] + parts["bubble"])
    (chunk,) = sizes.stage_chunks(config, sizes.mesh_at(config, 3))
    alone = sum(step_time.forward_flops(config, sizes.mesh_at(config, 3), chunk)) * 3 * 16 / 1e12
    assert parts["products"] == pytest.approx(alone)
    paired = step_time.step_seconds(dataclasses.replace(config, schedule="paired"), machine(matmul_rate=1e12))
    assert paired == {name: pytest.approx(part)
                      for name, part in parts.items()}, "without wires there is nothing to hide"


@pytest.mark.parametrize("sequence_parallel, stream", [(False, 16), (True, 2)])
@pytest.mark.parametrize("granularity, again", [("none", 0), ("selective", 8), ("full", 8)])
def test_bytes_of_element_wise_work(sequence_parallel, stream, granularity, again):
    """In a GPT-2 layer forward moves (16 + 8/t) X: residual + norm 8 X in all, gelu 4 X/t + 4 X/t. In backward gelu
    reads its input too. Full recomputation also repeats the norms, 4 X. The last stage's loss reads the logits twice.
    """
    config = cluster(16, **TP8, pipeline_model_parallel_size=2, sequence_parallel=sequence_parallel,
                     recompute_granularity=granularity)
    x, found = sizes.hidden_bytes(config), []
    for stage in range(2):
        at = sizes.mesh_at(config, stage)
        (chunk,) = sizes.stage_chunks(config, at)
        found.append(step_time.elementwise_bytes(config, at, chunk))
    norms = (4 / 8 if sequence_parallel else 4) * (granularity == "full")
    assert found[0] == tuple(20 * x * size for size in (stream / 2 + 8 / 8, stream / 2 + 12 / 8, again / 8 + norms))
    logits = 2 * 2 * 2048 * config.padded_vocab_size / 8
    assert found[1] == (found[0][0] + logits, found[0][1] + logits, found[0][2])


def test_element_wise_work_is_a_part_of_the_step_and_lengthens_it():
    """Neither free matmuls nor free communication hide it, and recomputation adds to its own part."""
    config = cluster(8, **TP8, global_batch_size=4, recompute_granularity="selective")
    fast, slow = (machine(matmul_rate=1e13, **rates) for rates in ({}, dict(elementwise_rate=1e12)))
    at = sizes.mesh_at(config)
    (chunk,) = sizes.stage_chunks(config, at)
    forward, backward, again = step_time.elementwise_bytes(config, at, chunk)
    without, parts = step_time.step_seconds(config, fast), step_time.step_seconds(config, slow)
    assert "element-wise" not in without and parts["element-wise"] == pytest.approx(4 * (forward + backward) / 1e12)
    assert parts["again"] - without["again"] == pytest.approx(4 * again / 1e12)
    assert sum(parts.values()) - sum(without.values()) == pytest.approx(4 * (forward + backward + again) / 1e12)


@pytest.mark.parametrize("slices, independent, expected", [
    (1, 0.0, 12.0), (1, 4.0, 14.5), (2, 0.0, 10.5), (2, 4.0, 14.5)])
def test_a_collective_in_flight_slows_the_compute_that_hides_it(slices, independent, expected):
    """10 s of compute and a collective of 2 s that takes a quarter of the GPU: it costs 2 s, or 0.5 s if hidden."""
    config = cluster(8, **TP8, micro_batch_size=2, slices=slices)
    assert step_time.action_seconds(config, step_time.Cost(10.0, 2.0, independent, slowing=0.5)) == expected


@pytest.mark.parametrize("chunks", [2, 5])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(chunks):
    config = cluster(4, pipeline_model_parallel_size=4, vocab_size=128, global_batch_size=16)
    whole, cut = (step_time.step_seconds(one, machine(matmul_rate=1e12)) for one in
                  (config, dataclasses.replace(config, schedule="interleaved", virtual_stages=chunks)))
    assert cut["products"] == whole["products"] and cut["bubble"] == pytest.approx(whole["bubble"] / chunks, rel=0.01)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_zero_bubble_schedules_fill_the_bubble_with_weight_gradients(schedule):
    """(p - 1)(F + B - W) instead of (p - 1)(F + B + W), a third if all are equal; attention has no W."""
    config = cluster(4, pipeline_model_parallel_size=4, vocab_size=128, global_batch_size=16)
    plain, zero = (step_time.step_seconds(one, machine(matmul_rate=1e12)) for one in
                   (config, cluster(4, pipeline_model_parallel_size=4, vocab_size=128, global_batch_size=16,
                                    schedule=schedule)))
    assert zero["products"] == plain["products"] and zero["bubble"] < 0.45 * plain["bubble"]


def pair_of_halves(config, one) -> tuple:
    """Return the costs of forward and backward on the only stage, and the seconds of both as a pair."""
    costs = step_time.action_costs(config, one, sizes.mesh_at(config))
    forward, backward = costs["forward", 0], costs["backward", 0]
    return forward, backward, step_time.action_seconds(config, forward, backward)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_pair_takes_as_long_as_the_compute_or_the_communication_of_both_halves(slices):
    """With communication faster and slower than the compute of both."""
    config = cluster(8, **TP8, micro_batch_size=2, slices=slices)
    for near in (3e10, 2e9):
        forward, backward, both = pair_of_halves(config, machine(matmul_rate=1e13, intra_host_rate=near))
        work = forward.compute + backward.compute + backward.independent
        assert both == pytest.approx(max(work, forward.communication + backward.communication))
        assert (near == 3e10) == (both == pytest.approx(work))


def test_split_weight_gradients_hide_no_communication():
    config = cluster(8, **TP8, micro_batch_size=2, slices=1, vocab_size=128)
    costs = step_time.action_costs(config, machine(matmul_rate=1e12, intra_host_rate=1e10), sizes.mesh_at(config))
    whole, apart, rest = (costs[kind, 0] for kind in ("backward", "input_backward", "weight_backward"))
    assert apart.independent < 0.01 * whole.independent and rest.communication == rest.independent == 0
    assert apart.compute + apart.independent + rest.compute == pytest.approx(whole.compute + whole.independent)
    together, both = (step_time.action_seconds(config, whole),
                      step_time.action_seconds(config, apart) + step_time.action_seconds(config, rest))
    assert both - together == pytest.approx(min(whole.communication, whole.independent), rel=0.02)


@pytest.mark.parametrize("granularity, again", [("selective", lambda dense, attention: attention),
                                                ("full", lambda dense, attention: 7 / 12 * dense + attention)])
def test_recomputation_adds_to_the_matmuls(granularity, again):
    """Attention's own matmuls; with full recomputation also qkv and the MLP's first, 3 + 4 of 12 h^2."""
    plain = cluster(32, **TP8, pipeline_model_parallel_size=4, vocab_size=128, global_batch_size=16)
    config, at = dataclasses.replace(plain, recompute_granularity=granularity), sizes.mesh_at(plain)
    one = machine(matmul_rate=1e12)
    (chunk,) = sizes.stage_chunks(plain, at)
    dense, _, attention = step_time.forward_flops(plain, at, chunk)
    before, after = step_time.step_seconds(plain, one), step_time.step_seconds(config, one)
    assert after["again"] == pytest.approx(16 * again(dense, attention) / 1e12)
    assert after["products"] == before["products"]
    assert after["bubble"] / before["bubble"] == pytest.approx(1 + after["again"] / after["products"], rel=0.01)
    assert 0.01 < after["again"] / after["products"] < 0.25


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_halves_the_matmuls_of_its_layers_on_gpus_and_adds_conversions(recipe):
    """The head and attention's own matmuls stay as they are, and so do the first and the last layer if asked. A CPU
    gains nothing. Recomputed matmuls are in fp8, too."""
    plain = cluster(8, **TP8, device="cuda", recompute_granularity="full")
    config = dataclasses.replace(plain, fp8_format="hybrid", fp8_recipe=recipe)
    at, few = sizes.mesh_at(plain), dataclasses.replace(config, first_last_layers_bf16=True)
    on_cpu = dataclasses.replace(config, device="cpu")

    def flops(config):
        (chunk,) = sizes.stage_model(config, at).chunks
        return *step_time.forward_flops(config, at, chunk), step_time.recomputed_flops(config, at, chunk)

    (dense, head, attention, again), found = flops(plain), flops(config)
    assert found == pytest.approx((dense / 2, head, attention, attention + (again - attention) / 2), rel=1e-3)
    assert flops(few)[0] == pytest.approx(dense * (1 - 38 / 40 / 2), rel=1e-3)
    assert flops(on_cpu) == pytest.approx((dense, head, attention, again))
    one = machine(elementwise_rate=1e12)
    before, after = (step_time.step_seconds(config, one)["element-wise"] for config in (plain, config))
    x, ffn, weights = sizes.hidden_bytes(plain) * plain.microbatches * 40, 4 / 8, 12 * 5120**2 / 8 * plain.microbatches
    inputs, gradients = x * (2 + 1 / 8 + ffn), x * (2 + 3 / 8 + ffn)
    if recipe == "tensorwise":          # all once, attention's output again, transposes in 8 bits
        moved = 2.5 * (inputs + gradients + x / 8) + inputs + gradients
    else:
        moved = 2.5 * 2 * (inputs + gradients)
    assert after - before == pytest.approx((moved + 8 * 40 * weights * plain.slices) / 1e12, rel=1e-3)


def test_fp8_keeps_inputs_in_one_byte_and_weights_in_two():
    """h of both sublayers, and the MLP's activation; rowwise scales keep 16 bits. W and W^T have 12 h^2 L/t each."""
    plain = cluster(8, **TP8)
    kept = {recipe: sum(sublayer_memory.layer_tape_bytes(
        dataclasses.replace(plain, fp8_format="hybrid", fp8_recipe=recipe)).values()) for recipe in RECIPES}
    x, before = sizes.hidden_bytes(plain), sum(sublayer_memory.layer_tape_bytes(plain).values())
    assert kept["rowwise"] == before and before - kept["tensorwise"] == pytest.approx((2 + 4 / 8) * x / 2, rel=1e-6)
    config = dataclasses.replace(plain, fp8_format="e4m3")
    assert expected_memory.fp8_weight_bytes(plain, at := sizes.mesh_at(plain)) == 0
    assert expected_memory.fp8_weight_bytes(config, at) == 2 * 12 * 5120**2 * 40 // 8


def test_recomputation_hides_communication_as_weight_gradients_do():
    """With one slice, and communication that takes longer than both."""
    config = cluster(8, **TP8, micro_batch_size=1, slices=1, vocab_size=128)
    again = dataclasses.replace(config, recompute_granularity="full")
    at, one = sizes.mesh_at(config), machine(matmul_rate=1e13, intra_host_rate=1e9)
    plain, longer = (step_time.action_costs(each, one, at)["backward", 0] for each in (config, again))
    assert plain.communication > longer.independent > plain.independent
    assert step_time.action_seconds(config, plain) == step_time.action_seconds(again, longer)


def test_host_copies_take_time_only_if_longer_than_the_rest():
    """Each rank copies its whole activations: they are not sharded over tp."""
    config = cluster(8, **TP8, vocab_size=128, global_batch_size=2, recompute_granularity="full",
                     checkpoint_in_cpu=True, device="cuda")
    # 2 microbatches, out and back, of 2 x 40 sublayers
    one, copied = machine(matmul_rate=1e14), 2 * 2 * 2 * 40 * sizes.hidden_bytes(config)
    fast, slow = (step_time.step_seconds(config, dataclasses.replace(one, host_copy_rate=rate)) for rate in (1e15, 1e9))
    assert fast["host copies"] == pytest.approx(0.0) and sum(slow.values()) == pytest.approx(copied / 1e9)
    assert slow["products"] == fast["products"] and slow["host copies"] > 0.5 * copied / 1e9


def exposed_of(config, one) -> tuple:
    """Return the seconds of the only stage's actions, of the last of them, and by which reduction outlasts them."""
    at = sizes.mesh_at(config)
    (row,), _ = step_time.simulate_schedule(config, one, [step_time.action_costs(config, one, at)])
    gathered = [found for found in expected_traffic.optimizer_traffic(config, at) if not found.backward]
    outlast = step_time.exposed_data_parallel_seconds(config, one, at,
                                                      row) - step_time.communication_seconds(config, one, at, gathered)
    return row[-1][2], row[-1][2] - row[-1][1], outlast


def test_a_chunks_gradients_are_reduced_during_the_other_chunks_backwards():
    """The reduction of a stage takes three backwards of a chunk. With two chunks it outlasts the last backward by one,
    with a single chunk by two of its three parts.
    """
    chunks = cluster(2, data_parallel_size=2, pipeline_model_parallel_size=1, schedule="interleaved",
                     global_batch_size=4, vocab_size=128)
    whole, at = dataclasses.replace(chunks, schedule="1f1b", virtual_stages=1), sizes.mesh_at(chunks)
    fast = machine(matmul_rate=1e13)
    end, last, outlast = exposed_of(chunks, fast)
    assert outlast == pytest.approx(0, abs=1e-9 * end)
    sums = [found for found in expected_traffic.optimizer_traffic(chunks, at) if found.backward]
    slow = dataclasses.replace(fast, intra_host_rate=step_time.communication_seconds(
        chunks, machine(intra_host_rate=1.0), at, sums) / (3 * last))
    assert exposed_of(chunks, slow)[2] == pytest.approx(last, rel=0.01)
    assert exposed_of(whole, slow)[1:] == (pytest.approx(2 * last, rel=0.01), pytest.approx(last, rel=0.02))
    slower = dataclasses.replace(slow, intra_host_rate=slow.intra_host_rate / 2)
    assert (exposed_of(chunks, slower)[2], exposed_of(whole, slower)[2]) == (pytest.approx(4 * last, rel=0.01),) * 2


def test_zero_2_exposes_what_each_backward_does_not_hide():
    """Eight microbatches on one stage, whose reductions take half as long as a backward, or twice as long."""
    one, two = (cluster(2, data_parallel_size=2, pipeline_model_parallel_size=1, zero_stage=stage, global_batch_size=16,
                        vocab_size=128)
                for stage in (1, 2))
    at, fast = sizes.mesh_at(two), machine(matmul_rate=1e13)
    backward = step_time.action_seconds(one, step_time.action_costs(one, fast, at)["backward", 0])
    sums, _ = step_time.data_parallel_seconds(two, machine(intra_host_rate=1.0), at)
    for factor, lost in ((0.5, 0.0), (2.0, 8 * backward)):
        slow = dataclasses.replace(fast, intra_host_rate=sums / (factor * backward))
        once, often = (step_time.step_seconds(config, slow) for config in (one, two))
        _, gathered = step_time.data_parallel_seconds(one, slow, at)
        assert often["dp wires"] == pytest.approx(lost + gathered, rel=0.01, abs=1e-6 * backward)
        assert once["dp wires"] == pytest.approx(max(0, factor - 1) * backward + gathered, rel=0.01,
                                                 abs=1e-6 * backward)
        assert {name: part for name, part in often.items() if name not in ("dp wires", "optimizer")} == {
            name: part for name, part in once.items() if name not in ("dp wires", "optimizer")}


def test_messages_delay_every_turn_of_1f1b_but_only_the_ends_of_gpipe():
    """Two stages on two hosts, 16 microbatches; a message takes a thousandth of the compute."""
    config = cluster(16, **TP8, pipeline_model_parallel_size=2, vocab_size=128, global_batch_size=16)
    one = machine(matmul_rate=1e12, inter_host_rate=1e9)
    message = sizes.hidden_bytes(config) / one.inter_host_rate
    for schedule, messages in (("1f1b", 16), ("gpipe", 2)):
        parts = step_time.step_seconds(dataclasses.replace(config, schedule=schedule), one)
        assert parts["pp wires"] == pytest.approx(messages * message, rel=0.1)


@pytest.mark.parametrize("slices, columns, exposed", [(1, 1, 1.0), (2, 1, 0.0), (1, 4, 0.25)])
def test_slices_hide_all_fast_communication_and_columns_all_but_the_last_column(slices, columns, exposed):
    """Forward; in backward the weight gradients hide communication this fast."""
    config = cluster(8, **TP8, micro_batch_size=2, global_batch_size=2, slices=slices, columns=columns)
    one = machine(matmul_rate=1e12, intra_host_rate=1e12)
    at = sizes.mesh_at(config)
    sums = [found for found in expected_traffic.tensor_parallel_traffic(config, at) if not found.backward]
    wires = step_time.communication_seconds(config, one, at, sums)
    parts = step_time.step_seconds(config, one)
    assert wires < parts["products"] / 10
    assert parts["tp wires"] == pytest.approx(exposed * wires)


def test_with_slow_communication_a_step_takes_as_long_as_its_communication():
    config = cluster(8, **TP8, micro_batch_size=2, global_batch_size=2, slices=2)
    at, one = sizes.mesh_at(config), machine(matmul_rate=1e18, intra_host_rate=1e9)
    wires = step_time.communication_seconds(config, one, at, expected_traffic.tensor_parallel_traffic(config, at))
    assert sum(step_time.step_seconds(config, one).values()) == pytest.approx(wires)


def test_a_group_on_several_hosts_uses_the_network():
    config = cluster(16, tensor_model_parallel_size=8, global_batch_size=2)
    at, one = sizes.mesh_at(config), machine(intra_host_rate=1e9, inter_host_rate=1e3)
    gathered = [found for found in expected_traffic.optimizer_traffic(config, at) if found.kind == "all_gather"]
    assert step_time.communication_seconds(config, one, at, gathered) == pytest.approx(gathered[0].bytes / 2 / 1e3)
    wider = dataclasses.replace(one, ranks_per_host=16)
    assert step_time.communication_seconds(config, wider, at, gathered) == pytest.approx(gathered[0].bytes / 2 / 1e9)


# ---- against ranks that run

@pytest.mark.parametrize("world_size, changes", [
    (1, dict(slices=2, dtype="bfloat16", hidden_dropout=0.1, attention_dropout=0.1)),
    (2, dict(pipeline_model_parallel_size=2, schedule="gpipe", untie_embeddings_and_output_weights=True)),
    (2, dict(tensor_model_parallel_size=2, normalization="RMSNorm", dtype="float16", optimizer="lion",
             fp16_lm_cross_entropy=True)),
    pytest.param(4, dict(tensor_model_parallel_size=4, slices=3, columns=7, global_batch_size=3, hidden_dropout=0.1),
                 marks=pytest.mark.exhaustive),
    (4, dict(pipeline_model_parallel_size=2, zero_stage=0, micro_batch_size=1, bucket_size=1)),
    (4, dict(pipeline_model_parallel_size=2, zero_stage=2, schedule="zb-h1", micro_batch_size=1, slices=1,
             untie_embeddings_and_output_weights=True)),
    pytest.param(4, dict(tensor_model_parallel_size=2, zero_stage=2, dtype="bfloat16", slices=2),
                 marks=pytest.mark.exhaustive),
    pytest.param(8, dict(**TP8, slices=1, columns=5, global_batch_size=3, dtype="float32", attention_dropout=0.1),
                 marks=pytest.mark.exhaustive),
    pytest.param(8, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, dtype="bfloat16"),
                 marks=pytest.mark.exhaustive),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        (2, dict(tensor_model_parallel_size=2, slices=2, columns=2, recompute_granularity="selective",
                 hidden_dropout=0.1, attention_dropout=0.1)),
        (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=3, dtype="bfloat16",
                 recompute_granularity="full", hidden_dropout=0.1, attention_dropout=0.1)))),
    (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, slices=2, columns=3,
             sequence_parallel=True)),
    (2, dict(tensor_model_parallel_size=2, slices=3, dtype="bfloat16", recompute_granularity="full",
             sequence_parallel=True, hidden_dropout=0.1, attention_dropout=0.1)),
    pytest.param(4, dict(tensor_model_parallel_size=2, zero_stage=2, recompute_granularity="selective",
                         sequence_parallel=True), marks=pytest.mark.exhaustive),
    *[pytest.param(2, dict(tensor_model_parallel_size=2, slices=2, **FAMILIES[family], **more),
                   marks=[] if family in ("llama", "mixed", "qwen2") else pytest.mark.exhaustive)
      for family, more in (("llama", {}), ("mixed", {}), *(
          (family, dict(recompute_granularity="selective", attention_dropout=0.1, dtype="bfloat16"))
          for family in ("qwen2", "qwen3")))],
    pytest.param(2, dict(pipeline_model_parallel_size=2, slices=2, **FAMILIES["llama"], reset_position_ids=True,
                         reset_attention_mask=True), marks=pytest.mark.exhaustive),
    (2, dict(tensor_model_parallel_size=2, **FAMILIES["qwen3"], reset_attention_mask=True, attention_dropout=0.1,
             sequence_parallel=True)),
    *[pytest.param(2, dict(num_layers=5, dtype="bfloat16", fp8_format="hybrid", slices=2) | more,
                   marks=pytest.mark.exhaustive if marked else []) for marked, more in (
        (False, dict(pipeline_model_parallel_size=2, schedule="zb-h1", first_last_layers_bf16=True)),
        (True, dict(tensor_model_parallel_size=2, recompute_granularity="selective")),
        (True, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
        (True, dict(tensor_model_parallel_size=2, fp8_recipe="rowwise", **FAMILIES["llama"])))],
    (2, dict(tensor_model_parallel_size=2, mtp_num_layers=1, slices=2, columns=2, sequence_parallel=True)),
    pytest.param(2, dict(pipeline_model_parallel_size=2, **FAMILIES["llama"], mtp_num_layers=2, slices=2,
                         recompute_granularity="selective", dtype="bfloat16"), marks=pytest.mark.exhaustive),
    pytest.param(4, dict(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, mtp_num_layers=1,
                         schedule="zb-v", num_layers=4), marks=pytest.mark.exhaustive),
    pytest.param(2, dict(mtp_num_layers=2, zero_stage=2, recompute_granularity="full", hidden_dropout=0.1,
                         attention_dropout=0.1), marks=pytest.mark.exhaustive),
], ids=["dropout", "gpipe-untied", "rmsnorm-lion", "tp4-columns", "zero0-buckets", "zero2-zb-h1", "zero2-tp2", "tp8",
        "tp2-pp2-dp2", "selective", "full", "cut-columns", "cut-full", "cut-selective-zero2",
        "llama", "mixed", "qwen2-selective", "qwen3-selective", "llama-documents", "qwen3-documents-cut",
        "fp8-zb-h1", "fp8-selective", "fp8-cut", "fp8-rowwise", "depth-cut-columns", "depths-pp2", "depth-zb-v",
        "depths-zero2-full"])
def test_state_activations_collectives_and_bytes_equal_the_formulas(pool, world_size, changes):
    config = tiny(world_size, **{"global_batch_size": 6, "num_layers": 2, "device": "cpu", **changes})
    for of_memory, (counted, said) in pool.run(held_rank, config, world_size=world_size):
        check_memory(*of_memory)
        assert counted == said


@pytest.mark.parametrize("changes, bias", [
    (dict(dtype="bfloat16"), False), (dict(dtype="float32"), True),
    (dict(dtype="float16", attention_dropout=0.1), True), (dict(dtype="bfloat16", device="cpu"), True)],
    ids=["16-bit", "fp32", "dropout", "cpu"])
def test_on_gpus_documents_take_memory_only_if_attention_needs_a_bias(changes, bias):
    """Without a bias, keys are not repeated for each head either."""
    config = tiny(1, **{"device": "cuda", "kv_channels": 8, "num_query_groups": 2} | changes)
    within, at = dataclasses.replace(config, reset_attention_mask=True), sizes.mesh_at(config)
    assert ("attention bias" in expected_memory.shared_tape_bytes(within)) == bias
    assert (expected_memory.peak_tape_bytes(within, at) > expected_memory.peak_tape_bytes(config, at)) == bias


@pytest.mark.parametrize("schedule, tp, slices, granularity", [
    *((schedule, 1, 2, "full") for schedule in SCHEDULES), ("paired", 1, 2, "none"), ("zb-v", 2, 2, "none"),
    *(pytest.param(schedule, 2, 2, "none", marks=pytest.mark.exhaustive) for schedule in ("1f1b", "paired")),
    *(pytest.param(schedule, 1, slices, granularity, marks=pytest.mark.exhaustive)
      for schedule in SCHEDULES for slices, granularity in ((1, "none"), (3, "selective")))])
def test_memory_and_traffic_of_each_schedule(pool, schedule, tp, slices, granularity):
    """Five layers on two stages: chunks of different sizes."""
    config = tiny(2 * tp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=2, schedule=schedule,
                  slices=slices, num_layers=5, global_batch_size=12, hidden_size=32, device="cpu",
                  hidden_dropout=0.1 * (slices == 3), recompute_granularity=granularity)
    for of_memory, (counted, said) in pool.run(held_rank, config, world_size=2 * tp):
        check_memory(*of_memory, PEAK)
        assert counted == said


def messages_rank(config):
    """Return this rank's peak bytes of messages besides tapes: (measured, predicted)."""
    mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"))
    model = train.model_builder(config, mesh)
    stage = memory.TapeMeter(Domino(model, config.slices, config.columns), {})
    optimizer, most, make = ZeroOptimizer(model, config, mesh), 0, pipeline.P2PCommunicator
    send = torch.distributed.batch_isend_irecv
    mails = []

    def weighed(ops):
        nonlocal most
        tensors = [*(op.tensor for op in ops),
                   *(tensor for _, tensor in (*mails[-1].sends_in_flight, *mails[-1].inbox.values()))]
        on_tape = memory.reachable_storages(list(stage.tapes.values()))
        most = max(most, sum(size for key, size in dict(map(memory.storage, tensors)).items() if key not in on_tape))
        return send(ops)

    pipeline.P2PCommunicator = lambda *arguments: mails.append(make(*arguments)) or mails[-1]
    torch.distributed.batch_isend_irecv = weighed
    try:
        train.train_step(1, stage, optimizer, RandomTokens(config), config, mesh)
    finally:
        pipeline.P2PCommunicator, torch.distributed.batch_isend_irecv = make, send
    return most, expected_memory.peak_message_bytes(config, mesh)


@pytest.mark.parametrize("slices, tp", [(3, 1), pytest.param(2, 2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peak_memory_of_messages(pool, schedule, slices, tp):
    """With sequence parallelism each tp rank sends its part."""
    config = tiny(2 * tp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=2, schedule=schedule,
                  slices=slices, num_layers=4, global_batch_size=12, device="cpu", sequence_parallel=tp > 1)
    for measured, said in pool.run(messages_rank, config, world_size=2 * tp):
        assert measured == said > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_each_normalization_declares_what_it_keeps(pool, name, dtype):
    """Exact: a single extra number per token would show."""
    config = tiny(1, global_batch_size=12, num_layers=2, device="cpu", normalization=name, dtype=dtype)
    (((held, said), _),) = pool.run(held_rank, config, world_size=1)
    assert held["activations"] == said["activations"]


def reality_rank(config):
    mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"))
    model = train.model_builder(config, mesh)
    optimizer, stage = ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns)
    return plan.run_here(config, mesh, optimizer, stage, repeats=5)


@pytest.mark.parametrize("world_size, tp, pp, dtype", [
    (4, 2, 2, "float32"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((1, 1, 1, "float32"), (8, 2, 2, "bfloat16")))])
def test_plan_against_reality(pool, world_size, tp, pp, dtype):
    """Bytes are exact, activations within 0.1 %, the peak within 8 %, a step's time within a factor of 4."""
    config = Config(num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=500,
                    micro_batch_size=4, global_batch_size=8 * world_size // (tp * pp), tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp, dtype=dtype, device="cpu").resolve(world_size)
    found = pool.run(reality_rank, config, world_size=world_size)[0]
    assert found["comm_exact"]
    errors = found["memory_errors"]
    assert [errors[name] for name in memory.STATE] == [0.0, 0.0, 0.0]
    assert errors["activations"] <= ACTIVATIONS and errors["peak"] <= PEAK
    assert 1 / TIME <= min(found["measured_s"]) / min(found["predicted_s"]) <= TIME      # the least: what noise leaves


# ---- against one rank of a cluster, whose tensors have shapes and no numbers

@contextmanager
def rank_of_a_cluster(rank, config):
    """Yield (mesh, model, optimizer) of one rank; torch's fake process group replaces the others."""
    with fake_world(rank, config.world_size):
        mesh = make_mesh(config.pp, config.dp, config.tp, torch.device("cpu"))
        with FakeTensorMode():
            model = train.model_builder(config, mesh)
            yield mesh, model, ZeroOptimizer(model, config, mesh)


GPT3_13B = dict(**TP8, pipeline_model_parallel_size=4, global_batch_size=8, device="cpu")


@pytest.mark.parametrize("rank", [0, 63, *(pytest.param(rank, marks=pytest.mark.exhaustive) for rank in (23, 40))])
def test_gpt3_13b_on_64_ranks_has_the_parameters_of_the_formulas(rank):
    """One rank of each of the four stages."""
    config = cluster(64, **GPT3_13B)
    with rank_of_a_cluster(rank, config) as (mesh, model, optimizer):
        assert ([one.shape for one in sizes.stage_model(config, mesh).parameters()]
                == [one.shape for one in model.parameters()])
        bucket_sizes = [(bucket.kind, bucket.weights.numel()) for bucket in optimizer.buckets]
    assert bucket_sizes == sizes.bucket_sizes(config, mesh)


@pytest.mark.parametrize("rank, schedule, tokens", [
    (0, "zb-v", 1024),
    *(pytest.param(rank, name, 2048, marks=pytest.mark.exhaustive)
      for rank, name in ((63, "1f1b"), (16, "interleaved"), (32, "paired"), (48, "zb-h1")))])
def test_memory_and_traffic_of_gpt3_13b_on_64_ranks(rank, schedule, tokens):
    """With few tokens the peak comes when one chunk's gradients are received and the other's tapes still exist.
    16 of the 40 layers take less time."""
    config = cluster(64, **GPT3_13B, schedule=schedule, seq_length=tokens, num_layers=16)
    with rank_of_a_cluster(rank, config) as (mesh, model, optimizer):
        stage = memory.TapeMeter(Domino(model, config.slices, config.columns), memory.state_storages(model, optimizer))
        with comm.CollectiveCounter(mesh) as listener, memory.AllocationPeak() as allocations:
            optimizer.zero_grad()
            train.run_schedule(config.timetable, 0, stage, RandomTokens(config), config, mesh, True,
                               optimizer.on_gradients_ready)
            optimizer.finalize_gradients()
            optimizer.gather_weights()
    assert stage.most == pytest.approx(expected_memory.peak_tape_bytes(config, mesh), rel=ACTIVATIONS)
    # its sum has no numbers here
    step = [one for one in expected_traffic.step_traffic(config, mesh) if one.group != "world"]
    assert listener.counts == expected_traffic.totals_by_group(step)
    beside_state = expected_memory.peak_bytes(config, mesh) - sum(expected_memory.state_bytes(config, mesh).values())
    assert allocations.most == pytest.approx(beside_state, rel=PEAK)


def test_memory_of_nccls_communicators():
    """Rings of 24 channels for world, tp, dp and a tied embedding; messages have 16 channels per neighbour and in the
    ring where the stages meet. An axis of one rank has no communicator.
    """
    ring, connection = 24 * 12 * 2**20, 12 * 2**20
    small = dict(num_layers=8, num_attention_heads=8, hidden_size=64)
    box = cluster(32, **small, tensor_model_parallel_size=4, pipeline_model_parallel_size=4, global_batch_size=8)
    assert box.tied and box.dp == 2
    found = [expected_memory.communicator_bytes(dataclasses.replace(box, device="cuda"), sizes.mesh_at(box, stage))
             for stage in range(4)]
    assert found == [4 * ring + 32 * connection, 3 * ring + 48 * connection, 3 * ring + 48 * connection,
                     4 * ring + 32 * connection]
    for size, axis, rings in ((1, "tensor", 0), (8, "tensor", 2), (8, "data", 2)):
        config = cluster(size, **small, pipeline_model_parallel_size=1, global_batch_size=8,
                         tensor_model_parallel_size=size if axis == "tensor" else 1)
        assert expected_memory.communicator_bytes(dataclasses.replace(config, device="cuda"),
                                                  sizes.mesh_at(config)) == rings * ring
        assert expected_memory.communicator_bytes(dataclasses.replace(config, device="cpu"), sizes.mesh_at(config)) == 0


def test_the_processes_of_a_host_share_its_memory(monkeypatch):
    """A model that one process could hold is refused if eight processes of that size must share the host."""
    config = cluster(8, num_layers=2, hidden_size=64, num_attention_heads=2, pipeline_model_parallel_size=1,
                     tensor_model_parallel_size=1, global_batch_size=8)
    host = 4 * (expected_memory.fullest_rank_bytes(dataclasses.replace(config, device="cpu")) // 2)
    monkeypatch.setattr(step_time.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": host}.get)
    for processes in (1, 2, 4):
        step_time.require_memory(config, torch.device("cpu"), processes)
    with pytest.raises(UserError, match="the fullest of 8 processes would need at least"):
        step_time.require_memory(config, torch.device("cpu"), 8)


# ---- as a person runs them

def bench(capsys, *arguments):
    """Run bench.py in this process and return (exit code, text before the last line, record, stderr)."""
    threads = torch.get_num_threads()
    code = main(("comm", "memory", "recompute", "plan"), "", [str(one) for one in arguments])
    torch.set_num_threads(threads)
    printed, error = capsys.readouterr()
    *text, last = printed.splitlines() or [""]
    return code, "\n".join(text), json.loads(last or "{}"), error


SMALL = ("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 2, "--seq-length", 8, "--vocab-size", 30,
         "--micro-batch-size", 2, "--global-batch-size", 4, "--tp", 1, "--pp", 1, "--dp", 1)


@pytest.mark.exhaustive
def test_bench_comm_starts_its_processes_and_finds_every_count_exact():
    flags = [*map(str, SMALL), "--tp", "2"]
    command = [sys.executable, str(ROOT / "bench.py"), "comm", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["exact"] is True
    assert {(row["group"], row["kind"]) for row in record["rows"]} == {("tp", "all_reduce"), ("world", "all_reduce")}
    assert "every count equals its formula" in done.stdout


def test_bench_memory_finds_the_state_exact(capsys):
    code, text, record, _ = bench(capsys, "memory", *SMALL, "--bf16")
    assert code == 0 and record["exact"] is True and record["activations_error"] <= ACTIVATIONS
    assert "norm inputs" in text and "2.000" in text, "what a layer keeps is shown in units of X"


def test_bench_recompute(capsys):
    code, text, record, _ = bench(capsys, "recompute", *SMALL, "--hidden-dropout", 0.1, "--repeats", 2)
    assert code == 0 and record["none_products"] == 1 < record["selective_products"] < record["full_products"] < 1.34
    assert all(record[f"{one}_activations_error"] <= ACTIVATIONS for one in GRANULARITIES)
    assert record["none_activations"] > record["selective_activations"] > record["full_activations"] > 0
    assert "the gradients are bit-equal" in text and "recompute_granularity" not in record


def test_bench_plan_of_gpt3_13b_on_64_gpus(capsys):
    code, text, record, _ = bench(capsys, "plan", "--model", "gpt3-13b", "--gpus", 64, "--tp", 8, "--pp", 4,
                                  "--global-batch-size", 256, "--columns", 1)
    assert code == 0 and record["fits"] is True and record["parameters"] == 12_853_386_240
    assert record["bubble"] == pytest.approx(3 / 128, rel=0.1) and 0.2 < record["mfu"] < 0.6
    assert sum(record["parts_s"].values()) == pytest.approx(record["step_s"])
    assert all(set(need) == set(plan.MEMORY_TERMS) for need in record["memory"]) and len(record["memory"]) == 4
    for said in ("stage 3", "tp: layers forward", "dp: weights", "(p - 1)/m of the ideal time in 1F1B",
                 "--columns 2 would", "--product-efficiency", "--schedule paired would take"):
        assert said in text


def test_a_gpu_reaches_the_rates_of_its_data_sheet_times_the_efficiencies():
    """400 Gbit/s are 50 GB/s."""
    flags = parse(plan, ["plan", "--product-efficiency", "0.5", "--wire-efficiency", "0.75", "--latency", "20",
                         "--overlap-slowdown", "0.25"])
    assert plan.machine_of(flags, "H100", network=400.0, per_host=4) == step_time.Machine(
        matmul_rate=989e12 * 0.5, intra_host_rate=450e9 * 0.75, inter_host_rate=50e9 * 0.75, latency=20 * 1e-6,
        ranks_per_host=4, memory_rate=3.35e12 * 0.75, host_copy_rate=64e9 * 0.75, elementwise_rate=3.35e12 * 0.75,
        overlap_slowdown=0.25)


def test_a_plan_proposes_the_fastest_schedule_that_fits(capsys):
    """With fast links, few microbatches and many stages it is a zero-bubble schedule, and then none is better."""
    flags = ["--gpus", 8, "--tp", 1, "--pp", 8, "--num-layers", 32, "--global-batch-size", 16, "--vocab-size", 128]
    _, text, before, _ = bench(capsys, "plan", *flags)
    told = re.search(r"(--schedule \S+(?: --virtual-stages \d+)?) would take ([\d.]+ m?s) per step", text)
    assert "zb-v" in told[1] and before["schedule"] == "1f1b"
    _, text, after, _ = bench(capsys, "plan", *flags, *told[1].split())
    assert after["step_s"] < 0.9 * before["step_s"] and "would take" not in text
    assert seconds_text(after["step_s"]) == told[2] and after["virtual_stages"] == 2
    assert "zb-v with 2 chunks per stage" in text


def test_a_plan_considers_a_newly_added_schedule(capsys, monkeypatch):
    """From its line in SCHEDULES: here GPipe with the backwards in reverse order."""
    def last_in_first_out(stage, stages, microbatches, chunks=1):
        actions = SCHEDULES["gpipe"].actions(stage, stages, microbatches)
        return actions[:microbatches] + actions[:microbatches - 1:-1]

    monkeypatch.setitem(SCHEDULES, "lifo", Schedule(last_in_first_out))
    config = dataclasses.replace(cluster(4, pipeline_model_parallel_size=4, global_batch_size=6), schedule="lifo")
    assert expected_memory.microbatches_in_flight(config, sizes.mesh_at(config, 3)) == 6
    assert any({"schedule": "lifo"} in changes
               for changes in plan.other_schedules(dataclasses.replace(config, schedule="1f1b")))
    assert step_time.step_seconds(config, machine(matmul_rate=1e12))["bubble"] > 0


def test_a_smaller_micro_batch_with_fewer_slices_is_among_the_remedies():
    """With two slices, a micro batch of one sample alone would be impossible."""
    config = cluster(8, **TP8, micro_batch_size=4, slices=2)
    assert {"micro_batch_size": 1} in plan.remedies(config)
    assert [plan.changed(config, {"micro_batch_size": size}).slices for size in (2, 1)] == [2, 1]


@pytest.mark.parametrize("flags, reason, remedy", [
    (["--tp", 4, "--pp", 1, "--micro-batch-size", 16, "--gpu", "A100"], "activations", "--recompute-granularity full"),
    (["--tp", 8, "--pp", 1, "--zero-stage", 0, "--gpu", "A10"], "optimizer", "--zero-stage 1"),
    (["--tp", 1, "--pp", 1], "gradients", "--pipeline-model-parallel-size 2"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        (["--tp", 2, "--pp", 1, "--micro-batch-size", 8, "--gpu", "A100"], "activations", "--micro-batch-size 1"),
        (["--tp", 4, "--pp", 1, "--micro-batch-size", 16, "--gpu", "A100", "--recompute-granularity", "selective"],
         "activations", "--recompute-granularity full --checkpoint-in-cpu"),
        (["--tp", 8, "--pp", 1, "--gpus", 8, "--micro-batch-size", 16], "activations", "--sequence-parallel"),
        (["--tp", 8, "--pp", 4, "--schedule", "gpipe"], "activations", "--schedule 1f1b"),
        (["--tp", 4, "--pp", 1, "--gpu", "A10"], "gradients", "--zero-stage 2"),
        (["--tp", 8, "--pp", 1, "--gpus", 8, "--gpu", "A10"], "optimizer", "--gpus 32")))])
def test_a_plan_that_does_not_fit_says_why_and_what_helps(capsys, flags, reason, remedy):
    code, text, record, _ = bench(capsys, "plan", *flags)
    assert code == 0 and record["fits"] is False
    most = max(sum(need.values()) for need in record["memory"])
    told = re.search(r"does not fit: stage \d needs [\d.]+ GB, ([\d.]+) GB too much; the largest terms are (\w+)", text)
    assert float(told[1]) == pytest.approx((most - record["usable_bytes"]) / 1e9, rel=0.01) and told[2] == reason
    assert f"would fit with {remedy}" in text or f"or {remedy}" in text
    assert bench(capsys, "plan", *flags, *remedy.split())[2]["fits"] is True


@pytest.mark.parametrize("arguments, words", [
    (["plan", "--gpus", 63, "--tp", 8, "--pp", 4], "world size 63 must equal tensor x pipeline x data parallel"),
    (["plan", "--gpu", "abacus"], "invalid choice: 'abacus'"),
    (["plan", "--reserve", 2], "--reserve must be from 0 to 0.9, but is 2.0"),
    (["plan", "--dtype", "float32"], "--gpu H100 needs --dtype bfloat16 or float16"),
    (["plan", "--gpu", "A100", "--fp8-format", "hybrid"], "--fp8-format needs a GPU with fp8"),
    (["plan", "--fp8-format", "hybrid", "--seq-length", "1000"], "seq-length 1000 must be divisible by 16"),
    (["comm", "--tp", 3], "num-attention-heads 8 must be divisible by tensor-model-parallel-size 3"),
    (["plan", "--checkpoint-in-cpu"], "--checkpoint-in-cpu needs --recompute-granularity full"),
    (["comm", "--dp", 0], "--data-parallel-size must be at least 1 and at most 2147483647, but is 0"),
    (["memory", "--slices", 9], "slices 9 must be at most micro-batch-size 4")])
def test_wrong_flags_are_refused_in_one_sentence(capsys, arguments, words):
    code, text, record, error = bench(capsys, *arguments)
    assert code == 2 and not text and not record
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
