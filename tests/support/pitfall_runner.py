"""Train with a bug and compare with the right numbers: the machinery of tests/pitfalls.py.

    the right numbers    plain()      reference.py's model on one process, step by step
    the numbers found    join_ranks() the results of all ranks of the pool, with the bug or without
    the verdict          judge()      AssertionError if they differ by more than rounding

All is float64: it agrees to 1e-9 or it is wrong. A bug may make replicas differ, so join_ranks() reports that instead
of failing as harness.full_tensors would.
"""

import dataclasses
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from support.harness import (FixedData, Outcome, count_depth_masks, full_tensors, plain_evaluation, tiny,
                             train_plainly, train_rank)
from support.reference import random_weights

from nanodomino import model
from nanodomino.mesh import meta_mesh
from nanodomino.settings.config import Config
from nanodomino.settings.flags import names_affecting


TOLERANCE = 1e-9         # largest relative error of any number, in float64
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


# ---- the right numbers

class Text(FixedData):
    """The last five of each batch's 24 rows do not count, as in the last, incomplete batch of a split."""

    @property
    def windows(self):
        return super().windows - 5


def text(config, steps) -> Text:
    """Return data that can be learnt: nine tokens in ten follow from the previous token. The loss mask is uneven."""
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
    return Text(rows[..., :-1], rows[..., 1:], mask, config=config,
                depth_masks=count_depth_masks(rows, mask, config.mtp_num_layers, False))


@dataclass
class Side:
    """The results of a run. gradients: full tensors by name for each step. apart: names whose copies differ."""
    losses: list
    norms: list
    gradients: list
    weights: dict
    evaluation: float
    apart: frozenset = frozenset()


_plain = {}


def plain(entry: Pitfall, steps: int):
    """Return (initial weights, data, the plain model's results), computed once for each model and data."""
    config = entry.config
    key = (entry.drawn, steps, *(getattr(config, name) for name in names_affecting(
        Config, "model", "positions", "optimizer", "run", "losses")))
    if key not in _plain:
        weights = drawn_weights(config) if entry.drawn else random_weights(config, seed=3)
        data = text(config, steps)
        records, final = train_plainly(config, weights, data, steps)
        side = Side([record.loss for record in records], [record.gradient_norm for record in records],
                    [record.gradients for record in records], final,
                    plain_evaluation(config, final, data, min(config.eval_iters, steps)))
        _plain[key] = weights, data, side
    return _plain[key]


def drawn_weights(config):
    """Return the initial weights that a single process draws, by name."""
    whole = config.on_one_rank()
    alone = dataclasses.replace(meta_mesh(1, 1, 1), device=torch.device("cpu"))
    return {name: weight.detach() for name, weight in model.GPT(whole, alone).named_parameters()}


# ---- the numbers found

def joined(outcomes: list[Outcome], shards_of):
    """Return (full tensors by name from every rank's shards, names whose copies differ)."""
    first, apart = {}, set()
    for outcome in outcomes:
        for name, (tensor, box) in shards_of(outcome).items():
            if not torch.equal(first.setdefault((name, box), tensor), tensor):
                apart.add(name)
    return full_tensors(outcomes, lambda outcome: {name: (first[name, box], box)
                                                   for name, (_, box) in shards_of(outcome).items()}), apart


def join_ranks(outcomes: list[Outcome]) -> Side:
    """Join the results of all ranks. Losses and norms are rank 0's; `apart` names those that another rank disputes."""
    gradients = [joined(outcomes, lambda outcome: outcome.gradients[step])[0]
                 for step in range(len(outcomes[0].gradients))]
    weights, apart = joined(outcomes, lambda outcome: outcome.weights)
    for what in ("losses", "norms", "evaluation"):
        if len({repr(getattr(outcome, what)) for outcome in outcomes}) > 1:
            apart.add(what)
    first = outcomes[0]
    return Side(first.losses, first.norms, gradients, weights, first.evaluation, frozenset(apart))


def error_of(ours: float, theirs: float) -> float:
    """Return the relative error. Two numbers that are not finite agree."""
    if not math.isfinite(theirs) or not math.isfinite(ours):
        return 0.0 if math.isfinite(ours) == math.isfinite(theirs) else math.inf
    return abs(ours - theirs) / (abs(theirs) or 1.0)


def worst(ours: dict, theirs: dict) -> tuple[float, str]:
    """Return the largest deviation of a tensor relative to its own largest entry, and the tensor's name."""
    if missing := sorted(theirs.keys() - ours.keys()):
        return math.inf, missing[0]
    if not all(tensor.isfinite().all() for tensor in theirs.values()):
        return 0.0, ""                                             # the step must be skipped
    errors = {name: float((ours[name] - theirs[name]).abs().max()) / (float(theirs[name].abs().max()) or 1.0)
              for name in theirs}
    return max((math.inf if math.isnan(error) else error, name) for name, error in errors.items())


def measure(pool, entry: Pitfall, wrong: bool, steps: int) -> tuple[Side, Side]:
    """Return (the right results, the results of the ranks with or without the bug)."""
    weights, data, right = plain(entry, steps)
    arguments = entry.config, None if entry.drawn else weights, data, steps
    found = join_ranks(pool_with_bug(pool, entry, wrong).run(entry.runner, *arguments, world_size=entry.world_size))
    if entry.straight:
        right = join_ranks(pool_with_bug(pool, entry, False).run(train_rank, *arguments, world_size=entry.world_size))
    return right, found


def judge(right: Side, found: Side):
    """Raise AssertionError for the first result that differs by more than rounding."""
    assert not found.apart, f"ranks that must agree do not: {', '.join(sorted(found.apart))}"
    for what in ("losses", "norms"):
        for step, (ours, theirs) in enumerate(zip(getattr(found, what), getattr(right, what), strict=True), start=1):
            assert error_of(ours, theirs) < TOLERANCE, f"{what}, step {step}: {ours}, not {theirs}"
    for step, (ours, theirs) in enumerate(zip(found.gradients, right.gradients, strict=True), start=1):
        error, name = worst(ours, theirs)
        assert error < TOLERANCE, f"gradient of {name} in step {step} is off by {error:.1e}"
    error, name = worst(found.weights, right.weights)
    assert error < TOLERANCE, f"weight {name} is off by {error:.1e}"
    error = error_of(found.evaluation, right.evaluation)
    assert error < TOLERANCE, f"evaluation: {found.evaluation:.5f}, not {right.evaluation:.5f}"


def check(pool, entry: Pitfall, wrong: bool):
    """Raise AssertionError if the results, with or without the bug, are wrong. Returns measure()'s results."""
    if entry.check:
        return entry.check(pool_with_bug(pool, entry, wrong))
    right, found = measure(pool, entry, wrong, CHECKED)
    judge(right, found)
    return right, found
