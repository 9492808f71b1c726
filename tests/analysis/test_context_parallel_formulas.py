"""The formulas for samples that several ranks share: by hand, and against ranks that run."""

import dataclasses

import pytest
from support.harness import FAMILIES, tiny
from support.measured_ranks import PEAK, check_memory, held_rank
from support.published_sizes import cluster, machine

from benchmarks import plan
from benchmarks.plan_changes import context_sizes
from nanodomino.analysis import expected_memory, expected_traffic, sizes, step_time
from nanodomino.analysis.sublayer_memory import layer_tape_bytes

A2A = dict(cp_comm_type="a2a")
TP2, PP2 = dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2)
CP2, CP4, CP8 = (dict(context_parallel_size=cp) for cp in (2, 4, 8))


def llama(world_size, **changes):
    """Return the Config of llama3-8b, with 4 query heads per key head."""
    return cluster(world_size, **{"model": "llama3-8b", "tensor_model_parallel_size": 1, "seq_length": 8192,
                                  "pipeline_model_parallel_size": 1, **changes})


# ---- by hand

def test_the_ranks_of_cp_and_dp():
    """The grid of 2 stages x 2 replicas x 2 cp ranks x 2 tp ranks."""
    config = tiny(16, **TP2, **PP2, **CP2)
    at = sizes.mesh_at(config, pp_rank=1, dp_rank=1, tp_rank=1, cp_rank=0)
    assert at.rank_of(1, 1, 1, 0) == 13 and config.dp == 2
    assert {name: sizes.group_ranks(at, name) for name in ("tp", "cp", "dp", "pp")} == {
        "tp": [12, 13], "cp": [13, 15], "dp": [9, 11, 13, 15], "pp": [5, 13]}


def test_zero_shards_over_dp_x_cp_ranks():
    shared, apart = llama(8, **CP4), llama(8)
    assert shared.dp == 2 and apart.dp == 8
    assert sizes.bucket_sizes(shared, sizes.mesh_at(shared)) == sizes.bucket_sizes(apart, sizes.mesh_at(apart))
    for formula in (expected_memory.state_bytes, expected_traffic.optimizer_traffic):
        assert formula(shared, sizes.mesh_at(shared)) == formula(apart, sizes.mesh_at(apart))


@pytest.mark.parametrize("granularity, again", [("none", 0), ("selective", 1), ("full", 1)])
@pytest.mark.parametrize("way, forward, backward", [("all_gather", 2 * 8 / 4, 2 * 8 / 4),
                                                    ("a2a", 2 + 2 / 4, 2 + 2 / 4)])
def test_what_a_layer_sends_to_the_ranks_that_share_its_samples(way, forward, backward, granularity, again):
    """In units of X, the bytes of q. k and v have X/4 each, and 8 ranks gather them."""
    config = llama(8, **CP8, cp_comm_type=way, recompute_granularity=granularity)
    found = expected_traffic.context_parallel_traffic(config, sizes.mesh_at(config))
    x, layers = sizes.hidden_bytes(config), config.num_layers * config.microbatches
    sent = [sum(one.bytes for one in found if one.backward == direction) / x / layers for direction in (False, True)]
    assert sent == [forward, backward + again * forward]
    assert sum(one.calls for one in found) == (2 + again) * layers * (2 if way == "a2a" else 1)
    assert {one.group for one in found} == {"cp"} and not expected_traffic.context_parallel_traffic(
        llama(8), sizes.mesh_at(llama(8)))


def test_a_layer_keeps_less_of_a_sample_but_with_all_gather_all_of_its_keys():
    """In units of X, the bytes of q. Where GPUs use varlen attention, rank 0 of 8 reads 8 + 1/2 parts of the keys."""
    whole, gathers, exchanges = (dataclasses.replace(llama(8, **changes), device="cuda")
                                 for changes in ({}, CP8, CP8 | A2A))
    (_, kept), (x, gathered), (_, exchanged) = ((sizes.hidden_bytes(one), sum(layer_tape_bytes(one).values()))
                                                for one in (whole, gathers, exchanges))
    assert exchanged - kept / 8 == x                           # attention's output before it is sent back
    assert gathered - kept / 8 == (2 * 8.5 - 2) / 4 * x
    shared = expected_memory.shared_tape_bytes(gathers)
    tokens = sizes.tokens_per_microbatch(gathers)
    assert shared == {"cos, sin": 4 * 128 * tokens, "numbers of keys": 8 * 8.5 * tokens}


def test_a_rank_computes_its_share_of_the_scores():
    whole, shared = llama(8), llama(8, **CP8)
    alone, own = (step_time.stage_flops(config, sizes.mesh_at(config))[0] for config in (whole, shared))
    assert alone == 8 * own


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
def test_in_forward_only_other_slices_hide_the_exchange(way):
    """With a single slice it is exposed, and columns do not change that."""
    one = machine(matmul_rate=1e14, intra_host_rate=1e11)
    exposed = {}
    for slices, columns in ((1, 1), (1, 4), (2, 1)):
        config = llama(8, **CP2, cp_comm_type=way, micro_batch_size=2, slices=slices, columns=columns)
        cost = step_time.action_costs(config, one, sizes.mesh_at(config))["forward", 0]
        assert 0 < cost.communication == cost.places < cost.compute / 2
        exposed[slices, columns] = (step_time.action_seconds(config, cost) - cost.compute) / cost.communication
    assert exposed == {(1, 1): pytest.approx(1), (1, 4): pytest.approx(1), (2, 1): pytest.approx(0)}


def test_in_backward_a_weight_gradient_hides_the_first_collective_only():
    """Of the two all-to-alls, the first sends Q of 2 Q + 2 K bytes. With all_gather there is only one collective, but
    it takes longer than the weight gradient if the link is slow. A later weight gradient hides nothing."""
    for way, hidden in (("a2a", 1 / 2.5), ("all_gather", 1)):
        config = llama(8, **CP2, cp_comm_type=way)
        fast, slow = (machine(matmul_rate=1e14, intra_host_rate=rate) for rate in (1e12, 1e9))
        at = sizes.mesh_at(config)
        cost = step_time.action_costs(config, fast, at)["backward", 0]
        seconds = step_time.action_seconds(config, cost)
        assert seconds - cost.compute - cost.independent == pytest.approx((1 - hidden) * cost.communication)
        cost = step_time.action_costs(config, slow, at)["backward", 0]
        matrix = config.num_layers * 2 * sizes.tokens_per_microbatch(config) * config.hidden_size ** 2 / 1e14
        assert cost.covered == pytest.approx(matrix) and matrix < cost.communication
        apart = step_time.action_costs(config, fast, at)["input_backward", 0]
        assert apart.covered == 0 and apart.places == step_time.action_costs(config, fast, at)["backward", 0].places


def test_nccl_has_a_ring_for_cp_and_one_for_dp():
    rings = [expected_memory.communicator_bytes(dataclasses.replace(config, device="cuda"), sizes.mesh_at(config))
             / expected_memory.CONNECTION_BYTES / expected_memory.CHANNELS for config in (llama(8), llama(8, **CP8))]
    assert rings == [2, 3]


def test_plans_propose_context_parallelism_only_for_long_samples():
    assert context_sizes(8192, 8) == [1] and context_sizes(32768, 8) == [1, 2, 4]
    long = dict(seq_length=32768, max_position_embeddings=32768)
    assert {"context_parallel_size": 4} in plan.remedies(llama(8, **long))
    assert not any("context_parallel_size" in change for change in plan.remedies(llama(8)))


# ---- against ranks that run

def case(world_size, name, *options, exhaustive=False, **more):
    return pytest.param(world_size, {key: value for option in (*options, more) for key, value in option.items()},
                        id=name, marks=pytest.mark.exhaustive if exhaustive else [])


FULL, SELECTIVE = (dict(recompute_granularity=name) for name in ("full", "selective"))
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
EXPERTS = dict(num_experts=4, disable_bias_linear=True)
GROUPED = dict(num_query_groups=4)
FP8 = dict(dtype="bfloat16", fp8_format="hybrid", num_layers=4, seq_length=32)


@pytest.mark.parametrize("world_size, changes", [
    case(2, "gather", CP2, GROUPED, slices=2),
    case(2, "a2a", CP2, A2A, GROUPED, slices=2),
    case(2, "gather-selective", CP2, FAMILIES["llama"], SELECTIVE, dtype="bfloat16"),
    case(4, "gather-cut", CP2, TP2, FAMILIES["mixed"], sequence_parallel=True, slices=2),
    case(4, "a2a-full", CP2, PP2, A2A, FAMILIES["llama"], FULL, schedule="zb-h1"),
    case(2, "gather-fp8-depth", CP2, FAMILIES["llama"], FP8, mtp_num_layers=1, slices=2),
    *(case(*one, exhaustive=True) for one in (
        (2, "gather-qwen3", CP2, FAMILIES["qwen3"], FULL, dict(zero_stage=0)),
        (2, "a2a-qwen3-documents", CP2, A2A, FAMILIES["qwen3"], dict(reset_attention_mask=True)),
        (2, "gather-dropout-documents", CP2, FAMILIES["qwen2"], DROPOUT, dict(reset_attention_mask=True)),
        (2, "a2a-dropout", CP2, A2A, FAMILIES["qwen2"], DROPOUT),
        (4, "gather-cp4", CP4, FAMILIES["llama"], FULL, dict(zero_stage=0, slices=2, seq_length=64)),
        (4, "a2a-cp4", CP4, A2A, FAMILIES["qwen3"], SELECTIVE, dict(zero_stage=2, seq_length=64)),
        (4, "gather-paired", CP2, PP2, FAMILIES["llama"], dict(schedule="paired", slices=2)),
        (4, "gather-dp", CP2, FAMILIES["llama"], dict(reset_position_ids=True)),
        (2, "gather-long-full", CP2, FAMILIES["llama"], FULL, dict(slices=2, seq_length=128)),
        (4, "gather-three-slices", CP4, FAMILIES["llama"], FULL, dict(slices=3, seq_length=128)),
        (4, "gather-chunks", CP2, PP2, FAMILIES["llama"], dict(num_layers=4, virtual_stages=2)),
        (2, "a2a-depths", CP2, A2A, FAMILIES["llama"], dict(mtp_num_layers=2, reset_attention_mask=True)),
        (4, "gather-depth-full", CP2, TP2, FAMILIES["llama"], FULL, dict(mtp_num_layers=1, sequence_parallel=True)),
        (2, "a2a-fp8-rowwise", CP2, A2A, FAMILIES["llama"], FP8, dict(fp8_recipe="rowwise")),
        (4, "gather-fp8-selective", CP2, TP2, FAMILIES["llama"], FP8, SELECTIVE, dict(sequence_parallel=True)),
        (8, "a2a-tp-pp", CP2, TP2, PP2, A2A, dict(slices=2, columns=2, sequence_parallel=True))))])
def test_state_tapes_collectives_and_bytes_equal_the_formulas(pool, world_size, changes):
    config = tiny(world_size, **{"global_batch_size": 6, "num_layers": 2, "device": "cpu", **changes})
    for (held, said), (counted, expected) in pool.run(held_rank, config, world_size=world_size):
        check_memory(held, said, PEAK)
        assert counted == expected


def test_experts_sum_their_counts_over_the_ranks_of_a_sample(pool):
    """The all-to-alls send as many rows as the tokens choose, so only the other collectives are compared."""
    config = tiny(4, **CP2, **EXPERTS, expert_model_parallel_size=2, global_batch_size=6, num_layers=2, slices=3,
                  device="cpu")
    for _, (counted, expected) in pool.run(held_rank, config, world_size=4):
        assert counted.keys() == expected.keys() and expected["cp", "all_reduce"] == (2 * 3, 2 * 8 * 3 * 4)
        assert all(counted[key] == expected[key] for key in counted if key[1] != "all_to_all")
