"""Do the collectives and bytes of a real step match the formulas? Counted on every rank, compared exactly.

Runs one optimizer step of train.py on real processes with random tokens. Every collective and every message passes
through torch's dispatcher, where a `CollectiveCounter` counts them. The table shows for each process group and kind,
such as all_reduce:

    calls     the number of collectives or messages
    bytes     the size of the whole tensor: what is all-reduced, a reduce-scatter's input, an all-gather's output
    sent      the bytes that this rank sends in a ring of the group's n ranks: 2 (n-1)/n of an all-reduced tensor,
              (n-1)/n of a tensor that is reduce-scattered or all-gathered, the whole tensor of a message. Of an
              all-to-all the same share as of an all-gather, if the experts are chosen equally often

The formulas are those of nanodomino/analysis/expected_traffic.py. More slices and columns make more calls but not more
bytes. How many rows a rank receives depends on the tokens. So for all-to-alls the calls are compared rank by rank, but
the bytes in total over all ranks.

    python bench.py comm --tp 2 --pp 2 --dp 2 --slices 2 --columns 2
"""

import dataclasses
import math
from collections import Counter
from fractions import Fraction
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import train
from benchmarks.common import (RandomTokens, add_config_flags, bytes_text, config_here, describe, gathered,
                               layout_of, table)
from nanodomino.analysis import expected_traffic, sizes
from nanodomino.comm import scatter_and_gather
from nanodomino.comm.scatter_and_gather import TAGS
from nanodomino.comm.world import find_device, start_world
from nanodomino.config.config import Config
from nanodomino.domino import Domino
from nanodomino.mesh import Mesh, make_mesh
from nanodomino.zero import ZeroOptimizer

# The name of c10d's operator -> (our name of the collective, index of the argument that is the whole tensor).
COLLECTIVES = {"allreduce_": ("all_reduce", 0), "_reduce_scatter_base_": ("reduce_scatter", 1),
               "_allgather_base_": ("all_gather", 0), "alltoall_base_": ("all_to_all", 1), "send": ("send", 0),
               "recv_": ("receive", 0)}
KIND_OF_TAG = {tag: kind for kind, tag in TAGS.items()}
ROUNDS = False               # no --repeats: this question counts and does not time


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=2,
                     micro_batch_size=2, global_batch_size=16)


def processes(flags) -> int:
    """Return tp x pp x cp x dp. Raises UserError for wrong flags, so that they are found before processes start."""
    world_size = max(1, math.prod((flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size,
                                   flags.context_parallel_size, flags.data_parallel_size)))
    config_here(flags, world_size)
    return world_size


def answer(flags, launch):
    config, mesh, optimizer, stage = build(config_here(flags, launch.world_size), launch)
    dataset = RandomTokens(config, mesh.device)
    while config.dtype == "float16" and not optimizer.updates:       # skips steps until the loss scale is small enough
        train.train_step(1, stage, optimizer, dataset, config, mesh)
    with CollectiveCounter(mesh) as listener:
        train.train_step(1, stage, optimizer, dataset, config, mesh)
    return report(config, gathered(listener.counts))


def build(config: Config, launch):
    """Join the process groups and return (config with its device, mesh, optimizer, stage) of this process.

    Everything is built as in train.py, but without torch.compile.
    """
    device = find_device(config, launch)
    config = dataclasses.replace(config, device=device.type)
    start_world(launch, device)
    mesh = make_mesh(config.pp, config.dp, config.tp, device, ep=config.ep, cp=config.cp)
    model = train.model_builder(config, mesh)
    return config, mesh, ZeroOptimizer(model, config, mesh), Domino(model, config.slices, config.columns)


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives and messages that this thread launches: counts[group, kind] = (calls, bytes).

    On CPUs each rank performs a reduce-scatter or an all-gather over n ranks with n - 1 sends, each of 1/n of the
    tensor (comm/scatter_and_gather.py). So such a send counts as 1/(n-1) of a call, with n/(n-1) times its bytes. The
    sends of an all-to-all differ in size, and empty ones are left out. So it is counted where it launches its sends.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.found = {}
        groups = {"world": dist.group.WORLD, "tp": mesh.tp_group, "cp": mesh.cp_group, "dp": mesh.dp_group,
                  "pp": mesh.pp_group, "embedding": mesh.embedding_group, "ep": mesh.ep_group,
                  "ep counts": mesh.ep_counts_group,
                  **({"expert_dp": mesh.expert_dp_group} if mesh.ep > 1 else {})}
        self.names = {group.group_name: name.split()[0] for name, group in groups.items() if group is not None}

    def __enter__(self):
        self.original = mock.patch.object(scatter_and_gather, "exchange", partial(
            self.count_all_to_all, scatter_and_gather.exchange))
        self.original.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.original.stop()
        return super().__exit__(*error)

    def count_all_to_all(self, exchange, sends, receives, group, tag):
        if KIND_OF_TAG[tag] == "all_to_all":
            self.count(self.names[group.group_name], "all_to_all", 1, sum(tensor.nbytes for tensor in sends))
        return exchange(sends, receives, group, tag)

    def count(self, name: str, kind: str, call, size):
        calls, total = self.found.get((name, kind), (0, 0))
        self.found[name, kind] = (calls + call, total + size)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            operator = function.name().split("::")[1].split(".")[0]
            kind, whole = COLLECTIVES.get(operator, (operator, 0))       # unknown ones make the comparison fail
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            tensors = args[whole] if isinstance(args[whole], (list, tuple)) else [args[whole]]
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            name, call = self.names[group.group_name], Fraction(1)
            if name != "pp" and kind == "send":
                kind, call = KIND_OF_TAG[args[3]], Fraction(1, group.size() - 1)
                size *= group.size() * call
            if name == "pp" or kind not in ("receive", "all_to_all") or operator == "alltoall_base_":
                self.count(name, kind, call, size)
        return function(*args, **(kwargs or {}))

    @property
    def counts(self):
        return {key: (int(calls), int(size)) for key, (calls, size) in self.found.items()
                if Fraction(calls).denominator == 1}     # without incomplete collectives, so the comparison fails


def predict(config: Config) -> list[dict]:
    """Return what the formulas say for each rank: {(group, kind): (calls, bytes)}."""
    return [expected_traffic.totals_by_group(expected_traffic.step_traffic(config, mesh))
            for mesh in sizes.all_meshes(config)]


def report(config: Config, counted: list[dict]):
    """Return (text, record). counted: each rank's counts. Ranks with the same counts share the lines of the table."""
    predicted = predict(config)
    fair_counted, fair_predicted = comparable(counted), comparable(predicted)
    rows, records = [], []
    for ranks in alike([[sorted(counts.items()) for counts in pair] for pair in zip(counted, predicted)]):
        count, formula = counted[ranks[0]], predicted[ranks[0]]
        for key in sorted(count.keys() | formula.keys()):
            (calls, size), (expected_calls, expected_size) = (counts.get(key, (0, 0)) for counts in (count, formula))
            members = len(set(sizes.group_ranks(sizes.all_meshes(config)[ranks[0]], key[0])))
            sent, expected_sent = (expected_traffic.bytes_sent(key[1], payload, members)
                                   for payload in (size, expected_size))
            equal = fair_counted[ranks[0]].get(key) == fair_predicted[ranks[0]].get(key)
            rows.append([text_of(ranks), *key, members, calls, expected_calls, size, expected_size, bytes_text(sent),
                         "NO" if not equal else "yes" if size == expected_size else "in total"])
            records.append({"ranks": ranks, "group": key[0], "kind": key[1], "calls": calls, "bytes": size,
                            "wire_bytes": sent, "formula_calls": expected_calls, "formula_bytes": expected_size,
                            "formula_wire_bytes": expected_sent})
    exact = fair_counted == fair_predicted
    head = ["ranks", "group", "collective", "members", "calls", "formula", "bytes", "formula", "sent", "equal"]
    text = "\n".join([
        describe(config), "one step, by rank:",
        table(head, rows),
        "every count equals its formula" + ", if the bytes of all-to-alls are added up over all ranks" * any(
            row[-1] == "in total" for row in rows) if exact else "some counts do not equal their formulas"])
    return text, {"question": "comm", "exact": exact, "world_size": config.world_size, **layout_of(config),
                  "rows": records}


def comparable(found: list[dict]) -> list[dict]:
    """Return each rank's {(group, kind): (calls, bytes)} with the bytes of all-to-alls in total over all ranks."""
    totals = Counter()
    for counts in found:
        totals.update({key: size for key, (_, size) in counts.items()})
    return [{key: (calls, totals[key] if key[1] == "all_to_all" else size) for key, (calls, size) in counts.items()}
            for counts in found]


def alike(found: list) -> list[list[int]]:
    """Group the ranks whose findings are equal, for example [[0, 1], [2, 3]]. found: one finding per rank."""
    groups = {}
    for rank, finding in enumerate(found):
        groups.setdefault(str(finding), []).append(rank)
    return list(groups.values())


def text_of(ranks: list[int]) -> str:
    """Format [0, 1, 2, 5] as '0-2, 5'."""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
