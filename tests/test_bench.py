"""bench.py: each question ends with a line of JSON whose figures fit together; the slow wire is slow, and goes away.

The sizes are tiny: what is tested is the arithmetic around the times, not the times.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import tiny

from bench import QUESTIONS
from benchmarks import throughput
from benchmarks.common import RandomTokens, Times, compare, main, ratios
from benchmarks.overlap import hidden_part
from benchmarks.plain import Plain
from benchmarks.scaling import worlds
from benchmarks.wire import LARGEST_PACKET, build, parse_rate, slow_wire
from nanodomino.config import UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "16"]


def ask(*arguments) -> dict:
    """The last line of what bench.py prints."""
    done = subprocess.run([sys.executable, "bench.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


@pytest.fixture
def wire():
    """slow_wire, where it can be."""
    try:
        with slow_wire("1gbit", 1):
            pass
    except UserError as error:
        pytest.skip(str(error))
    return slow_wire


@pytest.fixture
def slow_if_possible() -> list[str]:
    """The flags of a run over the slow wire; none where it can't be made, and the loopback serves."""
    try:
        with slow_wire("100mbit", 2):
            return ["--wire", "100mbit", "--device", "cpu"]
    except UserError:
        return []


# ---- the questions

def test_overlap_compares_four_ways_to_talk_and_two_halves_of_the_work(slow_if_possible):
    """A sum after each sublayer forward and backward, one at each end, two in the cross entropy; in three slices."""
    record = ask("overlap", *TINY, "--micro-batch-size", "6", "--slices", "3", "--repeats", "2", *slow_if_possible)
    times = ("blocking_s", "megatron_s", "domino_s", "no_comm_s", "comm_s", "dtensor_s")
    assert all(0 < record[name] < 60 for name in times)
    assert record["speedup"] == record["blocking_s"] / record["domino_s"]
    assert record["bound_ratio"] == record["domino_s"] / max(record["no_comm_s"], record["comm_s"])
    assert record["hidden"] == hidden_part(record["domino_s"], record["no_comm_s"], record["comm_s"])
    assert all(0 <= least <= most for least, most in record["spread"].values())
    assert (record["hidden_size"], record["num_layers"], record["repeats"]) == (32, 2, 2)
    tokens, layers = 6 * 16, 2
    assert record["collectives"] == 3 * (4 * layers + 2 + 2)
    assert record["bytes"] == 4 * tokens * ((4 * layers + 2) * 32 + 3)
    assert record["wire"] == (slow_if_possible[1] if slow_if_possible else None)


@pytest.mark.parametrize("domino, compute, wires, hidden",
                         [(10, 10, 5, 1), (15, 10, 5, 0), (12, 10, 8, 0.75), (9, 10, 1, 1), (30, 10, 5, 0)])
def test_hidden_is_a_part_of_the_wires_time(domino, compute, wires, hidden):
    assert hidden_part(domino, compute, wires) == hidden


def test_throughput_compares_the_same_training():
    record = ask("throughput", *TINY, "--global-batch-size", "8", "--repeats", "3")
    assert record["loss_difference"] < 1e-4 and len(record["losses"]) == throughput.COMPARED_STEPS
    assert record["losses"][-1] < record["losses"][0] < 7, "the steps must train"
    for side in ("nanodomino", "plain"):
        assert record[f"{side}_tokens_per_s"] == pytest.approx(8 * 16 / record[f"{side}_s"])
    assert record["ratio_spread"][0] <= record["ratio"] <= record["ratio_spread"][1]
    assert record["mfu"] is None or 0 < record["mfu"] < 1


def test_throughput_refuses_to_compare_different_work():
    losses = {"nanodomino": [5.0, 4.9], "plain": [5.0, 4.8]}
    with pytest.raises(UserError, match="can't be compared"):
        throughput.report(tiny(dtype="float32"), None, {}, losses)


def test_scaling_starts_worlds_and_relates_them_to_one_process():
    record = ask("scaling", *TINY, "--max-processes", "2", "--repeats", "1")
    assert record["processes"] in ([1, 2], [1])                # a single GPU can't be shared
    alone = statistics.median(record[f"{layout}_{way}"]["tokens_per_s"][0]
                              for layout in ("dp", "tp") for way in ("weak", "strong"))
    for layout in ("dp", "tp"):
        for way in ("weak", "strong"):
            figures = record[f"{layout}_{way}"]
            for i, count in enumerate(record["processes"]):
                samples = 8 * count if way == "weak" else 8
                assert figures["tokens_per_s"][i] == pytest.approx(samples * 16 / figures["step_s"][i])
                assert figures["speedup"][i] == pytest.approx(figures["tokens_per_s"][i] / alone)
                assert figures["efficiency"][i] == pytest.approx(figures["speedup"][i] / count)


def test_worlds_double_up_to_the_largest():
    for largest, sizes in [(1, [1]), (2, [1, 2]), (3, [1, 2]), (8, [1, 2, 4, 8])]:
        assert worlds(type("Flags", (), dict(max_processes=largest))) == sizes


def test_stages_of_the_plain_model_make_the_whole():
    config = tiny(dtype="float32")
    whole = Plain(config)
    first = Plain(config, range(1), post_process=False).load(whole.state_dict())
    last = Plain(config, range(1, config.num_layers), pre_process=False).load(whole.state_dict())
    tokens = RandomTokens(config).batch(0, 0, 0, 1, 2, 24).tokens
    assert torch.equal(last(first(tokens)), whole(tokens))


# ---- bad input

@pytest.mark.parametrize("arguments, rule", [
    (["speed"], "there is no question 'speed'"),
    (["overlap", "--fast"], "unrecognized arguments: --fast"),
    (["overlap", "--tp", "1"], "--tp must be at least 2"),
    (["overlap", "--slices", "9"], "slices 9 must be at most micro-batch-size 8"),
    (["overlap", "--wire", "fast"], "--wire must be a rate"),
    (["overlap", "--hidden-size", "some"], "invalid int value: 'some'"),
    (["throughput", "--model", "huge"], "invalid choice: 'huge'"),
    (["throughput", "--repeats", "0"], "--repeats must be at least 1"),
    (["scaling", "--max-processes", "0"], "--max-processes must be at least 1"),
    (["scaling", "--global-batch-size", "6", "--micro-batch-size", "2"], "must be divisible by micro-batch-size x"),
])
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys, arguments, rule):
    assert main(QUESTIONS, "", arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and rule in err


# ---- the slow wire

@pytest.mark.parametrize("text, bits", [("500mbit", 500e6), ("10gbit", 10e9), ("1.5gbit", 1.5e9), ("2000kbit", 2e6)])
def test_a_rate_is_read_as_tc_reads_it(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "500", "mbit", "-5mbit", "500mbps", "500 mbit", "1e3mbit", "nan", "0mbit",
                                  "10kbit", "999gbit", "5mbit; reboot"])
def test_nonsense_is_no_rate(text):
    with pytest.raises(UserError, match="must be a rate from 1mbit to 100gbit"):
        parse_rate(text)


def test_every_rank_gets_a_limit_of_its_own():
    commands = build("hub", ["a", "b", "c"], 500_000_000)
    limits = [line for line in commands if line.startswith("tc ")]
    assert [line.split()[2] for line in limits] == ["a", "b", "c"]
    assert all("tbf rate 500000000bit" in line for line in limits)
    assert len({line.split()[5] for line in commands if "address add" in line}) == 3


RECEIVE = """
import socket, time
connection, _ = socket.create_server(("10.77.0.2", 5000)).accept()
begin, count = time.perf_counter(), 0
while part := connection.recv(1 << 20):
    count += len(part)
print(count, time.perf_counter() - begin)
"""
SEND = """
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(("10.77.0.2", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(bytes(4_000_000))
"""


def test_bytes_take_their_time_on_the_wire(wire):
    with wire("80mbit", 2) as places:
        commands = [[*prefix, sys.executable, "-c", code] for (prefix, _), code in zip(places, (SEND, RECEIVE))]
        sender, receiver = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands)
        count, seconds = map(float, receiver.communicate(timeout=60)[0].split())
        assert sender.wait(10) == 0
    assert count == 4_000_000
    assert seconds > 0.9 * (count - 2 * LARGEST_PACKET) * 8 / 80e6
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


HOLD = """
import sys, time
from benchmarks.wire import slow_wire
with slow_wire("1gbit", 2):
    print("up", flush=True)
    {}
"""


def listen_to_interrupts():
    """What a shell starts in the background ignores them, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("ends", ["SIGTERM", "SIGINT", "SIGHUP", "exception", "SIGKILL"])
def test_nothing_is_left_of_the_wire(wire, ends):
    """Of a process that was killed the next start removes it."""
    code = HOLD.format("1 / 0" if ends == "exception" else "time.sleep(60)")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               preexec_fn=listen_to_interrupts)
    assert process.stdout.readline() == b"up\n"
    if ends != "exception":
        assert len([name for name in namespaces() if f"-{process.pid}-" in name]) == 3
        process.send_signal(getattr(signal, ends))
    assert process.wait(20) != 0
    if ends == "SIGKILL":
        with wire("1gbit", 1):
            pass
    assert not [name for name in namespaces() if f"-{process.pid}-" in name]


def test_figures_are_related_round_by_round():
    """A load that comes and goes falls on both."""
    assert ratios(Times((2.0, 20.0, 4.0)), Times((1.0, 10.0, 2.0))) == Times((2.0, 2.0, 2.0))


def test_alternatives_are_compared_in_all_orders():
    """What runs first leaves memory and caches to the next: no one may always follow the same one."""
    ran = []
    times = compare({name: partial(ran.append, name) for name in "abcd"}, repeats=60)
    rounds = [ran[i:i + 4] for i in range(0, len(ran), 4)]
    assert all(sorted(one) == list("abcd") for one in rounds) and len(rounds) == 61
    pairs = {pair for one in rounds for pair in zip(one, one[1:])}
    assert len(pairs) == 12
    assert {name: len(one.seconds) for name, one in times.items()} == dict.fromkeys("abcd", 60)
