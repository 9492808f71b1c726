"""Which functions run a slice through one layer, and what does the other slice do meanwhile?

    python bench.py calls             prints the calls of a forward and a backward on two tensor-parallel ranks
    python bench.py calls --write     also writes them into docs/one-layer.md

Python's profiler reports every call in a microbatch with two slices. A call is listed if it receives the slice, or if a
function that received the slice calls a module of the model. What an object calls on itself is left out. Each sentence
is the first one of the function's docstring, or else of its class or its file.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

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
SITES = "layers.1.attention", "layers.1.mlp"


@dataclass(eq=False)
class Call:
    """A call for a slice. caller: the call that made it; first_event: how many events the trace had before."""
    slice: int
    name: str
    file: str
    says: str
    caller: "Call | None"
    first_event: int
    launches: str = ""                                         # the kind of the collective that it launched
    waits: str = ""                                            # the site whose collective it waited for
    meanwhile: list = field(default_factory=list)              # the other slice's calls before this slice's next call


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
    batch = RandomTokens(config).batch(0, 0, 0, 1, config.micro_batch_size, config.global_batch_size)
    (losses, tape), forward = calls_of(domino.forward(batch), trace)
    _, backward = calls_of(domino.backward(tape, torch.ones_like(losses)), trace)
    return [table(*(sublayers(calls)[site] for site in SITES)) for calls in (forward, backward)]


def calls_of(generator, trace) -> tuple[object, list[Call]]:
    """Run the generator of a forward or a backward to its end. Return its result and slice 0's calls, in order."""
    calls, frames = [], {}

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event != "call" or frame in frames or not file.startswith(PACKAGE):       # a resumed frame is no new call
            return
        frames[frame], owner, caller = None, frame.f_locals.get("self"), frame.f_back
        index = slice_of(caller if isinstance(owner, nn.Module) else frame)
        if index is None or (owner is not None and caller.f_locals.get("self") is owner):
            return
        while caller and not frames.get(caller):
            caller = caller.f_back
        name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
        frames[frame] = Call(index, name, file.removeprefix(PACKAGE), sentence(frame, owner), frames.get(caller),
                             len(trace.events))
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
                call.waits = event.args["site"]
            else:
                call.launches = event.kind
    own = []
    for call in calls:
        (own if call.slice == 0 else own[-1].meanwhile).append(call)
    return result, own


def slice_of(frame) -> int | None:
    """Return the number of the slice that a function received."""
    return getattr(frame.f_locals.get("slice"), "index", None)


def sentence(frame, owner) -> str:
    """Return the first sentence of a function's docstring, or else of its class or its file."""
    home = sys.modules[frame.f_globals["__name__"]]
    places = [home] if owner is None else [type(owner), home]
    texts = [place.__doc__ for place in (getattr(places[0], frame.f_code.co_name), *places)]
    paragraph = " ".join(next(filter(None, texts)).split("\n\n")[0].split())
    return re.match(r".+?\.(?= [A-Z]|$)|.+", paragraph)[0]


# ---- tables

def sublayers(calls: list[Call]) -> dict[str, list[Call]]:
    """Return {site: its calls}. The calls up to a wait belong to the sublayer whose collective is awaited."""
    found, since = {}, []
    for call in calls:
        since.append(call)
        if call.waits:
            found[call.waits], since = since, []
    return found


def table(calls: list[Call], others: list[Call]) -> str:
    """Return a table of attention's calls. others: the MLP's calls; one that differs stands below attention's."""
    rows, numbers, counts = ["| step | call | file | what it does |", "|---|---|---|---|"], {}, Counter()
    for call, other in zip(calls, others):
        parent = f"{numbers[call.caller]}." if call.caller in numbers else ""
        counts[parent] += 1
        numbers[call] = f"{parent}{counts[parent]}"
        notes = [f"**The {call.launches.replace('_', '-')} starts.**"] * bool(call.launches)
        notes += ["**Here the slice waits.**"] * bool(call.waits)
        rows.append(f"| {numbers[call]} | `{call.name}` | `{call.file}` | {' '.join([call.says, *notes])} |")
        if other.name != call.name:
            rows.append(f"| in the MLP | `{other.name}` | `{other.file}` | {other.says} |")
        if meanwhile := [f"`{one.name}`" for one in call.meanwhile if one.caller not in call.meanwhile]:
            rows.append(f"| | | | *Meanwhile slice 1:* {', '.join(meanwhile)} |")
    return "\n".join(rows)
