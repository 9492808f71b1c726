"""A dry run of a rank has the state, the traffic and the memory of the real rank; stages and seconds follow from it."""

from types import SimpleNamespace

import pytest
import torch
from support.fake_cuda import machine, run_under
from support.harness import FAMILIES, build, tiny

import train
from benchmarks import memory
from benchmarks.memory import comparable
from benchmarks.runner import RandomTokens
from nanodomino.errors import UserError
from nanodomino.estimate.accounts import Accounts, ActionEnd, Launch, Operation, Wait, operation_of, workspace
from nanodomino.estimate.rank import Clock, clock_of, dry_run, kinds_of
from nanodomino.estimate.formulas import bytes_outside_torch
from nanodomino.estimate.stages import Stage, fullest_rank_bytes, message_bytes, require_memory, step_seconds
from nanodomino.schedules.definitions import SCHEDULES


(TP2, TP4), (PP2, PP4), (CP2, CP4), (EP2, EP4) = (
    [{f"{axis}_parallel_size": size} for size in (2, 4)]
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model"))
CUT, A2A, ZERO2 = dict(sequence_parallel=True), dict(cp_comm_type="a2a"), dict(zero_stage=2)
SELECTIVE, FULL = (dict(recompute_granularity=name) for name in ("selective", "full"))
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)
DOCUMENTS = dict(reset_attention_mask=True, reset_position_ids=True)
BF16 = dict(dtype="bfloat16", normalization="RMSNorm")
FP8 = dict(BF16, fp8_format="hybrid", seq_length=32, hidden_size=32, num_layers=4)
# two stages have chunks of different sizes
FIVE_LAYERS = dict(slices=2, num_layers=5, hidden_size=32, global_batch_size=12)
EXPERTS = dict(num_experts=4, disable_bias_linear=True, hidden_size=64, seq_length=32, global_batch_size=12)


def real_rank(config):
    """Train a step for real and return this rank's RankRun."""
    mesh, _, optimizer, stage = build(config)
    dataset = RandomTokens(config, mesh.device)
    memory.first_update(optimizer, stage, dataset, config)
    return memory.measure(optimizer, stage, dataset, config)


def runs_of(pool, world_size, *changes):
    """Return (each rank's dry run, each rank's real run)."""
    options = {name: value for change in changes for name, value in change.items()}
    config = tiny(world_size, **{"global_batch_size": 6, "num_layers": 2, "device": "cpu"} | options)
    return ([dry_run(train, config, rank) for rank in range(world_size)],
            pool.run(real_rank, config, world_size=world_size))


def case(world_size, name, *changes, exhaustive=False):
    return pytest.param(world_size, changes, id=name, marks=pytest.mark.exhaustive if exhaustive else [])


@pytest.mark.parametrize("world_size, changes", [
    case(1, "dropout", DROPOUT, BF16, dict(slices=2)),
    case(2, "documents-cut", TP2, FAMILIES["qwen3"], DOCUMENTS, DROPOUT, CUT),
    case(2, "fp16-slices", TP2, BF16, dict(dtype="float16", slices=3)),
    case(2, "cut-full-window", TP2, CUT, FULL, DROPOUT, BF16, dict(slices=3, window_size=5)),
    case(2, "depth-cut-columns", TP2, CUT, dict(mtp_num_layers=1, slices=2, columns=2)),
    case(2, "cp-gather-fp8-full", CP2, FAMILIES["llama"], FP8, FULL, dict(slices=2, fp8_recipe="rowwise",
                                                                          num_layers=2)),
    case(4, "cp-a2a-tp", CP2, TP2, A2A, FAMILIES["llama"], SELECTIVE),
    case(2, "zero2-few-tokens", ZERO2, BF16, dict(micro_batch_size=1)),
    case(4, "zero2-zb-h1", ZERO2, PP2, dict(schedule="zb-h1", untie_embeddings_and_output_weights=True,
                                            global_batch_size=12)),
    case(4, "zero0-buckets", PP2, dict(zero_stage=0, bucket_size=1)),
    case(8, "tp-pp-dp", TP2, PP2, dict(slices=2, columns=3, global_batch_size=12)),
    *(case(2, name, PP2, FULL, FIVE_LAYERS, dict(schedule=name)) for name in SCHEDULES),
    *(case(4, f"{name}-cut", PP2, TP2, CUT, SELECTIVE, DROPOUT, FIVE_LAYERS, dict(schedule=name), exhaustive=True)
      for name in SCHEDULES),
    *(case(*one, exhaustive=True) for one in (
        (4, "tp4-columns", TP4, DROPOUT, dict(slices=3, columns=7)),
        (4, "full-tp-pp", TP2, PP2, FULL, DROPOUT, BF16, dict(slices=3)),
        *((2, f"{name}-selective", TP2, SELECTIVE, FAMILIES[name], DROPOUT) for name in FAMILIES),
        (2, "fp8-zb-h1", PP2, FP8, dict(schedule="zb-h1", first_last_layers_bf16=True, slices=2)),
        (4, "depth-zb-v", PP2, TP2, dict(mtp_num_layers=1, schedule="zb-v", num_layers=4)),
        (2, "cp-gather-documents", CP2, DOCUMENTS, DROPOUT, FAMILIES["qwen2"]),
        (4, "cp4-gather-three-slices", CP4, FULL, FAMILIES["llama"], dict(slices=3, seq_length=64)),
        (4, "cp-a2a-full-zb-h1", CP2, PP2, A2A, FULL, FAMILIES["llama"], dict(schedule="zb-h1")),
        (8, "cp-tp-pp", CP2, TP2, PP2, A2A, CUT, dict(slices=2, columns=2))))])
def test_state_memory_and_traffic_are_those_of_a_real_run(pool, world_size, changes):
    """The activations are nearly exact, so that a tensor more or less shows; only a message that is still in flight may
    differ. In 16 bits they are with RMSNorm: meta tensors have the statistics of a GPU's layer norm in fp32, and a CPU
    has them in 16 bits."""
    for dry, real in zip(*runs_of(pool, world_size, *changes)):
        assert (real.state, real.traffic) == (dry.state, dry.traffic)
        assert real.activations == pytest.approx(dry.activations, rel=5e-3)
        assert real.peak == pytest.approx(dry.peak, rel=0.01)


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
    assert sum(run.peak for run in real) == pytest.approx(sum(run.peak for run in dry), rel=0.03)


class SecondStep(Accounts):
    """Counts a second step, in which the buffers of messages exist from the start."""

    def train_step(self, step, *given, on_action):
        train.train_step(step, *given)
        self.peak = self.now
        train.train_step(step, *given, on_action=on_action)


@pytest.mark.parametrize("schedule, rank", [("1f1b", 0), ("gpipe", 3), ("interleaved", 3)])
def test_a_first_step_needs_what_later_steps_need(schedule, rank):
    """GPipe's last stage sends nothing before its peak."""
    config = tiny(4, **PP4, schedule=schedule, num_layers=8, device="cuda", compile=False)
    first, second = dry_run(train, config, rank), run_under(SecondStep, config, rank)[1]
    assert (second.peak, second.activations) == (first.peak, first.activations)


# ---- pipelines of any size, from small runs

@pytest.mark.parametrize("schedule", [name if name in ("zb-h1", "eager-1f1b") else pytest.param(
    name, marks=pytest.mark.exhaustive) for name in SCHEDULES])
def test_small_runs_tell_what_all_layers_and_microbatches_of_four_stages_need(schedule):
    """The state is exact. The ends of a stage, and the copies of its messages, are much beside its few thin layers."""
    chunks = SCHEDULES[schedule].chunks[0]
    config = tiny(4, **PP4, num_layers=8 * chunks, hidden_size=32, global_batch_size=48, device="cpu",
                  virtual_stages=chunks, schedule=schedule)
    one = machine(matmul_rate=1e12, memory_rate=1e11, intra_host_rate=1e10)
    for pp_rank in range(4):
        whole, found = dry_run(train, config, pp_rank), Stage(train, config, pp_rank).memory()
        assert {name: found[name] for name in whole.state} == whole.state
        assert sum(found.values()) == pytest.approx(whole.peak, rel=0.025)
        actions, _ = Stage(train, config, pp_rank, quick=True).seconds(one)
        for kinds, parts in clock_of(whole, one).actions.items():
            assert sum(actions[kinds].values()) == pytest.approx(sum(parts.values()), rel=0.04)


def test_small_runs_tell_what_a_pair_that_recomputes_needs():
    config = tiny(1, num_layers=32, seq_length=64, schedule="paired", recompute_granularity="full", device="cpu")
    assert sum(Stage(train, config, 0).memory().values()) == pytest.approx(dry_run(train, config, 0).peak, rel=0.025)


@pytest.mark.parametrize("schedule, least, most", [
    ("1f1b", 0.9, 1.1), ("paired", 0.9, 1.1), ("interleaved", 0.45, 0.55), ("zb-h1", 0.2, 0.45), ("zb-v", 0, 0.45)])
def test_with_free_communication_there_is_only_the_bubble(schedule, least, most):
    """The bubble is (p - 1)/m of the ideal time. Two chunks halve it; weight gradients fill it: (p - 1)(F + B - W)."""
    config = tiny(4, **PP4, num_layers=16, hidden_size=64, global_batch_size=48, device="cpu", schedule=schedule)
    parts = step_seconds(train, config, machine(matmul_rate=1e12))
    ideal = parts["matmuls"] + parts["attention"]
    assert least <= parts["bubble"] / ideal / (3 / 16) <= most
    assert sum(parts.values()) == pytest.approx(ideal + parts["bubble"])


def test_each_stage_of_a_small_model_takes_time():
    """The whole model runs dry. So a stage between the ends has no layers of others to scale."""
    config = tiny(4, **PP4, num_layers=4, global_batch_size=24, device="cpu")
    times = [Stage(train, config, stage, quick=True).seconds(machine(matmul_rate=1e9))[0] for stage in range(4)]
    forward = [sum(actions[(("forward", 0),)].values()) for actions in times]
    assert forward[1] == pytest.approx(forward[2]) and 0.5 * forward[0] < forward[1] < 1.5 * forward[0]


def test_more_stages_have_more_sends_in_flight():
    config = tiny(8, pipeline_model_parallel_size=8, num_layers=8, seq_length=64, global_batch_size=48, device="cuda",
                  compile=False)
    needed = sum(Stage(train, config, 0).memory().values()) - bytes_outside_torch(config, 0)
    assert needed == pytest.approx(dry_run(train, config).peak, abs=message_bytes(config) / 2)


def test_the_fullest_rank_is_found_without_the_memory_of_the_host():
    config = tiny(2, **PP2, **FULL, checkpoint_in_cpu=True, num_layers=8, hidden_size=64, device="cuda",
                  dtype="bfloat16", global_batch_size=24)
    stages = [Stage(train, config, stage).memory() for stage in (0, 1)]
    assert stages[0]["host"] > 0
    assert fullest_rank_bytes(train, config) == max(sum(found.values()) - found["host"] for found in stages)


def test_the_longest_end_of_a_step_counts_also_on_a_stage_that_is_not_the_busiest():
    config = tiny(2, **PP2, global_batch_size=6)
    ends = {0: 2.0, 1: 3.0}

    def make_stage(program, config, stage, quick):
        row = tuple(map(kinds_of, config.timetable.rows[stage]))
        return SimpleNamespace(row=row, seconds=lambda machine: ({kinds: {"matmuls": 2.0 - stage} for kinds in row},
                                                                 {"update": ends[stage]}))

    parts = step_seconds(train, config, machine(), make_stage)
    assert (parts["matmuls"], parts["update, at the end"]) == (2.0 * 2 * config.microbatches, 3.0)


@pytest.mark.parametrize("slices, columns, exposed", [(1, 1, 7), (2, 1, 1 / 2), (1, 4, 1 + 6 / 4)])
def test_slices_hide_fast_communication_and_columns_all_but_the_last_column(slices, columns, exposed):
    """Of seven all-reduces in forward, nothing hides the last slice's last. Weight gradients hide backward's."""
    config = tiny(2, **TP2, slices=slices, columns=columns, micro_batch_size=2, hidden_size=256, seq_length=64,
                  global_batch_size=2, device="cpu")
    actions = clock_of(dry_run(train, config), machine(matmul_rate=1e9, intra_host_rate=1e9)).actions
    forward, backward = (actions[((name, 0),)] for name in ("forward", "backward"))
    one = 2 * 64 * 256 * 8 / 1e9
    assert forward["tp exposed"] / one == pytest.approx(exposed, abs=0.1) and 7 * one < forward["matmuls"] / 4
    assert backward["tp exposed"] < one


def parts_of(events, **rates):
    """Play events on a machine where a matmul of n FLOPs takes n seconds, and an all-reduce of n bytes on two ranks."""
    run = SimpleNamespace(events=events, ranks_of={"tp": (0, 1), "dp": (0, 8), "pp": (0, 1)})
    return Clock(run, machine(**{"matmul_rate": 1.0, "intra_host_rate": 1.0, "inter_host_rate": 1.0} | rates))


def work(seconds):
    return Operation("matmul", 0, seconds)


def launch(number, seconds, group="tp", kind="all_reduce"):
    return Launch(group, kind, seconds, number)


@pytest.mark.parametrize("events, exposed, rates", [
    ([work(2), launch(1, 3), work(1), Wait(1)], {"tp exposed": 2}, {}),
    ([launch(1, 3), work(3), Wait(1)], {"tp exposed": 0}, {}),
    # two collectives share the wire of their group, another group has its own
    ([launch(1, 3), launch(2, 3), launch(3, 5, "dp"), work(2), Wait(1), Wait(2), Wait(3)],
     {"tp exposed": 1 + 3, "dp exposed": 0}, {}),
    ([launch(1, 3), work(9), launch(2, 3), Wait(2)], {"tp exposed": 3}, {}),       # the wire was free again
    # in flight for 3 s, in which 2.25 s of compute are done; then 7.75 s more
    ([launch(1, 3), work(10), Wait(1)], {"matmuls": 10.75, "tp exposed": 0}, dict(overlap_slowdown=0.25)),
    ([launch(1, 8), work(3), Wait(1)], {"matmuls": 4, "tp exposed": 4}, dict(overlap_slowdown=0.25)),
    # a copy to the host and one back have a wire each, and slow down nothing
    ([launch(1, 4, "host", "to host"), launch(2, 6, "host", "from host"), work(1), Wait(1), Wait(2)],
     {"matmuls": 1, "host exposed": 1 + 1}, dict(host_copy_rate=2.0, overlap_slowdown=0.5)),
    ([launch(1, 50, "pp", "send"), work(1), Wait(1)], {"pp exposed": 0}, {}),      # the simulated schedule has messages
    ([launch(1, 3), Wait(1), Wait(1), Wait(7)], {"tp exposed": 3}, {})], ids=str)
def test_the_clock(events, exposed, rates):
    clock = parts_of(events, **rates)
    assert {name: clock.after[name] for name in exposed} == exposed and clock.now == sum(clock.after.values())


def test_actions_of_a_kind_take_their_median_and_collectives_cross_their_ends():
    """The all-reduce that the second action launches is exposed in the third."""
    kinds = (("forward", 0),)
    clock = parts_of([work(1), ActionEnd(kinds), launch(1, 5), work(2), ActionEnd(kinds), work(1), Wait(1),
                      ActionEnd(kinds), work(7)])
    assert clock.actions == {kinds: {"matmuls": 1, "tp exposed": 0}} and clock.after == {"matmuls": 7}
    assert clock.now == 1 + 5 + 7


# ---- what the accounts cannot say

def test_an_operation_that_multiplies_and_has_no_flops_is_an_error():
    with Accounts({}, host_counts=True), pytest.raises(UserError, match="FLOPs of torch's convolution"):
        torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(4, 4, 3))


def test_what_is_alive_between_two_actions_and_what_is_not():
    """Real runs are measured by the same code, so this one is by hand. Each action has 400 bytes for itself and 200 in
    the host's memory, the first keeps 1,200, the second frees them, and the update has 4,000 for itself."""
    def train_step(*_, on_action):
        kept = torch.empty(300, device="meta")
        for done in range(4):
            torch.empty(100, device="meta")
            torch.empty(50, pin_memory=True)
            kept = kept if done == 0 else None
            on_action(done + 1, 4)
        torch.empty(1000, device="meta")

    run = dry_run(SimpleNamespace(model_builder=train.model_builder, train_step=train_step),
                  tiny(1, global_batch_size=6, device="cpu"))
    forward, backward = (("forward", 0),), (("backward", 0),)
    assert run.row == (forward, backward, forward, backward) and (run.activations, run.host) == (1200, 200)
    assert (run.first_peak, run.last_peak, run.peak - sum(run.state.values())) == (1600, 4000, 4000)
    assert run.kept == {forward: 0, backward: -1200} and run.peaks == {forward: 1000, backward: 400}


def test_a_matmul_without_rows_or_words_has_no_flops():
    """A rank may own no words, and its experts may get no rows."""
    with Accounts({}, host_counts=True) as accounts:
        for left, right in (((3, 0), (0, 5)), ((0, 3), (3, 5)), ((0, 2, 3), (0, 3, 5))):
            torch.ones(left) @ torch.ones(right)
    assert [event.flops for event in accounts.events if event.kind == "matmul"] == [0, 0, 0]


def test_attention_within_documents_costs_as_many_flops_as_its_documents_one_by_one():
    """Two documents of 8 tokens have 2 (8 * 8) / 2 pairs of query and key for each of 4 heads of size 16."""
    q, starts = torch.empty(16, 4, 16, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    found = operation_of("_varlen_attn", dict(query=q, key=q, cu_seq_q=starts), [q], [q])
    assert found.flops == 4 * 4 * (2 * 8 * 8 / 2) * 16


def test_grouped_queries_need_more_memory_in_the_backward_of_flash_attention():
    """The gradient of q in fp32, and those of k and v for each query head."""
    q, k = (torch.empty(1, heads, 8, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    found = [workspace("_flash_attention_backward", dict(query=q, key=keys)) / q.numel() for keys in (q, k)]
    assert found == [4, 4 + 2 * 2]


def test_a_run_whose_dry_run_fails_starts_without_an_estimate(monkeypatch):
    def fails(*arguments, **options):
        raise UserError("the dry run does not know the FLOPs of torch's new_mm")

    assert require_memory(train, tiny(1), torch.device("cpu"), 1) == "the fullest rank needs 0.5 MiB of memory"
    monkeypatch.setattr(train, "train_step", fails)
    words = require_memory(train, tiny(1, lr=0.123), torch.device("cpu"), 1)
    assert words == "no estimate of its memory (the dry run does not know the FLOPs of torch's new_mm)"


def test_a_remembered_operation_counts_as_it_did_the_first_time(monkeypatch):
    """Its temporary bytes are in the peak again. Two views with the same shape and strides can have other bytes."""
    monkeypatch.setattr("nanodomino.estimate.accounts.REMEMBERED", {})
    monkeypatch.setattr("nanodomino.estimate.accounts.workspace", lambda name, given: 7000 * (name == "add"))
    row, matrix = torch.empty(1, 8, device="meta"), torch.empty(4, 8, device="meta")
    with Accounts({}, host_counts=False) as accounts:
        for _ in range(2):
            accounts.restart()
            sums = [view.expand(4, 8) + 1 for view in (row, matrix[:1])]
            assert [operation.bytes for operation in accounts.events] == [32 + 128, 128 + 128]
            assert (accounts.now, accounts.peak) == (32 + 3 * 128, 32 + 3 * 128 + 7000)
            del sums
