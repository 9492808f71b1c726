"""Exercise 7: slices that take turns."""

from inspect import isgenerator

from ..fake_ranks import on_ranks
from ..judge import expect, judge
from ..workbook import Wrong

HINTS = (
    'next(generator) runs a slice until its next yield; the yielded value is None. next(generator, "ended") returns '
    '"ended" in place of raising StopIteration.',
    "Slices may end at different times. A list that shrinks while a for loop walks it skips an element.",
    "A deque can do it: take a slice from the left, resume it, and put it back at the right unless it has ended.")
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
}


@on_ranks(1)
def program(minimal):
    """Let slices of several lengths log their turns."""
    found = {}
    for lengths in ((2, 2, 2, 2, 2, 2, 2), (3, 3), (3, 1, 2), (1, 1, 3, 2), (2,)):
        log = []

        def slice(name, length, log=log):
            for turn in range(length):
                log.append(f"{name}{turn}")
                yield
            log.append(f"{name} ends")

        named = dict(zip("abcdefg", lengths))
        made = {name: slice(name, named[name]) for name in "dbgacef" if name in named}   # not in the list's order
        result = minimal.interleave([made[name] for name in named])
        expect(not isgenerator(result), "interleave is a generator itself, so calling it runs nothing: it must "
               "contain no yield.")
        first, right = log[:len(named)], [f"{name}0" for name in named]
        expect(sorted(first) != right or first == right,
               f"The first turns are {', '.join(first)}, but the list's order is {', '.join(right)}: keep it, so "
               "that all ranks take the same turns. A set, for example, has an order of its own on each rank.")
        found[f"The order of {len(lengths)} slices of {', '.join(map(str, lengths))} yields"] = log
    return found


def check(answer, reference):
    try:
        judge(program, answer, MISTAKES)
    except StopIteration as stop:
        raise Wrong("A slice that has ended is resumed, and next() raises StopIteration: give next() a second "
                    "argument, which it then returns.") from stop
