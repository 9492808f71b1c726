"""Train with a bug and compare with the right numbers: the machinery of tests/pitfalls.py.

    the right numbers    reference_for() reference.py's model on one process, step by step
    the numbers found    join_ranks()    the results of all ranks of the pool, with the bug or without
    the verdict          judge()         AssertionError if they differ by more than rounding
"""

import dataclasses
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from support.harness import FixedData, Outcome, join_ranks, reference_for, results_of_records, tiny, train_rank
from support.reference import random_weights

from nanodomino import model
from nanodomino.comm import collectives
from nanodomino.mesh import meta_mesh

CHECKED = 2              # steps in a test: the second step sees the weights that the first step wrote
LONG, END = 40, 10       # steps of the runs in docs/pitfalls.md, whose table shows the mean loss of the last END steps


# ---- the table

@dataclass(frozen=True, eq=False)
class Pitfall:
    """A bug that can be put back, and how to show it."""
    number: int
    title: str                   # also its heading in docs/pitfalls.md
    bug: object                  # wrong(right, config, *arguments) if there is a place; else bug(config) -> patches
    place: tuple                 # (object, name) of the right function, or ()
    options: dict                # for tiny()
    world_size: int = 2
    runner: object = train_rank  # runner(config, weights, data, steps) -> Outcome, on each rank
    drawn: bool = False          # start from the model's own initial weights
    conditions: object = lambda config: []     # patches for the right run too: late collectives, an infinite gradient
    straight: bool = False       # compare with the same run without an interruption, not with the plain model
    check: object = None         # check(pool) replaces the comparison where the training's numbers don't show the bug

    @property
    def config(self):
        # Ten batches of evaluation reach the last, incomplete one, which matters to some bugs.
        return tiny(self.world_size, **dict(train_iters=LONG, eval_iters=10, lr=2e-2, lr_warmup_fraction=0.05)
                    | self.options)

    def patches(self, config):
        return [instead(*self.place, self.bug, config)] if self.place else self.bug(config)


TABLE: list[Pitfall] = []


def pitfall(title, *place, **given):
    """Enter the decorated bug into the table. given: fields of Pitfall, and options for tiny()."""
    own = {name: given.pop(name) for name in Pitfall.__match_args__ if name in given}

    def enter(bug):
        if bug.__module__ == "pitfalls":                 # as a script the module is __main__ and imports itself again
            TABLE.append(Pitfall(len(TABLE) + 1, title, bug, place, given, **own))
        return bug
    return enter


def instead(owner, name, wrong, config):
    """Return the patch that calls wrong(right, config, *arguments) instead of owner.name, which is `right`."""
    right = getattr(owner, name)

    def replacement(*arguments, **options):
        return wrong(right, config, *arguments, **options)
    return owner, name, replacement


# ---- run with a bug

@contextmanager
def replaced(patches):
    """Apply all patches. Raises AttributeError if a name to replace is gone."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def call_with_bug(number, wrong, function, *arguments):
    """Call a function on this rank under a pitfall's conditions and, if wrong, its bug."""
    import pitfalls  # noqa: F401    fills the table in this worker

    entry = TABLE[number - 1]
    with replaced(entry.conditions(entry.config)), replaced(entry.patches(entry.config) if wrong else []):
        return function(*arguments)


def pool_with_bug(pool, entry: Pitfall, wrong: bool):
    """Return a pool whose workers run under a pitfall's conditions and, if wrong, with its bug."""
    return SimpleNamespace(run=partial(pool.run, call_with_bug, entry.number, wrong))


def delayed_collectives(when, config=None):
    """Return patches [(object, name, replacement)] that carry out asynchronous collectives 'late' (at wait()) or
    'early' (at the launch). A real one finishes in between. Code that reads a result before it waits is right when all
    finish at the launch and wrong when all finish at the wait, so tests compare both extremes."""
    real_all_reduce, real_exchange = dist.all_reduce, collectives.exchange

    def launch(collective):
        work = SimpleNamespace(wait=cache(collective))             # carried out once
        if when == "early":
            work.wait()
        return work

    def all_reduce(*arguments, async_op=False, **options):
        if not async_op:
            return real_all_reduce(*arguments, **options)
        return launch(lambda: real_all_reduce(*arguments, **options))

    def exchange(*arguments):
        return launch(lambda: real_exchange(*arguments).wait())

    return [(dist, "all_reduce", all_reduce), (collectives, "exchange", exchange)]


# ---- the right numbers

def text(config, steps) -> FixedData:
    """Return data that can be learnt: nine tokens in ten follow from the previous token. The loss mask is uneven. The
    last five of each batch's 24 rows do not count, as in the last, incomplete batch of a split."""
    samples, length = config.global_batch_size, config.seq_length
    rows, mask = torch.empty(steps, samples, length + 1, dtype=torch.long), torch.empty(steps, samples, length)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 + step)
        rows[step] = torch.randint(0, config.vocab_size, (samples, length + 1), generator=generator)
        follows = torch.rand(samples, length, generator=generator) < 0.9
        for place in range(length):
            rows[step, :, place + 1] = torch.where(
                follows[:, place], (5 * rows[step, :, place] + 3) % config.vocab_size, rows[step, :, place + 1])
        share = torch.linspace(-0.2, 1.2, samples)[torch.randperm(samples, generator=generator)]
        mask[step] = torch.rand(samples, length, generator=generator) < share[:, None]
    mask[:, -5:] = 0
    return FixedData(rows[..., :-1], rows[..., 1:], mask, config, missing=5)


def text_and_weights(config, steps, drawn):
    """Return (initial weights, text); the weights are drawn by the model itself or hide no term."""
    return drawn_weights(config) if drawn else random_weights(config, seed=3), text(config, steps)


def drawn_weights(config):
    """Return the initial weights that a single process draws, by name."""
    whole = config.on_one_rank()
    alone = dataclasses.replace(meta_mesh(1, 1, 1), device=torch.device("cpu"))
    return {name: weight.detach() for name, weight in model.GPT(whole, alone).named_parameters()}


# ---- the comparison

def measure(pool, entry: Pitfall, wrong: bool, steps: int) -> tuple[Outcome, Outcome]:
    """Return (the right results, the results of the ranks with or without the bug)."""
    weights, data, *plain = reference_for(pool, entry.config, steps, entry.drawn, text_and_weights)
    right = results_of_records(entry.config, data, *plain)
    arguments = entry.config, None if entry.drawn else weights, data, steps
    found = join_ranks(pool_with_bug(pool, entry, wrong).run(entry.runner, *arguments, world_size=entry.world_size))
    if entry.straight:
        right = join_ranks(pool_with_bug(pool, entry, False).run(train_rank, *arguments, world_size=entry.world_size))
    return right, found
