"""Does the memory of a rank match the formulas? Measured on every rank while it trains.

    parameters, gradients,    bytes of the model, the flat buckets and the optimizer, with padding. They must equal
    optimizer                 the formulas
    activations               peak bytes of all tensors that the tapes keep alive, including those that autograd saved
                              With experts they depend on the tokens: the formulas assume that all experts are chosen
                              equally often, and a rank with popular experts keeps more
    host                      with --checkpoint-in-cpu on CUDA: peak bytes that the tapes keep in the host's memory
    peak                      peak bytes of all tensors, also temporary ones. On CUDA the allocator counts them, on the
                              CPU a dispatch mode. For the peak the formula is only an estimate

The formulas are those of nanodomino/analysis/expected_memory.py. A second table lists what a tape keeps for one layer,
in units of X, the bytes of one activation [b, s, h]. The column "left / X" is for schedules that split backward: it
shows what the tape still keeps for the weight gradients once the input gradients are computed.

    python bench.py memory --tp 2 --pp 2 --slices 2
"""

import weakref
from contextlib import nullcontext
from types import FunctionType

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from benchmarks import comm
from benchmarks.comm import processes  # noqa: F401, called by common.main
from benchmarks.common import (RandomTokens, add_config_flags, bytes_text, config_here, describe, gathered,
                               layout_of, table)
from nanodomino.analysis import expected_memory, sizes, sublayer_memory
from nanodomino.config.config import Config

ROUNDS = False               # no --repeats: this question measures memory and does not time
STATE = ("parameters", "gradients", "optimizer")


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=1,
                     micro_batch_size=4, global_batch_size=16)


def answer(flags, launch):
    config, mesh, optimizer, stage = comm.build(config_here(flags, launch.world_size), launch)
    found = measure(config, mesh, optimizer, stage, RandomTokens(config, mesh.device))
    return report(config, gathered(found))


def measure(config: Config, mesh, optimizer, stage, dataset) -> dict[str, int]:
    """Return {name: bytes} of this rank. Runs two training steps: the first creates the optimizer's moments, the
    second is measured."""
    while not optimizer.updates:                               # fp16 skips steps until its loss scale is small enough
        train.train_step(1, stage, optimizer, dataset, config, mesh)
    state = state_storages(stage.model, optimizer)
    cuda = mesh.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(mesh.device)
    watched = TapeMeter(stage, state)
    with nullcontext() if cuda else AllocationPeak() as allocations:
        train.train_step(2, watched, optimizer, dataset, config, mesh)
    peak = torch.cuda.max_memory_allocated(mesh.device) if cuda else allocations.most + sum(watched.held.values())
    return {**{name: sum(storages.values()) for name, storages in state.items()}, "activations": watched.most,
            **({"host": watched.most_on_host} if expected_memory.offloads_to_host(config) else {}), "peak": peak}


def state_storages(model, optimizer) -> dict[str, dict[int, int]]:
    """Return {name: {storage: bytes}} for each name in STATE. A storage that belongs to two names counts in the first.
    """
    tensors = {"parameters": [*model.parameters(), *(bucket.weights for bucket in optimizer.buckets)],
               "gradients": [bucket.own_grad for bucket in optimizer.buckets],
               "optimizer": optimizer.state_tensors()}
    found, before = {}, set()
    for name in STATE:
        found[name] = {key: size for key, size in map(storage, tensors[name]) if key not in before}
        before |= found[name].keys()
    return found


def storage(tensor) -> tuple[int, int]:
    """Return (a number that identifies the tensor's storage, the storage's bytes)."""
    memory = tensor.untyped_storage()
    return memory._cdata, memory.nbytes()


# ---- activations

class TapeMeter:
    """Wraps a stage for pipeline.run, and measures all tapes after each action that can make them grow.

    state: the result of state_storages(); tapes may refer to these storages, but they are not counted.
    """

    def __init__(self, stage, state: dict[str, dict[int, int]]):
        self.stage, self.trace, self.ops = stage, stage.trace, stage.ops
        self.held = {key: size for storages in state.values() for key, size in storages.items()}
        self.tapes, self.most, self.most_on_host = {}, 0, 0

    def forward(self, *arguments):
        output, tape = yield from self.stage.forward(*arguments)
        self.tapes[id(tape)] = tape
        self.measure()
        return output, tape

    def backward(self, tape, gradient, on_gradients_ready=None, defer_weights=False):
        gradient = yield from self.stage.backward(tape, gradient, on_gradients_ready, defer_weights)
        if defer_weights:
            self.measure()
        else:
            del self.tapes[id(tape)]
        return gradient

    def weight_backward(self, tape, on_gradients_ready=None):
        yield from self.stage.weight_backward(tape, on_gradients_ready)
        del self.tapes[id(tape)]

    def measure(self):
        tapes, device = list(self.tapes.values()), self.stage.mesh.device
        here = {key: size for key, size in reachable_storages(tapes, device).items() if key not in self.held}
        self.most = max(self.most, sum(here.values()))
        if device.type == "cuda":
            self.most_on_host = max(self.most_on_host, sum(reachable_storages(tapes, torch.device("cpu")).values()))


def reachable_storages(tape, device=torch.device("cpu")) -> dict[int, int]:
    """Return {storage: bytes} of the tensors on `device` that a tape, or a list of tapes, keeps alive.

    Follows objects, closures and autograd graphs, but not modules, because their parameters are not activations.
    """
    found, seen, todo = {}, {}, [tape]           # seen keeps the objects alive, so that no other object gets their id
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (nn.Module, type)):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            if item.device.type == device.type:
                key, size = storage(item)
                found[key] = size
            todo.append(item.grad_fn)
        elif isinstance(item, (list, tuple, set)):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, FunctionType):
            todo += [cell.cell_contents for cell in item.__closure__ or ()]
        elif hasattr(item, "next_functions"):                               # a node of autograd's graph
            todo += [node for node, _ in item.next_functions] + [getattr(item, "variable", None)]
            todo += [getattr(item, name) for name in dir(item) if name.startswith("_saved_")]
            todo += getattr(item, "saved_tensors", ())
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
    return found


class AllocationPeak(TorchDispatchMode):
    """Measures the peak bytes of the tensors that are created while it is active.

    It sees every new tensor in torch's dispatcher, and a weak reference tells it when the tensor's storage is freed.
    """

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        known = {storage(tensor)[0] for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and storage(tensor)[0] not in known:
                self.add(tensor.untyped_storage())
        return results

    def add(self, memory):
        key, size = memory._cdata, memory.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(memory, lambda _: self.remove(key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def remove(self, key, size):
        del self.alive[key]
        self.now -= size


# ---- the report

def predict(config: Config, mesh) -> dict[str, int]:
    """Return {name: bytes} like measure(), but from the formulas."""
    return {**expected_memory.state_bytes(config, mesh), "activations": expected_memory.peak_tape_bytes(config, mesh),
            **({"host": expected_memory.peak_host_bytes(config, mesh)}
               if expected_memory.offloads_to_host(config) else {}),
            "peak": expected_memory.peak_bytes(config, mesh)}


def report(config: Config, measured: list[dict]):
    """Return (text, record). measured: the result of measure() of each rank. Ranks with the same bytes share a line."""
    predicted = [predict(config, mesh) for mesh in sizes.all_meshes(config)]
    rows = []
    for ranks in comm.alike(list(zip(measured, predicted))):
        both = predicted[ranks[0]], measured[ranks[0]]
        rows += [[comm.text_of(ranks), label, *found.values()] for label, found in zip(("predicted", "measured"), both)]
    exact = all(found[name] == expected[name] for found, expected in zip(measured, predicted) for name in STATE)
    worst = {name: max(abs(found[name] / expected[name] - 1) for found, expected in zip(measured, predicted))
             for name in measured[0] if name not in STATE}
    text = "\n".join([
        describe(config), "bytes, by rank:",
        table(["ranks", "", *measured[0]], rows), "",
        layer_text(config),
        f"parameters, gradients and optimizer {'equal' if exact else 'DO NOT equal'} their formulas; activations "
        f"differ by at most {max(worst['activations'], worst.get('host', 0.0)):.2%}, peaks by {worst['peak']:.1%}"])
    return text, {"question": "memory", "exact": exact, "activations_error": worst["activations"],
                  "peak_error": worst["peak"], **layout_of(config), "dtype": config.dtype, "device": config.device,
                  "predicted": predicted, "measured": measured}


def layer_text(config: Config) -> str:
    """Return a table of what a tape keeps for a layer, in units of X: after forward, and after the input gradients."""
    x, kept = sizes.hidden_bytes(config), sublayer_memory.layer_tape_bytes(config)
    left = sublayer_memory.layer_deferred_bytes(config)
    columns = [{**parts, "total": sum(parts.values())} for parts in (kept, left)]
    return table([f"a layer and microbatch; X = {bytes_text(x)}", "kept / X", "bytes", "left / X", "bytes"],
                 [[name, *(cell for parts in columns for cell in
                           ((f"{parts[name] / x:.3f}", bytes_text(parts[name])) if name in parts else ("", "")))]
                  for name in [*kept, *(name for name in left if name not in kept), "total"]])
