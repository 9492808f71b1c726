"""Exercise 5: the actions of 1F1B, as a list for any stage."""

from collections import Counter
from numbers import Integral

from ..fake_ranks import World
from ..judge import expect

HINTS = (
    "Read the picture above, in which a B takes twice as long as an F. There are three phases: a warm-up (only F), "
    "then pairs (F, B), then the remaining B.",
    "How many F does a stage run before its first pair? Stage 2 of 3 runs none, stage 0 runs two.",
    "There may be fewer microbatches than that.")
CASES = [(4, 6), (3, 4), (2, 5), (1, 3), (4, 4), (4, 2), (5, 1)]             # stages, microbatches


def write(actions):
    return " ".join(f"{kind}{i}" for kind, i in actions)


def peak(actions):
    """The largest number of microbatches whose tape a stage keeps at the same time."""
    kept = peak = 0
    for kind, _ in actions:
        kept += 1 if kind == "F" else -1
        peak = max(peak, kept)
    return peak


def check(answer, reference):
    cases = [(stage, stages, m) for stages, m in CASES for stage in range(stages)]
    found, = World(1).run(lambda: [answer.one_f_one_b(*case) for case in cases])
    for case, actions in zip(cases, found):
        examine(*case, actions, reference.one_f_one_b(*case))
    for name, sentence in WRONG_WARM_UP.items():
        wrong = [with_warm_up(*case, name) for case in cases]
        expect(found != wrong, sentence)
    for (stage, stages, m), actions in zip(cases, found):
        right = reference.one_f_one_b(stage, stages, m)
        place = next((i for i, (one, other) in enumerate(zip(actions, right)) if one != other), None)
        if place is not None:
            expect(peak(actions) <= peak(right),
                   f"Stage {stage} of {stages} keeps {peak(actions)} tapes with {m} microbatches, but 1F1B keeps at "
                   f"most {peak(right)}: it must run a B as soon as it has run {peak(right)} F. Yours: "
                   f"{write(actions)}. Right: {write(right)}.")
            expect(False, f"Action {place} of stage {stage} of {stages} with {m} microbatches is "
                          f"{write([actions[place]])} instead of {write([right[place]])}. Yours: {write(actions)}. "
                          f"Right: {write(right)}.")


WRONG_WARM_UP = {
    "all": "Your list runs all F before the first B, so a stage keeps the tapes of all microbatches: run a B as soon "
           "as the stage can, so that it keeps at most stages - stage.",
    "one more": "Your warm-up is one F too long: the last stage can run B0 right after F0, so a stage warms up with "
                "stages - stage - 1 microbatches.",
    "one fewer": "Your warm-up is one F too short: before its first pair, a stage runs one F for each stage after it, "
                 "stages - stage - 1 in all.",
    "same": "All stages of your list warm up with stages - 1 microbatches, but a stage needs only one F for each stage "
            "after it: stages - stage - 1.",
    "reversed": "Your warm-up grows with the stage, but stage 0 waits longest for its first B: it must warm up with "
                "stages - 1 microbatches, the last stage with none.",
    "none": "Your list has no warm-up: stage 0 waits with F1 until B0 has come back through all stages, so only one "
            "stage works at a time.",
}


def with_warm_up(stage, stages, m, name):
    count = {"all": m, "one more": stages - stage, "one fewer": max(stages - stage - 2, 0), "same": stages - 1,
             "reversed": stage, "none": 0}
    warm_up = min(count[name], m)
    actions = [("F", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        actions += [("F", warm_up + i), ("B", i)]
    return actions + [("B", i) for i in range(m - warm_up, m)]


def examine(stage, stages, m, actions, right):
    """Check what holds for every schedule: each microbatch has one F, and one B after it, in order."""
    where = f"stage {stage} of {stages} with {m} microbatch{'es' * (m > 1)}"
    expected = 'one_f_one_b must return a list of pairs, such as [("F", 0), ("B", 0)], but '
    expect(isinstance(actions, list), f"{expected}it returns {actions!r}.")
    for action in actions:
        expect(isinstance(action, tuple) and len(action) == 2 and action[0] in ("F", "B")
               and isinstance(action[1], Integral), f"{expected}the list contains {action!r}.")
    count, needed = Counter(actions), Counter(right)
    extra, missing = list((count - needed).keys()), list((needed - count).keys())
    if extra and stages - stage - 1 > m:
        expect(False, f"On {where} the list has {write(extra)}, which does not exist: there may be fewer microbatches "
                      "than stages, so the warm-up is at most the number of microbatches.")
    expect(not extra, f"On {where} the list has {write(extra)} too often, or there is no such microbatch: "
                       f"they are 0 to {m - 1}.")
    expect(not missing, f"On {where} the list misses {write(missing)}: after the pairs, the B of the warm-up's "
                        "microbatches remain.")
    for kind, i in actions:
        expect(kind == "F" or actions.index(("F", i)) < actions.index(("B", i)),
               f"On {where}, B{i} comes before F{i}: {write(actions)}.")
    for kind in "FB":
        order = [i for its_kind, i in actions if its_kind == kind]
        expect(order == sorted(order), f"On {where} the microbatches of {kind} are in the order {order}: the stages "
               "exchange messages in the order 0, 1, 2, so a stage that takes another order gets another microbatch.")
