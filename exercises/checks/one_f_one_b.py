"""Exercise 5: the actions of 1F1B, as a list for any stage."""

from collections import Counter
from numbers import Integral

from ..fake_ranks import on_ranks
from ..judge import expect, judge

HINTS = (
    "Read the picture above, in which a B takes twice as long as an F. There are three phases: a warm-up (only F), "
    "then pairs (F, B), then the remaining B.",
    "How many F does a stage run before its first pair? Stage 2 of 3 runs none, stage 0 runs two.",
    "There may be fewer microbatches than that.")
CASES = [(4, 6), (3, 4), (2, 5), (1, 3), (4, 4), (4, 2), (5, 1)]             # stages, microbatches
WARM_UP = "min(stages - stage - 1, microbatches)"
MISTAKES = {
    "Your list runs all F before the first B, so a stage keeps the tapes of all microbatches: run a B as soon as "
    "the stage can, so that it keeps at most stages - stage.": (WARM_UP, "microbatches"),
    "Your warm-up is one F too long: the last stage can run B0 right after F0, so a stage warms up with stages - "
    "stage - 1 microbatches.": (WARM_UP, "min(stages - stage, microbatches)"),
    "Your warm-up is one F too short: before its first pair, a stage runs one F for each stage after it, stages - "
    "stage - 1 in all.": (WARM_UP, "min(max(stages - stage - 2, 0), microbatches)"),
    "All stages of your list warm up with stages - 1 microbatches, but a stage needs only one F for each stage "
    "after it: stages - stage - 1.": (WARM_UP, "min(stages - 1, microbatches)"),
    "Your warm-up grows with the stage, but stage 0 waits longest for its first B: it must warm up with stages - 1 "
    "microbatches, the last stage with none.": (WARM_UP, "min(stage, microbatches)"),
    "Your list has no warm-up: stage 0 waits with F1 until B0 has come back through all stages, so only one stage "
    "works at a time.": (WARM_UP, "0"),
}


def write(actions):
    return " ".join(f"{kind}{i}" for kind, i in actions)


@on_ranks(1)
def program(minimal):
    return {f"The list of stage {stage} of {stages} with {m} microbatches": minimal.one_f_one_b(stage, stages, m)
            for stages, m in CASES for stage in range(stages)}


def check(answer, reference):
    (found,), (right,) = program(answer), program(reference)
    cases = [(stage, stages, m) for stages, m in CASES for stage in range(stages)]
    for case, actions, its_right in zip(cases, found.values(), right.values()):
        examine(*case, actions, its_right)
    judge(program, answer, MISTAKES)


def examine(stage, stages, m, actions, right):
    """Check what holds for every schedule: each microbatch has one F, and one B after it, in order."""
    where = f"On stage {stage} of {stages} with {m} microbatch{'es' * (m > 1)}"
    expected = 'one_f_one_b must return a list of pairs, such as [("F", 0), ("B", 0)], but '
    expect(isinstance(actions, list), f"{expected}it returns {actions!r}.")
    for action in actions:
        expect(isinstance(action, tuple) and len(action) == 2 and action[0] in ("F", "B")
               and isinstance(action[1], Integral), f"{expected}the list contains {action!r}.")
    count, needed = Counter(actions), Counter(right)
    extra, missing = list((count - needed).keys()), list((needed - count).keys())
    expect(not extra or stages - stage - 1 <= m, f"{where} the list has {write(extra)}, which does not exist: there "
           "may be fewer microbatches than stages, so the warm-up is at most the number of microbatches.")
    expect(not extra, f"{where} the list has {write(extra)} too often, or there is no such microbatch: they are 0 to "
                      f"{m - 1}.")
    expect(not missing, f"{where} the list misses {write(missing)}: after the pairs, the B of the warm-up's "
                        "microbatches remain.")
    for kind, i in actions:
        expect(kind == "F" or actions.index(("F", i)) < actions.index(("B", i)),
               f"{where}, B{i} comes before F{i}: {write(actions)}.")
    for kind in "FB":
        order = [i for its_kind, i in actions if its_kind == kind]
        expect(order == sorted(order), f"{where} the microbatches of {kind} are in the order {order}: the stages "
               "exchange messages in the order 0, 1, 2, so a stage that takes another order gets another microbatch.")
