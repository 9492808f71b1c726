"""A dry run of a rank has the state, the traffic and the memory of the real rank."""

import pytest
from support.harness import FAMILIES, build, tiny

import train
from benchmarks import measured
from benchmarks.comm import comparable
from benchmarks.common import RandomTokens
from nanodomino.dry_run.rank import dry_run
from nanodomino.schedules.definitions import SCHEDULES

PEAK = 0.01              # relative
TP2, PP2, CP2, EP2, TP4, CP4, EP4 = ({f"{axis}_parallel_size": size} for axis, size in (
    ("tensor_model", 2), ("pipeline_model", 2), ("context", 2), ("expert_model", 2), ("tensor_model", 4), ("context", 4),
    ("expert_model", 4)))
CUT, A2A, ZERO2 = dict(sequence_parallel=True), dict(cp_comm_type="a2a"), dict(zero_stage=2)
SELECTIVE, FULL = (dict(recompute_granularity=name) for name in ("selective", "full"))
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
DOCUMENTS = dict(reset_attention_mask=True, reset_position_ids=True)
FP8 = dict(dtype="bfloat16", fp8_format="hybrid", seq_length=32, num_layers=4)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, hidden_size=64, seq_length=32)


def real_rank(config):
    """Train a step for real and return this rank's RankRun."""
    mesh, _, optimizer, stage = build(config)
    dataset = RandomTokens(config, mesh.device)
    measured.first_update(optimizer, stage, dataset, config)
    return measured.measure(optimizer, stage, dataset, config)


def runs_of(pool, world_size, *changes):
    """Return (each rank's dry run, each rank's real run)."""
    options = {name: value for change in changes for name, value in change.items()}
    config = tiny(world_size, **{"global_batch_size": 12, "num_layers": 2, "device": "cpu"} | options)
    return ([dry_run(train, config, rank) for rank in range(world_size)],
            pool.run(real_rank, config, world_size=world_size))


def case(world_size, name, *changes, exhaustive=False):
    return pytest.param(world_size, changes, id=name, marks=pytest.mark.exhaustive if exhaustive else [])


@pytest.mark.parametrize("world_size, changes", [
    case(1, "dropout", DROPOUT, dict(slices=2, dtype="bfloat16")),
    case(2, "documents-cut", TP2, FAMILIES["qwen3"], DOCUMENTS, DROPOUT, CUT),
    case(2, "fp16-lion", TP2, dict(normalization="RMSNorm", dtype="float16", optimizer="lion", slices=3,
                                   fp16_lm_cross_entropy=True)),
    case(2, "cut-full", TP2, CUT, FULL, DROPOUT, dict(slices=3, dtype="bfloat16")),
    case(2, "depth-cut-columns", TP2, CUT, dict(mtp_num_layers=1, slices=2, columns=2)),
    case(2, "fp8-zb-h1", PP2, FP8, dict(schedule="zb-h1", first_last_layers_bf16=True, slices=2)),
    case(2, "cp-gather-fp8-full", CP2, FAMILIES["llama"], FP8, FULL, dict(slices=2, fp8_recipe="rowwise")),
    case(4, "cp-a2a-tp", CP2, TP2, A2A, FAMILIES["llama"], SELECTIVE),
    case(2, "zero2-few-tokens", ZERO2, dict(micro_batch_size=1, dtype="bfloat16")),
    case(4, "zero2-zb-h1", ZERO2, PP2, dict(schedule="zb-h1", untie_embeddings_and_output_weights=True)),
    case(4, "zero0-buckets", PP2, dict(zero_stage=0, bucket_size=1)),
    case(8, "tp-pp-dp", TP2, PP2, dict(slices=2, columns=3)),
    *(case(*one, exhaustive=True) for one in (
        (4, "tp4-columns", TP4, DROPOUT, dict(slices=3, columns=7, global_batch_size=6)),
        (4, "zero2-tp", ZERO2, TP2, CUT, SELECTIVE, dict(dtype="bfloat16", slices=2)),
        (4, "full-tp-pp", TP2, PP2, FULL, DROPOUT, dict(slices=3, dtype="bfloat16")),
        (2, "selective-columns", TP2, SELECTIVE, DROPOUT, dict(slices=2, columns=2)),
        *((2, f"{name}-selective", TP2, SELECTIVE, FAMILIES[name], DROPOUT) for name in FAMILIES),
        (2, "fp8-selective-cut", TP2, FP8, SELECTIVE, CUT, dict(slices=2)),
        (4, "depth-zb-v", PP2, TP2, dict(mtp_num_layers=1, schedule="zb-v", num_layers=4)),
        (2, "depths-pp", PP2, SELECTIVE, FAMILIES["llama"], dict(mtp_num_layers=2, slices=2)),
        (2, "depths-zero2-full", ZERO2, FULL, DROPOUT, dict(mtp_num_layers=2)),
        (2, "cp-gather-documents", CP2, DOCUMENTS, DROPOUT, FAMILIES["qwen2"]),
        (4, "cp-gather-cut", CP2, TP2, CUT, FAMILIES["mixed"], dict(slices=2)),
        (4, "cp4-gather-three-slices", CP4, FULL, FAMILIES["llama"], dict(slices=3, seq_length=64)),
        (4, "cp4-a2a-zero2", CP4, A2A, ZERO2, SELECTIVE, FAMILIES["qwen3"], dict(seq_length=64)),
        (4, "cp-a2a-full-zb-h1", CP2, PP2, A2A, FULL, FAMILIES["llama"], dict(schedule="zb-h1")),
        (2, "cp-a2a-depths-fp8", CP2, A2A, FP8, FAMILIES["llama"], dict(mtp_num_layers=1)),
        (8, "cp-tp-pp", CP2, TP2, PP2, A2A, CUT, dict(slices=2, columns=2))))])
def test_state_memory_and_traffic_are_those_of_a_real_run(pool, world_size, changes):
    for dry, real in zip(*runs_of(pool, world_size, *changes)):
        open("/tmp/meas34.txt", "a").write(" ".join(map(str, (__import__("os").environ["PYTEST_CURRENT_TEST"].split("::")[1], real.state == dry.state, real.traffic == dry.traffic, real.activations / dry.activations - 1, real.peak / dry.peak - 1))) + "\n")
        assert (real.state, real.traffic) == (dry.state, dry.traffic)
        assert (real.activations, real.peak) == (pytest.approx(dry.activations, rel=1e-3), pytest.approx(dry.peak, rel=PEAK))


@pytest.mark.parametrize("tp, changes", [(1, FULL), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
    (2, CUT), (1, SELECTIVE | DROPOUT)))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_and_traffic_of_each_schedule(pool, schedule, tp, changes):
    """Five layers on two stages: chunks of different sizes."""
    for dry, real in zip(*runs_of(pool, 2 * tp, PP2, changes, dict(
            tensor_model_parallel_size=tp, schedule=schedule, slices=2, num_layers=5, hidden_size=32))):
        open("/tmp/meas34.txt", "a").write(" ".join(map(str, (__import__("os").environ["PYTEST_CURRENT_TEST"].split("::")[1], real.state == dry.state, real.traffic == dry.traffic, real.activations / dry.activations - 1, real.peak / dry.peak - 1))) + "\n")
        assert (real.state, real.traffic) == (dry.state, dry.traffic)
        assert (real.activations, real.peak) == (pytest.approx(dry.activations, rel=1e-3), pytest.approx(dry.peak, rel=PEAK))


@pytest.mark.parametrize("world_size, changes", [
    case(1, "one-process", dict(slices=2, moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=64)),
    case(4, "tp-cut-selective", EP2, TP2, CUT, SELECTIVE, dict(slices=2)),
    *(case(*one, exhaustive=True) for one in (
        (4, "ep4", EP4, dict(slices=2, moe_router_pre_softmax=True)),
        (4, "pp-zb-h1", EP2, PP2, dict(schedule="zb-h1", moe_layer_freq=2, num_layers=3, swiglu=True)),
        (4, "zero2", EP2, ZERO2, FULL, DROPOUT, dict(dtype="bfloat16", moe_router_score_function="sigmoid")),
        (4, "cp", EP2, CP2, dict(slices=3)),
        (8, "paired", EP2, TP2, PP2, dict(schedule="paired", slices=2, columns=2))))])
def test_experts_need_as_much_on_average(pool, world_size, changes):
    """How much a rank receives depends on the tokens. The calls agree on each rank, and the bytes in total."""
    dry, real = runs_of(pool, world_size, EXPERTS, *changes)
    assert [run.state for run in real] == [run.state for run in dry]
    assert comparable([run.traffic for run in real]) == comparable([run.traffic for run in dry])
    print(sum(run.peak for run in real)/sum(run.peak for run in dry)-1, [a.peak/b.peak-1 for a,b in zip(real,dry)])
    assert sum(run.peak for run in real) == pytest.approx(sum(run.peak for run in dry), rel=0.03)
