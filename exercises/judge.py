"""Compares what an answer computes with what minimal.py computes, and finds the typical mistake that explains it.

A mistake is a sentence and a patch (old, new) of minimal.py. It is recognised by its effect: the patched minimal.py
computes what the answer computes. How the answer is written does not matter.
"""

from functools import cache

import torch

from .workbook import MINIMAL, Wrong, load


def expect(condition, sentence):
    if not condition:
        raise Wrong(sentence)


def judge(program, answer, mistakes, right=None):
    """Raise Wrong unless program(answer) equals `right`, by default what minimal.py computes.

    program: runs a module on fake ranks and returns {name: value} for each rank, in the order in which the values are
    computed. The first value that differs is compared with the value that each mistake computes. mistakes: {sentence:
    (old, new)}; put a mistake that changes only later values before mistakes that also change earlier ones.
    """
    right, found = right or effect(program), program(answer)
    for name in dict.fromkeys(name for one in right for name in one):
        def column(results, name=name):
            return [one.get(name) for one in results]               # None on a rank that does not have it

        if all(map(equal, column(found), column(right))):
            continue
        for sentence, (old, new) in mistakes.items():
            if all(map(equal, column(found), column(effect(program, old, new)))):
                raise Wrong(sentence)
        for rank, (one, other) in enumerate(zip(column(found), column(right))):
            if not equal(one, other):
                raise Wrong(f"{name} is wrong on rank {rank} of {len(found)}: {difference(one, other)}.")


@cache
def effect(program, old="", new=""):
    """Return what a program computes with minimal.py or, given a mistake, with `old` replaced by `new` in its text."""
    text = MINIMAL.read_text()
    if not old:
        return program(load())
    assert text.count(old) == 1, f"the mistake's text occurs {text.count(old)} times in minimal.py: {old}"
    return program(load(reference=text.replace(old, new)))


def equal(found, right):
    if not isinstance(right, torch.Tensor):
        return type(found) is type(right) and found == right
    return (isinstance(found, torch.Tensor) and found.shape == right.shape
            and torch.allclose(found.to(right.dtype), right, rtol=1e-8, atol=1e-10, equal_nan=True))


def difference(found, right):
    """Say in numbers how two values differ."""
    if not isinstance(right, torch.Tensor) or not isinstance(found, torch.Tensor):
        return f"it is {short(found)} instead of {short(right)}"
    if found.shape != right.shape:
        return f"its shape is {list(found.shape)} instead of {list(right.shape)}"
    if found.isnan().any():
        return "it has NaN, which fills a tensor in flight until wait()"
    error = (found - right).abs()
    place = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    text = f"{found[tuple(place)]:.6g} instead of {right[tuple(place)]:.6g}" + (f" at {place}" if place else "")
    large = right.abs() > 1e-6
    ratios = found[large] / right[large]
    if ratios.numel() > 1 and ratios[0].abs() > 1e-9 and equal(found, right * ratios[0]):
        return f"it is {ratios[0]:.4g} x the right one everywhere, for example {text}"
    return f"{int((error > 1e-9).sum())} of {error.numel()} numbers differ, most of all {text}"


def short(value):
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def expect_generator(found, name):
    expect(hasattr(found, "__next__"), f"{name} must be a generator: it must yield while a collective is in "
           "flight, for example with `yield from all_reduce(stage, tensor)`.")
    return found


def run_to_end(generator, name):
    """Resume a generator until it ends; return its result."""
    expect_generator(generator, name)
    while True:
        try:
            value = next(generator)
        except StopIteration as stop:
            return stop.value
        expect(not hasattr(value, "__next__"), f"{name} yields a generator without running it: write `yield from "
               "all_reduce(...)` instead of `yield all_reduce(...)`.")
