"""Exercise 5: the actions of 1F1B, as a list for any stage."""

from ..fake_ranks import on_ranks

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
    "Your warm-up has more F than there are microbatches: it is at most the number of microbatches.":
        (WARM_UP, "stages - stage - 1"),
    "Your list misses the last B: after the pairs, the B of the warm-up's microbatches remain.":
        ('return actions + [("B", i) for i in range(microbatches - num_warmup, microbatches)]', "return actions"),
    "Your list has no warm-up: stage 0 waits with F1 until B0 has come back through all stages, so only one stage "
    "works at a time.": (WARM_UP, "0"),
}


@on_ranks(1)
def program(minimal):
    return {f"The list of stage {stage} of {stages} with {m} microbatches": minimal.one_f_one_b(stage, stages, m)
            for stages, m in CASES for stage in range(stages)}
