"""Does a rank need the memory, and launch the collectives, that the dry run says?

Every rank trains a step of train.py with random tokens. Rank 0 runs the same step dry for each rank. The same
`Accounts` (estimate/accounts.py) count both. Bytes of memory:

    parameters, gradients,    the model, the flat buckets and the optimizer, with padding. They must be equal
    optimizer
    activations               peak bytes between two actions, such as the forward and the backward of a microbatch,
                              besides the state: what the tapes keep. With experts they depend on the tokens: a dry run
                              assumes that all experts are chosen equally often, and a rank with popular experts keeps
                              more
    peak                      peak bytes of all tensors, also temporary ones; on CUDA torch's allocator counts them

The collectives of a process group must also be equal. Their bytes are those of the whole tensor: what is all-reduced, a
reduce-scatter's input, an all-gather's output. How many rows an all-to-all sends depends on the tokens, so its bytes
are compared in total over all ranks. More slices and columns make more calls but not more bytes.

    python bench.py memory --tp 2 --pp 2 --slices 2
"""

import dataclasses
import math
from collections import Counter
from functools import partial
from unittest import mock

import torch

import train
from benchmarks.runner import Training, about, add_config_flags, config_here, describe, gathered, join, table
from nanodomino.comm import collectives
from nanodomino.comm.collectives import TAGS
from nanodomino.comm.device import find_device
from nanodomino.estimate.accounts import Accounts
from nanodomino.estimate.rank import RankRun, dry_run, groups_of, measured_step
from nanodomino.settings.config import Config

ROUNDS = False               # no --repeats: this question counts and does not time


def add_flags(parser):
    add_config_flags(parser, num_layers=4, hidden_size=128, num_attention_heads=8, seq_length=64, vocab_size=250,
                     tensor_model_parallel_size=2, pipeline_model_parallel_size=2, data_parallel_size=1,
                     micro_batch_size=4, global_batch_size=16)


def processes(flags) -> int:
    world_size = max(1, math.prod((flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size,
                                   flags.context_parallel_size, flags.data_parallel_size)))
    config_here(flags, world_size)
    return world_size


def answer(flags, launch):
    config = config_for(flags, launch)
    # before this process joins a world
    predicted = [dry_run(train, config, rank) for rank in range(config.world_size)] if launch.rank == 0 else []
    training = Training(*join(config, launch))
    parts = training.optimizer, training.stage, training.tokens, config
    first_update(*parts)
    found = gathered(measure(*parts))
    return report(config, predicted, found) if launch.rank == 0 else ("", {})


# ---- a step, dry and real

def config_for(flags, launch) -> Config:
    """Return the Config with its device, and without torch.compile."""
    config = config_here(flags, launch.world_size)
    return dataclasses.replace(config, device=find_device(config, launch).type, compile=False)


class RealAccounts(Accounts):
    """Keeps account of a real step. On CPUs the messages of an all-to-all differ in size, and empty ones are not sent.
    So an all-to-all is counted where it launches them."""
    exchanging = False

    def exchange(self, exchange, sends, receives, group, tag):
        """Call collectives.exchange(), and count it if it is an all-to-all."""
        self.exchanging = tag == TAGS["all_to_all"]
        if self.exchanging:
            found = self.traffic[self.names[group.group_name], "all_to_all"]
            found[0], found[1] = found[0] + 1, found[1] + sum(tensor.nbytes for tensor in sends)
        works = exchange(sends, receives, group, tag)
        self.exchanging = False
        return works

    def without_numbers(self, name, given, tensors):
        return None                                            # there are numbers

    def collective(self, function, name, args):
        return function(*args) if self.exchanging else super().collective(function, name, args)


def first_update(optimizer, stage, dataset, config: Config):
    """Train until the optimizer has its moments. In fp16 it skips the first steps, whose loss scale is too large."""
    while not optimizer.updates:
        train.train_step(1, stage, optimizer, dataset, config, stage.mesh)


def measure(optimizer, stage, dataset, config: Config, program=train) -> RankRun:
    """Train one step and return what this rank did, without the events, which a real run has no use for. On CUDA the
    peak is the allocator's."""
    mesh, cuda = stage.mesh, stage.mesh.device.type == "cuda"
    accounts = RealAccounts(groups_of(mesh), host_counts=not cuda)
    with accounts, mock.patch.object(collectives, "exchange", partial(accounts.exchange, collectives.exchange)):
        accounts.allocate(dataset.tokens)                      # so that they do not count
        if cuda:
            torch.cuda.reset_peak_memory_stats(mesh.device)
        run = measured_step(program, stage, optimizer, dataset, config, accounts)
    peak = torch.cuda.max_memory_allocated(mesh.device) if cuda else run.peak
    return dataclasses.replace(run, events=[], peak=peak)


# ---- the report

def report(config: Config, predicted: list[RankRun], found: list[RankRun]):
    """Return (text, record). predicted, found: each rank's dry and real run."""
    dry, real = ([{**run.state, "activations": run.activations, "peak": run.peak} for run in runs]
                 for runs in (predicted, found))
    errors = {name: max(abs(ours[name] / theirs[name] - 1) for ours, theirs in zip(real, dry)) for name in real[0]}
    rows = [[rank, label, *one.values()] for rank, pair in enumerate(zip(dry, real))
            for label, one in zip(("dry run", "measured"), pair)]
    same_state = not any(errors[name] for name in found[0].state)

    sent, dry_sent = ([run.traffic for run in runs] for runs in (found, predicted))
    lines = [[rank, *key, len(predicted[rank].ranks_of[key[0]]), *(
        number for pair in zip(*(counts.get(key, (0, 0)) for counts in both)) for number in pair)]
        for rank, both in enumerate(zip(sent, dry_sent)) for key in sorted(both[0].keys() | both[1].keys())]
    same_traffic = comparable(sent) == comparable(dry_sent)
    text = "\n".join([
        describe(config), "bytes:", table(["rank", "", *real[0]], rows),
        f"parameters, gradients and optimizer {'equal' if same_state else 'DO NOT equal'} the dry run's; activations "
        f"differ by at most {errors['activations']:.2%}, peaks by {errors['peak']:.2%}",
        "", "collectives of a step:",
        table(["rank", "group", "collective", "members", "calls", "dry run", "bytes", "dry run"], lines),
        "every count equals the dry run's" + ", if the bytes of all-to-alls are added up over all ranks" * any(
            "all_to_all" in line for line in lines) if same_traffic else "some counts do not equal the dry run's"])
    return text, {"exact": same_state and same_traffic, "activations_error": errors["activations"],
                  "peak_error": errors["peak"], **about(config), "predicted": dry, "measured": real, "collectives": [
                      dict(zip(("rank", "group", "kind", "members", "calls", "dry_calls", "bytes", "dry_bytes"), line))
                      for line in lines]}


def comparable(found: list[dict]) -> list[dict]:
    """Return each rank's {(group, kind): (calls, bytes)} with the bytes of all-to-alls in total over all ranks."""
    totals = Counter()
    for counts in found:
        totals.update({key: size for key, (_, size) in counts.items()})
    return [{key: (calls, totals[key] if key[1] == "all_to_all" else size) for key, (calls, size) in counts.items()}
            for counts in found]
