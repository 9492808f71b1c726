"""Compares what an answer computes with what the reference computes, and finds the typical mistake that explains it.

A mistake is a sentence with patches (old, new, old, new ...) of the reference. It is recognised by its effect: the
patched reference computes what the answer computes. How the answer is written does not matter.
"""

from functools import cache

import torch

from .workbook import SOURCES, Wrong, load


def expect(condition, sentence):
    if not condition:
        raise Wrong(sentence)


def judge(program, answer, mistakes, right=None):
    """Raise Wrong unless program(answer) equals `right`, by default what the reference computes.

    program: runs a module on fake ranks and returns {name: value} for each rank, in the order in which the values are
    computed. The first value that differs is compared with the value that each mistake computes. Of several mistakes
    that explain it, the one that explains the most values is told.
    mistakes: {sentence: patches}"""
    right, found = right or effect(program), program(answer)
    names = list(dict.fromkeys(name for one in right for name in one))

    def agree(one, other, name):                        # a rank that does not have the value gives None
        return all(equal(its.get(name), others.get(name)) for its, others in zip(one, other))

    for name in names:
        if agree(found, right, name):
            continue
        explained = {sentence: sum(agree(found, effect(program, *patches), other) for other in names)
                     for sentence, patches in mistakes.items() if agree(found, effect(program, *patches), name)}
        if explained:
            raise Wrong(max(explained, key=explained.get))
        for rank, (one, other) in enumerate((its.get(name), others.get(name)) for its, others in zip(found, right)):
            if not equal(one, other):
                where = f" on rank {rank} of {len(found)}" * (len(found) > 1)
                raise Wrong(f"{name} is wrong{where}: {difference(one, other)}.")


@cache
def effect(program, *patches):
    """Return what a program computes with minimal.py and beyond.py, after patches (old, new, old, new ...)."""
    texts = [source.read_text() for source in SOURCES]
    for old, new in zip(patches[::2], patches[1::2]):
        assert "".join(texts).count(old) == 1, f"the mistake's text must occur once in minimal.py or beyond.py: {old}"
        texts = [text.replace(old, new) for text in texts]
    return program(load(texts=texts))


def equal(found, right):
    if not isinstance(right, torch.Tensor):
        return type(found) is type(right) and found == right
    return (isinstance(found, torch.Tensor) and found.shape == right.shape
            and torch.allclose(found.to(right.dtype), right, rtol=1e-8, atol=1e-10, equal_nan=True))


def difference(found, right):
    """Say in numbers how two values differ."""
    if not isinstance(right, torch.Tensor) or not isinstance(found, torch.Tensor):
        if isinstance(found, list) and isinstance(right, list):
            differ = (i for i, (one, other) in enumerate(zip(found, right)) if one != other)
            place = next(differ, min(len(found), len(right)))
            return f"entry {place} is {found[place:place + 1]} instead of {right[place:place + 1]} in {found}"
        found, right = (f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                        for value in (found, right))
        return f"it is {found} instead of {right}"
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


def expect_generator(found, name):
    expect(hasattr(found, "__next__"), f"{name} must be a generator: it must yield while a collective is in "
           "flight, for example with `yield from all_reduce(model, tensor)`.")
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
