"""bench.py: the record of each question is consistent; the slow wire is slow and is removed. The sizes are tiny: the
tests check the arithmetic around the times, not the times."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import ROOT
from support.benchmark import ask, here, within
from support.fork_server import default_signals
from support.harness import tiny
from support.runs import wait_until

import train
from benchmarks import calls, memory, pipeline, throughput, zero
from benchmarks.overlap import figures_of
from benchmarks.runner import Figure, Times, compare, config_of, parse, require_same_work, with_mesh
from benchmarks.slow_network import LARGEST_PACKET, parse_rate, slow_wire
from nanodomino.comm.trace import Event
from nanodomino.errors import UserError
from nanodomino.estimate.rank import dry_run
from nanodomino.schedules.definitions import SCHEDULES
from nanodomino.schedules.simulation import bubble, simulate, step_time, timetable

TINY = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "16", "--device", "cpu"]


@pytest.fixture
def wire():
    """Return slow_wire, or skip the test if it can't be built."""
    try:
        with slow_wire("1gbit", 1):
            pass
    except UserError as error:
        pytest.skip(str(error))
    return slow_wire


# ---- the questions

def test_checkpoint_also_times_how_the_optimizers_moments_are_read(capsys, monkeypatch):
    states = set()
    monkeypatch.setattr("nanodomino.checkpoint.format.Index.read", lambda index, name, box, values: states.add(
        name.split(".")[0]))
    here(capsys, "checkpoint", *TINY[:4], "--num-attention-heads", "2", "--processes", "1", "--repeats", "1")
    assert states == {"weight", "exp_avg", "exp_avg_sq"}


@pytest.mark.exhaustive
def test_overlap():
    """An all-reduce per sublayer and direction, one at each end of the model, two in the loss; three slices."""
    record = ask("overlap", *TINY, "--micro-batch-size", "6", "--slices", "3", "--repeats", "2")
    times = ("blocking_s", "megatron_s", "domino_s", "compute_s", "wires_s")
    assert all(0 < record[name] < 60 for name in times)
    assert within(record["hidden"], record["hidden_spread"]) and within(record["speedup"], record["speedup_spread"])
    assert 0 < record["hideable"] <= 1 and record["repeats"] == 2
    tokens, layers = 6 * 16, 2
    assert record["collectives"] == 3 * (4 * layers + 2 + 2)
    assert record["bytes"] == 4 * tokens * ((4 * layers + 2) * 32 + 3)


@pytest.mark.parametrize("domino, compute, wires, hidden, bound", [
    (10, 10, 5, 1, 1), (15, 10, 5, 0, 1.5), (12, 10, 8, 0.75, 1.2), (20, 10, 20, 0.5, 1),
    (9, 10, 10, None, None),                # quicker than the work alone
    (15, 10, 20, None, None),               # quicker than the wires alone
    (30, 10, 5, None, 3)])                  # slower than both, one after the other: not hidden, but something else
def test_hidden_share_and_bound(domino, compute, wires, hidden, bound):
    rounds = {"blocking": 18, "megatron": 16, "domino": domino, "compute": compute, "wires": wires}
    hideable, figures = figures_of({name: Times((seconds,) * 3) for name, seconds in rounds.items()})
    assert hideable == min(1, compute / wires)
    assert figures["hidden"].value == hidden and figures["bound_ratio"].value == bound
    assert (figures["speedup"].value, figures["megatron_ratio"].value) == (18 / domino, 16 / domino)


@pytest.mark.exhaustive
@pytest.mark.parametrize("other, flags", [("plain", ["--num-layers", "1", "--compile"]), ("transformers", []),
                                          ("transformers", ["--model", "nano-moe"])], ids=str)
def test_throughput(other, flags):
    """Only one of them is compiled, and with one layer, because compilation takes most of the time. With experts the
    losses are equal only without the auxiliary loss, which Transformers does not add."""
    record = ask("throughput", *TINY, "--global-batch-size", "8", "--repeats", "3", "--against", other, *flags)
    losses = record["losses"]["nanodomino"]
    assert len(losses) == throughput.COMPARED_STEPS and losses[-1] < losses[0] < 7, "the steps must train"
    assert record["losses"][other] == pytest.approx(losses, rel=1e-4)
    assert within(record[f"{other}_ratio"], record[f"{other}_ratio_spread"])


@pytest.mark.parametrize("other", [[5.0, 4.8], [5.0, float("nan")]])
def test_different_work_is_not_compared(other):
    with pytest.raises(UserError, match="losses of plain are .* those of nanodomino .* can't be compared"):
        require_same_work(tiny(dtype="float32"), "losses", {"nanodomino": [5.0, 4.9], "plain": other})


# ---- real runs beside dry runs

SMALL = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8", "--vocab-size",
         "30", "--micro-batch-size", "2", "--global-batch-size", "4", "--tp", "1", "--pp", "1", "--dp", "1"]


@pytest.mark.exhaustive
def test_timeline(tmp_path):
    ask("timeline", "--picture", "zero", "--repeats", "1", "--output", str(tmp_path / "zero.svg"))
    assert "gradients over dp" in (tmp_path / "zero.svg").read_text()


@pytest.mark.exhaustive
def test_memory():
    record = ask("memory", *SMALL, "--tp", "2")
    assert record["exact"] is True and record["activations_error"] == record["peak_error"] == 0
    assert {(row["group"], row["kind"]) for row in record["collectives"]} == {
        ("tp", "all_reduce"), ("world", "all_reduce")}


def test_recompute(capsys):
    _, text, record, _ = here(capsys, "recompute", *SMALL, "--hidden-dropout", "0.1", "--repeats", "2")
    assert record["none_activations"] > record["selective_activations"] > record["full_activations"] > 0
    assert "the gradients are bit-equal" in text


def test_a_count_that_differs_is_found_and_all_to_alls_are_compared_in_total():
    """However tokens choose their experts."""
    def runs(*counts):
        return [SimpleNamespace(traffic={("ep", "all_to_all"): one}, ranks_of={"ep": (0, 1)}, state={"parameters": 4},
                                activations=4, peak=8, host=0) for one in counts]

    for counted, exact, words in (([(4, 70), (4, 90)], True, "if the bytes of all-to-alls are added up over all ranks"),
                                  ([(4, 70), (4, 80)], False, "some counts do not equal"),
                                  ([(3, 80), (4, 80)], False, "some counts do not equal")):
        text, record = memory.report(tiny(2, device="cpu"), runs((4, 80), (4, 80)), runs(*counted))
        assert record["exact"] is exact and words in text and "optimizer equal the dry run's" in text


# ---- pipeline

@pytest.mark.exhaustive
def test_pipeline():
    record = ask("pipeline", *TINY, "--num-layers", "4", "--microbatches", "2", "4", "--repeats", "2")
    rows = {(row["microbatches"], row["schedule"]): row for row in record["rows"]}
    assert set(rows) == {(m, schedule) for m in (2, 4) for schedule in SCHEDULES}
    for (_, schedule), row in rows.items():
        assert 0 < row["idle_spread"][0] < 1 and within(row["idle"], row["idle_spread"])
        assert 0 < row["step_s"] < 60 and within(row["of_1f1b"], row["of_1f1b_spread"])
        assert ("speed_spread" in row) == (schedule in pipeline.TORCH_CLASSES)
        assert 0 < row["simulated"] < 1 and row["simulated_of_1f1b"] > 0
        assert schedule != "1f1b" or row["of_1f1b"] == row["simulated_of_1f1b"] == 1
        assert 5 < row["loss"] < 7, "of 256 words drawn at random"


def worked(row) -> dict:
    """Return what a stage would record if each action took exactly its simulated time."""
    found = {}
    for action, begin, end in row:
        found.setdefault((action.kind, action.halves[0].chunk), []).append(end - begin)
    return found


@pytest.mark.parametrize("work", [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.5)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_time_without_delays_is_the_simulations(schedule, work):
    """With unequal stages the slowest determines the step."""
    m, p = 6, len(work)
    plan = timetable(schedule, p, m, SCHEDULES[schedule].chunks[0])
    rows = simulate(plan, lambda stage, action: action.length * work[stage])
    found = pipeline.idle(plan, [step_time(rows)] * 2, [[worked(row) for row in rows]] * 2)
    assert found["idle"].value == pytest.approx(found["simulated"]) and found["simulated_step_s"] == step_time(rows)
    if len(set(work)) == 1:
        assert found["simulated"] == pytest.approx(bubble(rows) / (1 + bubble(rows)))


def test_waits_are_not_part_of_an_actions_duration():
    """A pair's turns are one action."""
    def event(kind, begin, end, microbatch=0):
        return Event(kind, begin * 10**9, end * 10**9, dict(microbatch=microbatch, chunk=0))

    events = [event("forward", 0, 3), event("wait", 1, 2), event("backward", 4, 5), event("forward", 5, 7, 1),
              event("backward", 7, 8), event("backward", 9, 11, 1), event("wait", 8, 10)]
    assert pipeline.work_of(events) == {("forward", 0): [2.0], ("pair", 0): [4.0], ("backward", 0): [1.0]}


# ---- zero

@pytest.mark.exhaustive
def test_zero():
    wider = [*TINY, "--hidden-size", "256", "--microbatches", "2"]       # so that padding hardly counts
    record = ask("zero", *wider, "--repeats", "2")
    sides = record["sides"]
    assert list(sides) == ["zero-1", "zero-0", "zero-2", "ddp-zero", "fsdp2-keep"]
    assert record["microbatches"] == 2
    for side, expected in zip(sides.values(), (12, 16, 10, 12, 8)):
        # A rank may own a parameter more than another.
        assert side["bytes_per_parameter"] == pytest.approx(expected, rel=0.2)
        assert within(side["step_over_zero_1"], side["step_over_zero_1_spread"])
    # Of nanodomino's own sides, to the byte
    zero.processes(flags := parse(zero, ["zero", *wider]))
    for stage in (0, 1, 2):
        run = dry_run(train, replace(flags.config, zero_stage=stage, device="cpu"))
        assert sides[f"zero-{stage}"]["state_bytes"] == sum(run.state.values())


class Side:
    """A side with this loss and this gradient."""

    def __init__(self, loss, gradient, placement=""):
        self.step, self.gradients = lambda: loss, lambda: [torch.tensor([gradient])]
        self.config = SimpleNamespace(placement=placement)


@pytest.mark.parametrize("other", [(5.01, 3.0), (5.0, 3.01)])
def test_pipeline_refuses_to_compare_different_work(other):
    """Gradients may differ between placements of the layers."""
    sides = {("1f1b", "domino"): Side(5.0, 3.0), ("zb-v", "domino"): Side(5.0, 2.0, "folded")}
    pipeline.check_same_work(tiny(dtype="float32"), sides)
    with pytest.raises(UserError, match="of 1f1b torch are .* those of 1f1b domino"):
        pipeline.check_same_work(tiny(dtype="float32"), sides | {("1f1b", "torch"): Side(*other)})


# ---- bad input

@pytest.mark.parametrize("arguments, rule", [
    ("speed", "there is no question 'speed'"),
    ("overlap --tp 1", "--tp must be at least 2"),
    ("overlap --wire fast", "--wire must be a rate"),
    ("overlap --ideal-wire --wire 1gbit", "--ideal-wire and --wire exclude each other"),
    ("plan --repeats 3", "unrecognized arguments: --repeats 3"),                # a plan is computed, not timed
    ("throughput --repeats 0", "--repeats must be at least 1"),
    ("throughput --dtype float16", "--dtype must not be float16, because the other implementations"),
    ("pipeline --microbatches 8 1", "--microbatches must be multiples of --pp 2"),
    ("zero --dp 1", "--dp must be at least 2"),
    ("checkpoint --processes 3 --dp 2", "use 2 processes (GPUs)"),
    ("plan --network 0", "--network must be at least 0.001 and at most 1e+06, but is 0.0"),
    ("plan --dtype float32", "--gpu H100 needs --dtype bfloat16 or float16"),
    ("plan --gpu A100 --fp8-format hybrid", "--fp8-format needs a GPU with fp8"),
    ("plan --checkpoint-in-cpu", "--checkpoint-in-cpu needs --recompute-granularity full"),
    ("plan --published --search --gpus 8", "--published has no use for other flags; leave them out"),
    ("plan --search --gpus 6 --tp 4", "no layout for --gpus 6 obeys the rules together with the given flags; the first "
     "that was tried breaks this one: world size 6 must equal tensor x pipeline x data parallel = 4 x 1 x 1 = 4; use "
     "4 processes (GPUs)"),
    ("plan --search --ep 2", "--expert-model-parallel-size 2 needs --num-experts to have an effect")])
def test_bad_input_is_refused_in_one_sentence(capsys, arguments, rule):
    code, text, record, error = here(capsys, *arguments.split())
    assert code == 2 and not text and not record
    *progress, sentence = error.splitlines()
    assert sentence.startswith("error: ") and rule in sentence and len(progress) <= ("--search" in arguments)


# ---- the slow wire

def test_a_rate_is_read_as_tc_reads_it_or_refused():
    assert (parse_rate("500mbit"), parse_rate("1.5gbit"), parse_rate("2000kbit")) == (500e6, 1.5e9, 2e6)
    for wrong in ("500", "-5mbit", "500mbps", "0mbit", "999gbit", "5mbit; reboot"):
        with pytest.raises(UserError, match="must be a rate from 1mbit to 100gbit"):
            parse_rate(wrong)


RECEIVE = """
import socket, time
server = socket.create_server(("10.77.0.2", 5000))
print("ready", flush=True)
connection, _ = server.accept()
begin, count = time.perf_counter(), 0
while part := connection.recv(1 << 20):
    count += len(part)
print(count, time.perf_counter() - begin)
"""
SEND = 'import socket; socket.create_connection(("10.77.0.2", 5000)).sendall(bytes(4_000_000))'


def test_the_slow_wire_has_its_rate(wire):
    with wire("80mbit", 2) as ((send_from, _), (receive_at, _)):
        receiver = subprocess.Popen([*receive_at, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "ready\n"
        subprocess.run([*send_from, sys.executable, "-c", SEND], check=True, timeout=60)
        count, seconds = map(float, receiver.communicate(timeout=60)[0].split())
    assert count == 4_000_000
    assert seconds > 0.9 * (count - 2 * LARGEST_PACKET) * 8 / 80e6


HOLD = """
import sys, time
from benchmarks.slow_network import exit_on_signals, slow_wire
with exit_on_signals(), slow_wire("1gbit", 1) as (((_, namespace), _),):
    print(namespace, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("ends", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_nothing_is_left_of_the_wire(wire, ends):
    """Not even if the process is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, preexec_fn=default_signals)
    namespace = Path(process.stdout.readline().decode().strip().removeprefix("--net="))
    assert namespace.exists()
    process.send_signal(getattr(signal, ends))
    assert process.wait(300) != 0
    wait_until(lambda: not namespace.exists())


@pytest.mark.parametrize("figure, text", [
    (Figure((0.9, 1.0, 1.2)), "1.00 [0.90 .. 1.20]"),
    (Figure((1.0,) * 6 + (9.0,)), "1.00 [1.00 .. 9.00]"),                       # one round that was disturbed
    (Figure((1.0, 2.6)), "too noisy to tell [1.00 .. 2.60]"),
    (Figure((0.02, 0.1, 0.3), most=1.0, size=1.0), "0.10 [0.02 .. 0.30]"),      # a part of a whole is near 0 or not
    (Figure((-0.3, 0.5, 1.6), most=1.0, size=1.0), "too noisy to tell [-0.30 .. 1.60]"),
    (Figure((1.1, 1.1, 1.2), most=1.0, size=1.0), "too noisy to tell [1.10 .. 1.20]"),
    (Figure((0.9, 0.9, 1.1), least=1.0), "too noisy to tell [0.90 .. 1.10]")], ids=format)
def test_figures_too_noisy_to_tell(figure, text):
    """The spread is still printed; the JSON has null."""
    assert f"{figure:.2f}" == text
    assert (figure.record("gain")["gain"] is None) == text.startswith("too noisy")


def test_alternatives_run_in_changing_orders():
    """A function finds memory and caches as the previous one left them, so no fixed order is fair."""
    ran = []
    times = compare({name: partial(ran.append, name) for name in "abcd"}, repeats=60)
    rounds = [ran[i:i + 4] for i in range(0, len(ran), 4)]
    assert all(sorted(one) == list("abcd") for one in rounds) and len(rounds) == 61
    assert len({pair for one in rounds for pair in zip(one, one[1:])}) == 12
    assert {name: len(one.rounds) for name, one in times.items()} == dict.fromkeys("abcd", 60)


# ---- docs/one-layer.md

def tables_of_this_rank():
    return calls.record(*with_mesh(config_of(SimpleNamespace(), 2, **calls.SIZES), torch.device("cpu")))


def test_the_page_of_one_layer_shows_the_calls_of_a_run(pool):
    """Its text names the steps that launch and wait. `python bench.py calls --write` brings the tables up to date."""
    page = calls.PAGE.read_text()
    assert page == calls.replace_tables(page, pool.run(tables_of_this_rank, world_size=2)[0])
    words = " ".join(page.split())
    assert re.findall(r"all-reduce[\w ]* starts in step ([\d.]+)\.", words) == re.findall(
        r"^\| ([\d.]+) \|.*\*The all-reduce starts", page, re.MULTILINE)
    assert re.findall(r"Step (\d) hands over|waits in step (\d)", words) == [("4", ""), ("", "7")]
    assert re.findall(r"^\| ([\d.]+) \|.*\*Here the slice waits", page, re.MULTILINE) == ["4", "7"]


@pytest.mark.exhaustive
def test_bench_prints_the_calls():
    assert ask("calls")["slices"] == 2
