"""Count what a training step asks of a GPU, in a dry run (nanodomino/dry_run), which needs none.

    counts = count_step(0, model="gpt2", dtype="bfloat16", ...)

These are the counts of rank 0 in eager mode, after the warm-up. `Counts` adds to a dry run's accounts which part of the
program runs an operation, and what makes the host wait for the GPU. Traffic is that of GPU memory: each operand is read
and each result is written once.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from torch.utils.weak import WeakIdKeyDictionary

import train
from nanodomino.config.config import Config
from nanodomino.dry_run import rank as dry_run
from nanodomino.dry_run.accounts import Accounts, arguments_of
from nanodomino.dry_run.shapes import flatten
from nanodomino.overlap import embedding_and_head
from support.harness import corpus_without_files

VOCABULARY = 50257
CROSS_ENTROPY = ("local_max_and_sum_exp", "partial_loss_sums", "loss_from_sums", "cross_entropy_gradient")


class Counts(Accounts):
    """Also records the operations under the part of the program that runs them."""

    def __init__(self, groups, host_counts):
        self.pinned_rows = WeakIdKeyDictionary()                       # storage of a tensor on the CPU: True
        super().__init__(groups, host_counts)

    def restart(self):
        super().restart()
        self.parts = ["rest"]                                          # the part that runs is the last
        self.operations, self.moved, self.most = Counter(), Counter(), Counter()     # by part; the others in bytes
        self.called, self.waits, self.copies, self.mixed = Counter(), Counter(), Counter(), Counter()    # by name
        self.at_entry, self.narrow = self.now, set()                   # shapes of 16-bit results of matmuls

    def part(self, name, function):
        """Wrap a function so that its operations count for this part."""
        def counted(*arguments, **options):
            self.at_entry = self.now
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

    def add(self, bytes_, pinned):
        super().add(bytes_, pinned)
        self.most[self.parts[-1]] = max(self.most[self.parts[-1]], self.now - self.at_entry)

    def instead(self, name, given):
        result = super().instead(name, given)
        if name == "_pin_memory":
            self.pinned_rows[result.untyped_storage()] = True
        elif result is not None and name in ("_local_scalar_dense", "_to_copy"):     # item(), if; tolist(), cpu()
            self.waits[name] += 1
        return result

    def is_pinned(self, tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned or tensor.untyped_storage() in self.pinned_rows

    def is_on_gpu(self, tensor) -> bool:
        return tensor.is_meta and not self.is_pinned(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before, given = len(self.events), dict(zip(arguments_of(function)[0], args)) | (kwargs or {})
        result = super().__torch_dispatch__(function, types, args, kwargs)
        tensors = [*flatten([*given.values(), result])]
        if len(self.events) > before and any(map(self.is_on_gpu, tensors)):
            self.called[str(function)] += 1
            if function.namespace != "c10d":
                event, part = self.events[-1], self.parts[-1]
                self.operations[part] += any(one.numel() for one in tensors)         # empty ones launch no kernel
                self.moved[part] += event.bytes
                if event.kind == "matmul" and result.element_size() == 2:
                    self.narrow.add(result.shape)
                self.look_at_devices(function, given, tensors)
        return result

    def look_at_devices(self, function, given, tensors):
        """Note operations that mix host and device. Only copies may, and scalars, which are launch arguments."""
        if function._opname not in ("_to_copy", "copy_"):
            self.mixed.update([str(function)] * any(not self.is_on_gpu(one) and one.dim() for one in tensors))
        elif not all(map(self.is_on_gpu, tensors)):
            source, target = tensors[-2:]
            way, host = ("from the host", source) if self.is_on_gpu(target) else ("to the host", target)
            self.copies[way] += 1
            if not self.is_pinned(host) or not given.get("non_blocking"):
                self.waits[f"copy {way}"] += 1


def count_step(rank: int, **settings) -> Counts:
    """Return the Counts of a rank, with the RankRun as `run`. settings: of Config."""
    config = Config(**settings, device="cuda", compile=False)
    config = config.resolve(config.tp * config.pp * config.dp * config.cp).with_vocabulary(VOCABULARY)
    found = []

    def accounts(*arguments, **options):
        found.append(Counts(*arguments, **options))
        return found[0]

    def train_step(step, stage, optimizer, _, config, mesh, on_action):
        """Count a step that reads its samples as a run does, from an array of ones."""
        (counts,), model = found, stage.model
        train.warm_up(stage, optimizer, config, mesh)
        counts.restart()
        counts.microbatches, counts.buckets = config.microbatches, len(optimizer.buckets)
        counts.sublayers = sum(map(len, stage.sublayers.values()))
        counts.matrices = 2 * counts.sublayers + model.post_process
        heads = [model.head[0].logits_weight()] if model.post_process else []
        counts.weight_shapes = {weight.shape for weight in [*model.parameters(), *heads]}
        stage.forward, stage.backward = counts.turns("forward", stage.forward), counts.turns("backward", stage.backward)
        optimizer.step = counts.part("update", optimizer.step)
        tokens = np.ones(config.global_batch_size * config.seq_length + 1, "<u2")
        with mock.patch.object(np, "memmap", lambda *arguments, **options: tokens):
            corpus = corpus_without_files(Path(), train=len(tokens))
            dataset = train.dataset_builder(config, corpus, mesh.device)["train"]
        with mock.patch.multiple(embedding_and_head, **{
                name: counts.part("cross entropy", getattr(embedding_and_head, name)) for name in CROSS_ENTROPY}):
            result = train.train_step(step, stage, optimizer, dataset, config, mesh, on_action=on_action)
            counts.skipped = result.skipped

    with mock.patch.object(dry_run, "Accounts", accounts):
        run = dry_run.dry_run(SimpleNamespace(model_builder=train.model_builder, train_step=train_step), config, rank)
    found[0].run = run
    return found[0]
