"""Count what a training step asks of a GPU, in a dry run (nanodomino/estimate), which needs none.

    counts, run = run_under(Counts, gpu_config(model="gpt2", dtype="bfloat16", ...), rank)

`Counts` adds to a dry run's accounts which part of the program runs an operation, and what makes the host wait for the
GPU. It counts a step in eager mode, after the warm-up. Each operand is read and each result is written once.
"""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from support.harness import corpus_without_files

import train
from nanodomino.estimate import rank as dry_run
from nanodomino.estimate.accounts import Accounts, arguments_of, flatten
from nanodomino.estimate.formulas import Machine
from nanodomino.overlap import compute
from nanodomino.settings.config import Config


def show_gpus(monkeypatch, count=8, capability=(9, 0), architectures=(), init=lambda: None):
    """Let torch say that this host has GPUs, in what it says before the first tensor is on one."""
    for name, value in dict(device_count=count, is_available=True, get_device_capability=capability,
                            get_arch_list=list(architectures), get_device_name="a GPU").items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "init", init)


VOCABULARY = 50257
CROSS_ENTROPY = ("local_max_and_sum_exp", "partial_loss_sums", "loss_from_sums", "cross_entropy_gradient")


class Counts(Accounts):
    """Also records the operations under the part of the program that runs them."""

    def restart(self):
        super().restart()
        self.parts = ["rest"]                                          # the part that runs is the last
        self.operations, self.moved, self.most = Counter(), Counter(), Counter()     # by part; the others in bytes
        self.called, self.waits, self.copies, self.mixed = Counter(), Counter(), Counter(), Counter()    # by name
        self.at_entry, self.narrow = self.now, set()                   # shapes of 16-bit results of matmuls

    @contextmanager
    def part(self, name):
        """Count the operations of a block, or of a decorated function, for this part."""
        self.at_entry = self.now
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    def turns(self, name, function):
        """Wrap a generator function so that the operations of each of its turns count for this part."""
        def counted(*arguments, **options):
            resume = self.part(name)(function(*arguments, **options).send)
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

    def without_numbers(self, name, given, tensors):
        result = super().without_numbers(name, given, tensors)
        if name == "_pin_memory":
            self.pinned.add(result.untyped_storage()._cdata)
            self.allocate(result)
        elif result is not None and name in ("_local_scalar_dense", "_to_copy"):     # item(), if; tolist(), cpu()
            self.waits[name] += 1
        return result

    def is_on_gpu(self, tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata not in self.pinned

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
            if host.untyped_storage()._cdata not in self.pinned or not given.get("non_blocking"):
                self.waits[f"copy {way}"] += 1

    def train_step(self, step, stage, optimizer, _, config, mesh, on_action):
        """Count a step that reads its samples as a run does, from an array of ones."""
        train.warm_up(stage, optimizer, config, mesh)
        self.restart()
        self.microbatches, self.buckets = config.microbatches, len(optimizer.buckets)
        self.sublayers = sum(map(len, stage.branches.values()))
        heads = [stage.model.head[0].logits_weight()] if stage.model.post_process else []
        self.weight_shapes = {weight.shape for weight in [*stage.model.parameters(), *heads]}
        stage.forward, stage.backward = self.turns("forward", stage.forward), self.turns("backward", stage.backward)
        optimizer.step = self.part("update")(optimizer.step)
        tokens = np.ones(config.global_batch_size * config.seq_length + 1, "<u2")
        with mock.patch.object(np, "memmap", lambda *arguments, **options: tokens):
            corpus = corpus_without_files(Path(), train=len(tokens))
            dataset = train.dataset_builder(config, corpus, mesh.device)["train"]
        with mock.patch.multiple(compute, **{
                name: self.part("cross entropy")(getattr(compute, name)) for name in CROSS_ENTROPY}):
            train.train_step(step, stage, optimizer, dataset, config, mesh, on_action=on_action)


def run_under(accounts_class, config: Config, rank=0) -> tuple:
    """Return (accounts, RankRun) of a dry run that counts by a subclass of Accounts and calls its train_step."""
    made = []

    def make(*arguments, **options):
        made.append(accounts_class(*arguments, **options))
        return made[0]

    program = SimpleNamespace(model_builder=train.model_builder, train_step=lambda *given, **options:
                              made[0].train_step(*given, **options))
    with mock.patch.object(dry_run, "Accounts", make):
        run = dry_run.dry_run(program, config, rank)
    return made[0], run


def machine(**changes) -> Machine:
    """Return a machine that is infinitely fast except in the given rates."""
    fast = dict(matmul_rate=1e40, intra_host_rate=1e40, inter_host_rate=1e40, latency=0.0, ranks_per_host=8,
                memory_rate=1e40)
    return Machine(**fast | changes)


def gpu_config(**settings) -> Config:
    config = Config(**settings, device="cuda", compile=False)
    return config.resolve(config.tp * config.pp * config.dp * config.cp).with_vocabulary(VOCABULARY)
