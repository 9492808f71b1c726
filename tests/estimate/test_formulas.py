"""The formulas that a student should know by heart, against dry runs and published numbers; a machine's rates."""

import dataclasses
import math

import numpy as np
import pytest
from support.fake_cuda import machine
from support.harness import tiny

import train
from nanodomino.estimate import formulas
from nanodomino.estimate.accounts import Operation
from nanodomino.estimate.formulas import ATTENTION, KERNEL, START, matmul_seconds
from nanodomino.estimate.rank import dry_run
from nanodomino.model import meta_stage
from nanodomino.settings.config import Config


X = 3 * 32 * 64 * 2              # bytes of one activation of `small`


def small(**changes):
    return tiny(2, **{"tensor_model_parallel_size": 2, "hidden_size": 64, "seq_length": 32, "dtype": "bfloat16",
                      "global_batch_size": 6, "device": "cpu"} | changes)


def per_layer(config, value):
    """Return how much the second layer adds to value(a dry run)."""
    one, two = (value(dry_run(train, dataclasses.replace(config, num_layers=layers))) for layers in (1, 2))
    return two - one


def kept(run):
    return run.kept[(("forward", 0),)]


# ---- the table of formulas.py

@pytest.mark.parametrize("zero_stage, dtype, expected", [
    (0, "float32", 16), (1, "float32", 8 + 8 / 4), (2, "float32", 4 + 12 / 4),
    (0, "bfloat16", 18), (1, "bfloat16", 6 + 12 / 4), (2, "bfloat16", 2 + 16 / 4)])
def test_bytes_of_state_per_parameter(zero_stage, dtype, expected):
    """Gradients have 4 bytes per parameter. Replicas reduce them once a step, with ZeRO-2 once a microbatch."""
    config = tiny(4, dtype=dtype, zero_stage=zero_stage, hidden_size=64, device="cpu", global_batch_size=24)
    run, parameters = dry_run(train, config), sum(weight.numel() for weight in meta_stage(config).parameters())
    assert formulas.state_bytes_per_parameter(config) == expected
    assert sum(run.state.values()) / parameters == pytest.approx(expected, rel=1e-4)
    sent = {kind: bytes_ / parameters for (group, kind), (_, bytes_) in run.traffic.items() if group == "dp"}
    assert sent == pytest.approx(dict(all_reduce=4) if zero_stage == 0 else dict(
        reduce_scatter=4 * (config.microbatches if zero_stage == 2 else 1), all_gather=config.params_dtype.itemsize))


@pytest.mark.parametrize("cut, positions", [(False, "rope"), (True, "learned_absolute")])
@pytest.mark.parametrize("granularity, stream, inside", [("none", 4, 12), ("selective", 4, 7), ("full", 2, 0)])
def test_activations_of_a_layer(granularity, stream, inside, cut, positions):
    """Exact: a norm keeps two fp32 numbers per token, and attention one per token and head. Rotated q and k are kept in
    place of the q and k that they are made from."""
    config = small(recompute_granularity=granularity, sequence_parallel=cut, position_embedding_type=positions)
    tensors = stream * X / (2 if cut else 1) + inside * X / 2
    statistics = 4 * 3 * 32 * (4 / (2 if cut else 1) + 8 / 2 * (granularity == "none"))
    assert per_layer(config, kept) == tensors + statistics


def test_activations_of_a_layer_with_attention_dropout():
    """Each score has a probability, an fp32 mask and a dropped probability. The matmuls save contiguous q, k and v,
    which take the place of qkv."""
    expected = 4 * X + 12 * X / 2 + 4 * 3 * 32 * 4 + (2 + 4 + 2) * 3 * 4 * 32 * 32
    assert per_layer(small(attention_dropout=0.1), kept) == expected


@pytest.mark.parametrize("slices, columns", [(1, 1), (3, 2)])
@pytest.mark.parametrize("cut, expected", [(False, dict(all_reduce=4)), (True, dict(reduce_scatter=4, all_gather=6))])
def test_collectives_of_a_layer(cut, expected, slices, columns):
    """Slices and columns make more calls, not more bytes. Norm gradients are summed once per step."""
    config = small(sequence_parallel=cut, slices=slices, columns=columns)
    for kind, times in expected.items():
        added = per_layer(config, lambda run: np.array(run.traffic["tp", kind]))
        assert [*added] == [config.microbatches * times * each for each in (slices * columns, X)]


def test_a_rings_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (1, 2, 8):
        scattered, gathered = (formulas.bytes_sent(kind, 1024, ranks) for kind in ("reduce_scatter", "all_gather"))
        assert formulas.bytes_sent("all_reduce", 1024, ranks) == scattered + gathered == 2 * 1024 * (ranks - 1) / ranks
        assert formulas.bytes_sent("all_to_all", 1024, ranks) == gathered
    assert formulas.bytes_sent("send", 1024, 2) == 1024 and formulas.bytes_sent("receive", 1024, 2) == 0


# ---- published numbers

@pytest.mark.parametrize("model, vocabulary, active", [
    ("mixtral-8x7b", 32000, 12_879_925_248), ("qwen3-30b-a3b", 151936, 3_353_032_704)])
def test_a_token_uses_the_published_number_of_parameters(model, vocabulary, active):
    """12.9 and 3.3 billion; the FLOPs count these."""
    config = Config(model=model, vocab_size=vocabulary, dtype="bfloat16").resolve(1)
    assert formulas.active_parameter_count(config) == active
    heads = config.num_attention_heads * config.kv_channels
    assert formulas.flops_per_token(config) == 6 * active + 12 * config.num_layers * heads * config.seq_length


@pytest.mark.parametrize("changes", [
    {}, dict(num_query_groups=2, swiglu=True, kv_channels=16, disable_bias_linear=True), dict(mtp_num_layers=1),
    dict(num_experts=4, disable_bias_linear=True, moe_router_topk=2)], ids=["gpt2", "llama", "depth", "experts"])
def test_the_operations_of_a_dry_run_are_the_models_flops(changes):
    """flops_per_token also counts norms, biases and all pairs of tokens. The kernel skips half of the pairs, and in
    backward multiplies five times instead of four: 7/12."""
    config = tiny(1, **{"hidden_size": 64, "seq_length": 32, "global_batch_size": 3, "device": "cpu"} | changes)
    matmuls, scores, tokens = 0.0, 0.0, 3 * config.seq_length
    for event in dry_run(train, config).events:
        if isinstance(event, Operation):
            matmuls += event.flops * (event.kind == "matmul")
            scores += event.flops * event.kind.startswith("attention")
    multiplied = config.mtp_num_layers * config.padded_vocab_size * config.hidden_size + sum(
        weight.numel() * config.active_share(weight.spec.kind)
        for name, weight in meta_stage(config).named_parameters() if weight.dim() > 1 and "position" not in name)
    pairs = 12 * (3 + config.mtp_num_layers) * config.num_attention_heads * config.kv_channels * config.seq_length
    merged = 4 * 3 * config.moe_router_topk * config.hidden_size if config.num_experts else 0      # experts' results
    assert (matmuls, scores) == ((6 * multiplied + merged) * tokens, 7 / 12 * pairs * tokens)
    assert formulas.flops_per_token(config) == pytest.approx(matmuls / tokens + pairs, rel=0.02)


# ---- a machine's rates

def test_a_matmul_takes_whole_waves_of_tiles():
    """Four multiprocessors at 1 FLOP/s each: 2 x 2 tiles of 128 x 256 fit, and one more row adds a wave."""
    wave = 2 * 128 * 256
    fits, longer = (matmul_seconds(1, rows, 512, 1024, 4.0, 4, math.inf) for rows in (256, 257))
    assert fits == wave * (1024 + START) > 2 * 256 * 512 * 1024 / 4.0
    assert longer > 1.3 * fits and matmul_seconds(2, 128, 512, 1024, 4.0, 4, math.inf) == fits
    split = matmul_seconds(1, 128, 256, 8192, 4.0, 4, math.inf)
    assert split == pytest.approx(wave * (8192 / 4 + START) + KERNEL), "a single tile is cut along k into 4 parts"


def test_an_operation_takes_the_longer_of_its_flops_and_its_bytes():
    """In fp8 a GPU's matmuls are twice as fast. Fused attention has its own rates, by head size."""
    cpu = machine(matmul_rate=10.0, memory_rate=5.0)
    assert [cpu.operation_seconds(Operation("matmul", bytes_, 100.0, (1, 5, 2, 5), 2)) for bytes_ in (10, 100)] == [
        10.0, 20.0]
    gpu = machine(matmul_rate=7e3, peak=1e4, multiprocessors=4)
    wide, narrow = (gpu.operation_seconds(Operation("matmul", 0, 0.0, (1, 256, 512, 1024), size)) - KERNEL
                    for size in (2, 1))
    assert wide == pytest.approx(2 * narrow) and wide == pytest.approx(4 * 2 * 128 * 256 * (1024 + START) / 7e3)
    for head, (forward, backward) in ATTENTION.items():
        for kind, share in (("attention", forward), ("attention backward", backward)):
            assert gpu.operation_seconds(Operation(kind, 0, 1e4, (head,), 2)) == pytest.approx(1 / share, rel=1e-4)


def test_a_group_on_several_hosts_uses_the_network():
    """Of 8 ranks on a host, ranks 0 and 7 are near, 7 and 8 are not. A single rank sends nothing."""
    one = machine(intra_host_rate=100.0, inter_host_rate=10.0, latency=1.0)
    assert [one.collective_seconds("all_gather", 200.0, ranks) for ranks in ((0, 7), (7, 8), (3,))] == [2.0, 11.0, 0.0]
