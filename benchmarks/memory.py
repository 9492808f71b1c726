"""Does the memory of a rank match the formulas? Measured on every rank while it trains, beside what formulas.py says.

    parameters, gradients,    bytes of the storages that model, flat buffers, optimizer hold: equal to the byte, padding
    optimizer                 included
    activations               bytes of the storages that can be reached from the tapes of all microbatches that are
                              alive, saved tensors of autograd included, when they are most; of what a backward of input
                              gradients leaves behind too
    host                      with --checkpoint-in-cpu on CUDA: the same of what the tapes keep in the host's memory
    peak                      the most that is allocated at once, with what comes and goes within a step: on CUDA by the
                              allocator's own count, on the CPU by that of a mode which sees every tensor made. What
                              formulas.py says of it is an estimate

and a table of what the tape keeps of a layer, in units of X, the bytes of one activation [b, s, h], and of what is left
of it where weight gradients are done later.

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
from benchmarks.comm import processes  # noqa: F401, as bench.py asks for it
from benchmarks.common import (RandomTokens, add_config_flags, bytes_text, config_of, gathered, layout_of,
                               schedule_text, table)
from nanodomino.analysis import expected_memory, sizes
from nanodomino.config.config import Config
from nanodomino.data import Batch

ROUNDS = False               # one step says all
STATE = ("parameters", "gradients", "optimizer")


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=1,
                     micro_batch_size=4, global_batch_size=16)


def answer(flags, launch):
    config, mesh, optimizer, stage = comm.build(config_of(flags, launch.world_size), launch)
    found = measure(config, mesh, optimizer, stage, CopiedRandomTokens(config, mesh.device))
    return report(config, gathered(found))


def measure(config: Config, mesh, optimizer, stage, dataset) -> dict[str, int]:
    """Bytes of this rank, in two training steps: the first makes the moments, the second is looked at."""
    while not optimizer.updates:                               # fp16 skips some until its loss scale fits
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
    """Of each part of the state {storage: bytes}; what two parts share counts in the first."""
    tensors = {"parameters": [*model.parameters(), *(bucket.weights for bucket in optimizer.buckets)],
               "gradients": [bucket.own_grad for bucket in optimizer.buckets],
               "optimizer": optimizer.state_tensors()}
    found, before = {}, set()
    for name in STATE:
        found[name] = {key: size for key, size in map(storage, tensors[name]) if key not in before}
        before |= found[name].keys()
    return found


def storage(tensor) -> tuple[int, int]:
    """(which memory it is, its bytes)."""
    memory = tensor.untyped_storage()
    return memory._cdata, memory.nbytes()


class CopiedRandomTokens(RandomTokens):
    """Batches with memory of their own, as TokenDataset's, not views of one large array."""

    def batch(self, *arguments, **options) -> Batch:
        batch = super().batch(*arguments, **options)
        return Batch.from_rows(torch.cat([batch.tokens, batch.labels[:, -1:]], dim=1), batch.sample_ids,
                               end_of_text=self.end_of_text)


# ---- activations: what the tapes hold

class TapeMeter:
    """A stage, as the pipeline sees it, that weighs all tapes that are alive after whatever adds to one."""

    def __init__(self, stage, state: dict[str, dict[int, int]]):
        self.stage, self.trace = stage, stage.trace
        self.held = {key: size for storages in state.values() for key, size in storages.items()}
        self.tapes, self.most, self.most_on_host = {}, 0, 0

    def forward(self, *arguments):
        output, tape = yield from self.stage.forward(*arguments)
        self.tapes[id(tape)] = tape
        self.weigh()
        return output, tape

    def backward(self, tape, gradient, on_gradients_ready=None, later=False):
        gradient = yield from self.stage.backward(tape, gradient, on_gradients_ready, later)
        if later:
            self.weigh()
        else:
            del self.tapes[id(tape)]
        return gradient

    def weight_backward(self, tape, on_gradients_ready=None):
        yield from self.stage.weight_backward(tape, on_gradients_ready)
        del self.tapes[id(tape)]

    def weigh(self):
        tapes, device = list(self.tapes.values()), self.stage.mesh.device
        here = {key: size for key, size in reachable_storages(tapes, device).items() if key not in self.held}
        self.most = max(self.most, sum(here.values()))
        if device.type == "cuda":
            self.most_on_host = max(self.most_on_host, sum(reachable_storages(tapes, torch.device("cpu")).values()))


def reachable_storages(tape, device=torch.device("cpu")) -> dict[int, int]:
    """{storage: bytes} of every tensor on such a device that a tape keeps from being freed: in its objects, in what its
    functions have closed over, and in the graphs behind its tensors. Modules are state, not tape."""
    found, seen, todo = {}, {}, [tape]                  # seen by id: kept, lest another object be given the same one
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (nn.Module, type)):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            if one.device.type == device.type:
                key, size = storage(one)
                found[key] = size
            todo.append(one.grad_fn)
        elif isinstance(one, (list, tuple, set)):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, FunctionType):
            todo += [cell.cell_contents for cell in one.__closure__ or ()]
        elif hasattr(one, "next_functions"):                                # a node of autograd's graph
            todo += [node for node, _ in one.next_functions] + [getattr(one, "variable", None)]
            todo += [getattr(one, name) for name in dir(one) if name.startswith("_saved_")]
            todo += getattr(one, "saved_tensors", ())
        elif hasattr(one, "__dict__"):
            todo += vars(one).values()
    return found


class AllocationPeak(TorchDispatchMode):
    """The most bytes that are alive at once, of tensors made while it is on. It keeps none of them alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        known = {storage(tensor)[0] for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and storage(tensor)[0] not in known:
                self.born(tensor.untyped_storage())
        return results

    def born(self, memory):
        key, size = memory._cdata, memory.nbytes()
        if key not in self.alive:
            self.alive[key] = weakref.ref(memory, lambda _: self.died(key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def died(self, key, size):
        del self.alive[key]
        self.now -= size


# ---- what came out

def predict(config: Config, at) -> dict[str, int]:
    """What measure() should find."""
    return {**expected_memory.state_bytes(config, at), "activations": expected_memory.tape_bytes(config, at),
            **({"host": expected_memory.host_bytes(config, at)} if expected_memory.offloads_to_host(config) else {}),
            "peak": expected_memory.peak_bytes(config, at)}


def report(config: Config, measured: list[dict]):
    """measured: by rank. Ranks with the same bytes share a line."""
    predicted = [predict(config, at) for at in sizes.all_meshes(config)]
    rows = []
    for ranks in comm.alike(list(zip(measured, predicted))):
        both = predicted[ranks[0]], measured[ranks[0]]
        rows += [[comm.text_of(ranks), kind, *one.values()] for kind, one in zip(("predicted", "measured"), both)]
    exact = all(one[name] == said[name] for one, said in zip(measured, predicted) for name in STATE)
    worst = {name: max(abs(one[name] / said[name] - 1) for one, said in zip(measured, predicted))
             for name in measured[0] if name not in STATE}
    text = "\n".join([
        f"tp {config.tp}, pp {config.pp}, dp {config.dp}, slices {config.slices}, ZeRO stage {config.zero_stage}, "
        f"{schedule_text(config)}, {config.microbatches} microbatches of {config.micro_batch_size} x "
        f"{config.seq_length} x {config.hidden_size}, {config.num_layers} layers, {config.dtype}; bytes, by rank",
        table(["ranks", "", *measured[0]], rows), "",
        layer_text(config),
        f"the state {'equals' if exact else 'DOES NOT equal'} its formulas to the byte; activations differ by at most "
        f"{max(worst['activations'], worst.get('host', 0.0)):.2%}, peaks by {worst['peak']:.1%}"])
    return text, {"question": "memory", "exact": exact, "activations_error": worst["activations"],
                  "peak_error": worst["peak"], **layout_of(config), "dtype": config.dtype, "device": config.device,
                  "predicted": predicted, "measured": measured}


def layer_text(config: Config) -> str:
    """What the tape keeps of one layer, in units of X, and what is left where its weight gradients are done later."""
    x, kept, left = sizes.hidden_bytes(config), expected_memory.layer_tape_bytes(config), expected_memory.layer_weight_gradient_bytes(config)
    columns = [{**one, "together": sum(one.values())} for one in (kept, left)]
    return table([f"of a layer and microbatch, X = {bytes_text(x)}", "kept, X", "bytes", "left, X", "bytes"],
                 [[name, *(cell for one in columns for cell in
                           ((f"{one[name] / x:.3f}", bytes_text(one[name])) if name in one else ("", "")))]
                  for name in [*kept, *(name for name in left if name not in kept), "together"]])
