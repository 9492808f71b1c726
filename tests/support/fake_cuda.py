"""Run one training step on a GPU that does not exist, and count what it would ask of the GPU.

    echo '{"rank": 0, "settings": {"model": "gpt2", ...}}' | python tests/support/fake_cuda.py LIBRARY

prints a line of JSON for each line that it reads. A FakeTensor has a shape, a dtype and a device but no numbers, so
train.py's own train_step runs on cuda:0 for any rank of any layout in seconds and without memory, and a
TorchDispatchMode sees each operation. LIBRARY is the compiled fake_cuda.cpp, which stands in for the device; it must be
loaded before torch.

The counts are those of eager mode, without torch.compile. Traffic is that of GPU memory: each operand is read and each
result is written once.
"""

import ctypes
import json
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    tests = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(tests.parent), str(tests)]

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import train
from nanodomino import domino
from nanodomino.config.config import Config
from nanodomino.corpus.prepared_folder import Corpus
from nanodomino.data import EndOfText, TokenDataset
from nanodomino.layers import varlen
from nanodomino.layers.positions import to_device
from nanodomino.layers.varlen import fits_varlen
from nanodomino.mesh import make_mesh
from nanodomino.overlap import embedding_and_head
from nanodomino.zero import ZeroOptimizer
from support.fake_world import fake_world, only_views, operands, tensors, writes

VOCABULARY = 50257
CROSS_ENTROPY = ("local_max_and_sum_exp", "partial_loss_sums", "loss_from_sums", "cross_entropy_gradient")
LOOK_UPS = {"gather", "embedding", "scatter_", "index_add_"}      # touch a few rows of their first operand, not all
OVERWRITES = {"zero_", "fill_", "copy_"}                          # do not read what they write to
COPIES = {"_to_copy", "copy_"}
PRODUCTS = {"mm", "addmm", "bmm"}


def size(tensor) -> int:
    """Return the bytes of memory behind a tensor. An expanded tensor has fewer than its elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class Counts(TorchDispatchMode):
    """Records every operation, under the part of the program that runs it."""
    told = ("operations", "traffic", "names", "waits", "copies", "mixed", "peak", "cross_entropy_peak",
            "narrow_weight_gradients")

    def __init__(self, alive=None, pinned=None, weight_shapes=()):
        super().__init__()
        self.parts = ["rest"]                                            # the part that runs is the last
        self.operations, self.traffic = Counter(), Counter()             # by part; traffic in bytes
        self.names, self.waits, self.copies, self.mixed = Counter(), Counter(), Counter(), Counter()
        self.alive = alive or WeakIdKeyDictionary()                      # storage: its bytes
        self.pinned = pinned or WeakIdKeyDictionary()                    # storage: True
        self.peak = self.at_entry = self.cross_entropy_peak = 0          # bytes
        self.weight_shapes, self.narrow_weight_gradients = weight_shapes, 0

    def part(self, name, function):
        """Wrap a function so that its operations count for this part."""
        def counted(*arguments, **options):
            self.at_entry = sum(self.alive.values())
            self.parts.append(name)
            try:
                return function(*arguments, **options)
            finally:
                self.parts.pop()
        return counted

    def turns(self, name, function):
        """Wrap a generator function so that the operations of each of its turns count for this part."""
        def counted(*arguments, **options):
            resume = self.part(name, function(*arguments, **options).send)
            while True:
                try:
                    resume(None)
                except StopIteration as end:
                    return end.value
                yield
        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__.split(".")[0]
        if name == "_local_scalar_dense":                                # .item(), float(), if
            self.waits[name] += 1
            return 1.0
        if name == "_pin_memory":                                        # FakeTensors have none
            result = args[0].clone()
            self.pinned[result.untyped_storage()] = True
            return result
        result = function(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self.pinned[result.untyped_storage()] = True
        touched = operands(function, args, kwargs)
        on_gpu = any(one.is_cuda for one in tensors((args, kwargs, result)))
        if on_gpu and function.namespace != "prim" and not only_views(function):
            self.names[str(function)] += 1
            if function.namespace == "aten":
                self.look_at_devices(str(function), name, touched, args, kwargs, result)
                self.count(name, touched, tensors(result))
        return result

    def look_at_devices(self, full_name, name, touched, args, kwargs, result):
        """Note operations that mix host and device. Only copies may, and scalars, which are launch arguments."""
        if name in COPIES:
            source, target = touched[-1][0], result
            if target.is_cuda and not source.is_cuda:
                self.copies["pinned" if source.untyped_storage() in self.pinned else "pageable"] += 1
                if not (kwargs.get("non_blocking") or name == "copy_" and args[2:] == (True,)):
                    self.waits["copy from the host"] += 1
            elif source.is_cuda and not target.is_cuda:
                behind = target.untyped_storage() in self.pinned and name == "copy_" and args[2:] == (True,)
                (self.copies if behind else self.waits)["copy to the host"] += 1
        elif any(not one.is_cuda and one.dim() for one in [one for one, _ in touched] + tensors(result)):
            self.mixed[full_name] += 1

    def count(self, name, touched, results):
        for storage in (one.untyped_storage() for one in results if one.is_cuda):
            self.alive[storage] = storage.nbytes()
        written = [one for one, argument in touched if writes(argument)]
        read = [one for one, argument in touched
                if not argument.is_out and not (name in OVERWRITES and writes(argument))]
        moved = [*read, *(written or results)]
        part, alive = self.parts[-1], sum(self.alive.values())
        self.operations[part] += any(one.numel() for one in moved)       # for empty tensors, no kernel is launched
        self.traffic[part] += sum(size(one) for one in moved if name not in LOOK_UPS or one is not touched[0][0])
        self.peak = max(self.peak, alive)
        if part == "cross entropy":
            self.cross_entropy_peak = max(self.cross_entropy_peak, alive - self.at_entry)
        if name in PRODUCTS and results[0].element_size() == 2 and results[0].shape in self.weight_shapes:
            self.narrow_weight_gradients += 1

    def numbers(self, tensor):
        """Stands in for tolist(), since FakeTensors have no numbers."""
        self.waits["tolist"] += 1
        return [1.0] * tensor.numel()


class Stream:
    """Stands in for a CUDA stream for copies, which are done at once here."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    wait_event = wait_stream


STREAMS = dict(Stream=Stream, stream=lambda stream: nullcontext(), current_stream=Stream)


def attention_of_a_gpu(query, key, value, attn_mask, is_causal, enable_gqa):
    """Stands in for the kernel that scaled_dot_product_attention chooses on CUDA; a CPU build would decompose it."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal)[0]


def starts_of_samples(documents, device):
    """Stands in for find_starts(), since FakeTensors have no numbers: each sample is one document."""
    assert documents.device.type == "cpu", "or the host would wait for the GPU to count the documents"
    b, s = documents.shape
    return varlen.DocumentStarts(to_device(torch.arange(0, b * s + 1, s, dtype=torch.int32), device), s)


def zeros_as_corpus(folder: Path, config: Config) -> Corpus:
    """Return one global batch."""
    tokens = config.global_batch_size * config.seq_length + 1
    np.zeros(tokens, "<u2").tofile(folder / "train.bin")
    return Corpus(folder, "gpt2", VOCABULARY, VOCABULARY - 1, np.dtype("<u2"), {"train": tokens}, {}, 0.0, 0.0, {})


def count_step(config: Config, dataset: TokenDataset, mesh) -> dict:
    """Return the counts of one training step after the warm-up."""
    counts = Counts()
    with counts:                                                         # to know which tensors are alive
        model = train.model_builder(config, mesh)
        optimizer = ZeroOptimizer(model, config, mesh)
        stage = domino.Domino(model, config.slices, config.columns)
        train.warm_up(stage, optimizer, config, mesh)
    shapes = {weight.shape for weight in model.parameters()}
    if model.post_process:
        shapes.add(model.head[0].logits_weight().shape)
    counts = Counts(counts.alive, counts.pinned, shapes)
    stage.forward, stage.backward = counts.turns("forward", stage.forward), counts.turns("backward", stage.backward)
    optimizer.step = counts.part("update", optimizer.step)
    with ExitStack() as patches:
        for name in CROSS_ENTROPY:
            function = counts.part("cross entropy", getattr(embedding_and_head, name))
            patches.enter_context(mock.patch.object(embedding_and_head, name, function))
        patches.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: counts.numbers(tensor)))
        with counts:
            result = train.train_step(1, stage, optimizer, dataset, config, mesh)
    return {name: getattr(counts, name) for name in Counts.told} | dict(
        microbatches=config.microbatches, skipped=result.skipped, sublayers=sum(map(len, stage.sublayers.values())),
        matrices=sum(map(len, stage.sublayers.values())) * 2 + model.post_process, buckets=len(optimizer.buckets))


def run(rank: int, settings: dict) -> dict:
    config = Config(**settings)
    world_size = config.tp * config.pp * config.dp
    config = config.resolve(world_size).with_vocabulary(VOCABULARY)
    with fake_world(rank, world_size), tempfile.TemporaryDirectory() as folder:
        corpus = zeros_as_corpus(Path(folder), config)
        dataset = TokenDataset(corpus, "train", config.seq_length, config.seed,
                               EndOfText.of(corpus.end_of_text, config), torch.device("cuda", 0))
        mesh = replace(make_mesh(config.pp, config.dp, config.tp, torch.device("cpu")), device=torch.device("cuda", 0))
        with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.multiple(torch.cuda, **STREAMS), \
                mock.patch.object(F, "scaled_dot_product_attention", attention_of_a_gpu), \
                mock.patch.multiple(varlen, find_starts=starts_of_samples, uses_varlen=lambda *_: fits_varlen(config)):
            return count_step(config, dataset, mesh)


if __name__ == "__main__":
    for case in sys.stdin:
        print(json.dumps(run(**json.loads(case))), flush=True)
