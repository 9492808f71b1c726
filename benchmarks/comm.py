"""Do the collectives and bytes of a real step match the formulas? Counted on every rank, compared exactly.

One optimizer step of train.py runs on real processes, on random tokens. Every collective and every message passes
torch's dispatcher on its way to the process group, whoever calls it; there a `CollectiveCounter` counts

    calls     collectives or messages, by process group and kind
    bytes     of the whole tensor: what is reduced, what a scatter starts from, what a gather ends with
    wire      what this rank sends in a ring of the group's n members: 2 (n-1)/n of a sum, (n-1)/n of a scatter or
              a gather

and beside it stands what formulas.py says of this rank: no tolerance. Slices and columns make more calls, never more
bytes; ranks differ by their stage, and by nothing else.

    python bench.py comm --tp 2 --pp 2 --dp 2 --slices 2 --columns 2
"""

import dataclasses
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from benchmarks.common import (RandomTokens, add_config_flags, bytes_text, config_of, gathered, layout_of,
                               schedule_text, table)
from nanodomino.analysis import expected_traffic, sizes
from nanodomino.comm.collectives import TAGS
from nanodomino.comm.world import find_device, start_world
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.zero import ZeroOptimizer

# c10d's operators -> (the name of the collective, which argument is the whole tensor or a list with it).
COLLECTIVES = {"allreduce_": ("all_reduce", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
               "_allgather_base_": ("all_gather", 0), "send": ("send", 0), "recv_": ("receive", 0)}
PARTS = {tag: kind for kind, tag in TAGS.items()}
ROUNDS = False               # one step says all


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2,
                     micro_batch_size=2, global_batch_size=16)


def processes(flags) -> int:
    """tp x pp x dp; what is wrong about the flags is said before any process starts."""
    sizes = [flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size, flags.data_parallel_size]
    world_size = max(sizes[0] * sizes[1] * sizes[2], 1)
    config_of(flags, world_size)
    return world_size


def answer(flags, launch):
    config, mesh, optimizer, stage = build(config_of(flags, launch.world_size), launch)
    dataset = RandomTokens(config, mesh.device)
    while config.dtype == "float16" and not optimizer.updates:       # it skips some until its loss scale fits
        train.train_step(1, stage, optimizer, dataset, config, mesh)
    with CollectiveCounter(mesh) as listener:
        train.train_step(1, stage, optimizer, dataset, config, mesh)
    return report(config, gathered(listener.counts))


def build(config: Config, launch):
    """(config with the device that was found, mesh, optimizer, stage) of this process, as train.py makes them,
    uncompiled."""
    device = find_device(config, launch)
    config = dataclasses.replace(config, device=device.type)
    start_world(launch, device)
    mesh = make_mesh(config.pp, config.dp, config.tp, device)
    model = train.model_builder(config, mesh)
    return config, mesh, ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns)


class CollectiveCounter(TorchDispatchMode):
    """Counts what its thread hands to process groups: counts[group, kind] = (calls, bytes).

    On CPUs a reduce-scatter or an all-gather of n ranks travels as n - 1 messages of a part each
    (nanodomino/collectives.py): so one of them is 1/(n-1) of a call, and of n/(n-1) times its bytes."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.found = {}
        groups = {"world": dist.group.WORLD, "tp": mesh.tp_group, "dp": mesh.dp_group, "pp": mesh.pp_group,
                  "embedding": mesh.embedding_group}
        self.names = {group.group_name: name.split()[0] for name, group in groups.items() if group is not None}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            operator = function.name().split("::")[1].split(".")[0]
            kind, whole = COLLECTIVES.get(operator, (operator, 0))       # an unknown one has no formula: found out
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            tensors = args[whole] if isinstance(args[whole], (list, tuple)) else [args[whole]]
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            name, call = self.names[group.group_name], Fraction(1)
            if name != "pp" and kind == "send":
                kind, call = PARTS[args[3]], Fraction(1, group.size() - 1)
                size *= group.size() * call
            if name == "pp" or kind != "receive":
                calls, total = self.found.get((name, kind), (0, 0))
                self.found[name, kind] = (calls + call, total + size)
        return function(*args, **(kwargs or {}))

    @property
    def counts(self):
        return {key: (int(calls), int(size)) for key, (calls, size) in self.found.items()
                if calls.denominator == 1}               # a part of a collective has no formula: found out


def report(config: Config, counted: list[dict]):
    """counted: by rank. Ranks with the same counts share their lines of the table."""
    predicted = [expected_traffic.totals_by_group(expected_traffic.step_traffic(config, at)) for at in sizes.all_meshes(config)]
    rows, records = [], []
    for ranks in alike([[sorted(one.items()) for one in both] for both in zip(counted, predicted)]):
        count, formula = counted[ranks[0]], predicted[ranks[0]]
        for key in sorted(count.keys() | formula.keys()):
            (calls, size), (said_calls, said_size) = (one.get(key, (0, 0)) for one in (count, formula))
            at = sizes.all_meshes(config)[ranks[0]]
            members = len(set(sizes.group_ranks(at, key[0])))
            wire, said_wire = (expected_traffic.bytes_sent(key[1], one, members) for one in (size, said_size))
            rows.append([text_of(ranks), *key, members, calls, said_calls, size, said_size, bytes_text(wire),
                         "yes" if (calls, size) == (said_calls, said_size) else "NO"])
            records.append({"ranks": ranks, "group": key[0], "kind": key[1], "calls": calls, "bytes": size,
                            "wire_bytes": wire, "formula_calls": said_calls, "formula_bytes": said_size,
                            "formula_wire_bytes": said_wire})
    exact = counted == predicted
    head = ["ranks", "group", "collective", "members", "calls", "formula", "bytes", "formula", "wire", "equal"]
    text = "\n".join([
        f"tp {config.tp}, pp {config.pp}, dp {config.dp}, slices {config.slices}, columns {config.columns}, ZeRO stage "
        f"{config.zero_stage}, {schedule_text(config)}, {config.microbatches} microbatches of "
        f"{config.micro_batch_size} x {config.seq_length} x {config.hidden_size}, {config.num_layers} layers, "
        f"{config.dtype}; one step, by rank",
        table(head, rows),
        "every count equals its formula" if exact else "some counts do not equal their formulas"])
    return text, {"question": "comm", "exact": exact, "world_size": config.world_size, **layout_of(config),
                  "rows": records}


def alike(found: list) -> list[list[int]]:
    """found: by rank. The ranks of which the same was found, together."""
    together = {}
    for rank, one in enumerate(found):
        together.setdefault(str(one), []).append(rank)
    return list(together.values())


def text_of(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
