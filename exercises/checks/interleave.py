"""Exercise 7: slices that take turns."""

from inspect import isgenerator

from ..fake_ranks import World
from ..judge import expect, judge
from ..workbook import Wrong

HINT = """
next(generator) runs a slice until its next yield; the yielded value is None. next(generator,
"ended") returns "ended" in place of raising StopIteration. Slices may end at different times.
"""
LOOP = '''    waiting = deque(generators)
    while waiting:
        generator = waiting.popleft()
        if next(generator, "ended") != "ended":
            waiting.append(generator)'''
MISTAKES = {
    "Each slice runs to its end before the next one starts, so nothing is computed while its all-reduce is in flight: "
    "resume each slice once, then the next.": (LOOP, "    for generator in generators:\n        list(generator)"),
    "The slices stop as soon as the first one ends, so the others are never finished: go on until all have ended.":
        (LOOP, "    for _ in zip(*generators): pass"),
    "Each slice is resumed only once: a slice yields None, which does not mean that it has ended.":
        (LOOP, "    for generator in generators: next(generator, None)"),
    "A slice loses a turn when another one ends: a list that shrinks during a for loop skips an element, so remove "
    "slices from a copy.": (LOOP, '''    waiting = list(generators)
    while waiting:
        for generator in waiting:
            if next(generator, "ended") == "ended": waiting.remove(generator)'''),
    "The slice that ran last runs next: a slice that has yielded must wait until all others have had their turn.":
        (LOOP, LOOP.replace("popleft()", "pop()")),
    "The slices take turns in reverse order: start with the first.": (LOOP, LOOP.replace(
        "deque(generators)", "deque(generators[::-1])")),
    "The order changes from round to round (a b, then b a): keep it, so that each all-reduce has the other slices' "
    "whole turn to finish in.": (LOOP, '''    waiting = list(generators)
    while waiting:
        waiting = [g for g in waiting if next(g, "ended") != "ended"][::-1]'''),
}


def program(minimal):
    """Let slices of several lengths log their turns."""
    def rank_program():
        found = {}
        for lengths in ((3, 3), (3, 1, 2), (1, 1, 3, 2), (2,)):
            log = []

            def slice(name, length, log=log):
                for turn in range(length):
                    log.append(f"{name}{turn}")
                    yield
                log.append(f"{name} ends")

            result = minimal.interleave([slice(name, length) for name, length in zip("abcd", lengths)])
            expect(not isgenerator(result), "interleave is a generator itself, so calling it runs nothing: it must "
                   "contain no yield.")
            found[f"The order of {len(lengths)} slices of {', '.join(map(str, lengths))} yields"] = log
        return found

    return World(1).run(rank_program)


def check(answer, reference):
    try:
        judge(program, answer, MISTAKES)
    except StopIteration as stop:
        raise Wrong("A slice that has ended is resumed, and next() raises StopIteration: give next() a second "
                    "argument, which it then returns.") from stop
