"""Which functions run a slice through one layer, and what does the other slice do meanwhile?

    python bench.py calls             prints the calls of a forward and a backward on two tensor-parallel ranks
    python bench.py calls --write     also writes them into docs/one-layer.md

Python's profiler reports every call in a microbatch with two slices. docs/one-layer.md says which of them are listed.
"""

import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from torch import nn

import nanodomino
import train
from benchmarks.runner import BENCH, RandomTokens, about, config_of, describe, join
from nanodomino.comm.trace import Trace
from nanodomino.domino import Domino, run_to_end
from nanodomino.files import write_file
from nanodomino.zero import ZeroOptimizer

PAGE, PACKAGE, ROUNDS = BENCH.parent / "docs" / "one-layer.md", f"{nanodomino.__path__[0]}/", False
# The layer in the middle is shown, because it has a neighbour on each side.
SIZES = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, num_layers=3, hidden_size=16, slices=2,
             num_attention_heads=2, seq_length=8, micro_batch_size=4, global_batch_size=4, vocab_size=30, device="cpu")


@dataclass(eq=False)
class Call:
    """A call for a slice. caller: the call that made it; first_event: how many events the trace had before."""
    slice: int
    name: str
    file: str
    says: str
    caller: "Call | None"
    first_event: int
    waits: str = ""                                            # the site whose collective it waited for


def add_flags(parser):
    parser.add_argument("--write", action="store_true", help="write the tables into docs/one-layer.md")


def processes(flags) -> int:
    return 2


def answer(flags, launch):
    config, mesh = join(config_of(flags, 2, **SIZES), launch)
    tables = record(config, mesh)
    if flags.write and launch.rank == 0:
        write_file(PAGE, replace_tables(PAGE.read_text(), tables).encode())
    return "\n\n".join([describe(config), *tables]), about(config)


def replace_tables(page: str, tables: list[str]) -> str:
    """Return the page with these tables, in order, in the places of its own."""
    tables = iter(tables)
    return re.sub(r"(?:^\|.*\n)+", lambda _: next(tables) + "\n", page, flags=re.MULTILINE)


def record(config, mesh) -> list[str]:
    """Run a microbatch. Return two tables: the calls of slice 0 in one layer's attention, forward and backward."""
    trace, model = Trace(), train.model_builder(config, mesh)
    ZeroOptimizer(model, config, mesh)                         # makes the buckets of the gradients
    domino = Domino(model, config.slices, config.columns, trace=trace)
    batch = RandomTokens(config).batches(config)[0]
    calls, (losses, tape) = calls_of(domino.forward(batch), trace)
    return [table(calls), table(calls_of(domino.backward(tape, torch.ones_like(losses)), trace)[0])]


def calls_of(generator, trace) -> tuple[list[Call], object]:
    """Run the generator of a forward or a backward to its end. Return both slices' calls in order, and its result."""
    calls, frames = [], {}

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event != "call" or frame in frames or not file.startswith(PACKAGE):       # a resumed frame is no new call
            return
        frames[frame], owner, caller = None, frame.f_locals.get("self"), frame.f_back
        received = (caller if isinstance(owner, nn.Module) else frame).f_locals.get("slice")
        if not hasattr(received, "index") or (owner is not None and caller.f_locals.get("self") is owner):
            return
        while caller and not frames.get(caller):
            caller = caller.f_back
        function, home = frame.f_code.co_name, sys.modules[frame.f_globals["__name__"]]
        places = [home] if owner is None else [type(owner), home]
        text = next(filter(None, (place.__doc__ for place in (getattr(places[0], function), *places))))
        says = re.match(r".+?\.(?= [A-Z]|$)|.+", " ".join(text.split("\n\n")[0].split()))[0]      # the first sentence
        frames[frame] = Call(received.index, function if owner is None else f"{type(owner).__name__}.{function}",
                             file.removeprefix(PACKAGE), says, frames.get(caller), len(trace.events))
        calls.append(frames[frame])

    sys.setprofile(profile)
    try:
        result = run_to_end(generator)
    finally:
        sys.setprofile(None)
    for number, event in enumerate(trace.take()):
        if "group" in event.args:                              # a launch, or a wait
            call = [call for call in calls if call.slice == event.args["slice"] and call.first_event <= number][-1]
            if event.kind == "wait":
                call.waits, note = event.args["site"], "Here the slice waits."
            else:
                note = f"The {event.kind.replace('_', '-')} starts."
            call.says += f" **{note}**"
    return calls, result


def table(calls: list[Call]) -> str:
    """Return a table of slice 0's calls in the attention of the middle layer. A call that the MLP makes instead stands
    below attention's. The calls up to a wait belong to the sublayer whose collective is awaited."""
    sublayers, meanwhile, since, last = {}, defaultdict(list), [], None
    for call in calls:
        if call.slice:                                         # slice 1's, until slice 0 makes its next call
            meanwhile[last].append(call)
            continue
        last = call
        since.append(call)
        if call.waits:
            sublayers[call.waits], since = since, []
    rows, numbers, counts = ["| step | call | file | what it does |", "|---|---|---|---|"], {}, Counter()
    for call, other in zip(sublayers["layers.1.attention"], sublayers["layers.1.mlp"]):
        parent = f"{numbers[call.caller]}." if call.caller in numbers else ""
        counts[parent] += 1
        numbers[call] = f"{parent}{counts[parent]}"
        rows.append(f"| {numbers[call]} | `{call.name}` | `{call.file}` | {call.says} |")
        if other.name != call.name:
            rows.append(f"| in the MLP | `{other.name}` | `{other.file}` | {other.says} |")
        others = [f"`{one.name}`" for one in meanwhile[call] if one.caller not in meanwhile[call]]
        rows += [f"| | | | *Meanwhile slice 1:* {', '.join(others)} |"] * bool(others)
    return "\n".join(rows)
