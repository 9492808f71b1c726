"""Exercise 11: the actions of interleaved 1F1B, as a list for any stage."""

from ..fake_ranks import on_ranks

HINTS = (
    "In which order does stage 0 run its forwards? Write this list of (microbatch, chunk) with three loops.",
    "The backwards take the microbatches in the same order, but the chunks in reverse.",
    "Before its first B, the last stage runs (chunks - 1) * stages forwards and one more. Each earlier stage runs two "
    "more than the next one. The rest is as in one_f_one_b.")
CASES = [(2, 4, 2), (3, 6, 2), (4, 8, 3), (1, 2, 2), (4, 4, 2)]                     # stages, microbatches, chunks
WARM_UP = "min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))"
LOOPS = "for chunk in range(chunks)\n             for i in range(first, first + stages)]"
MISTAKES = {
    "The backwards take the chunks in the order of the forwards, so all stages wait forever: the gradient of the last "
    "chunk comes first, so B starts there.": ("(\"B\", i, chunks - 1 - chunk)", "(\"B\", i, chunk)"),
    "A microbatch passes all chunks of a stage at once: between two chunks it must pass all other stages, so first run "
    "chunk 0 of `stages` microbatches.":
        (LOOPS, "for i in range(first, first + stages)\n             for chunk in range(chunks)]"),
    "All microbatches pass chunk 0 before the first one enters chunk 1, so a stage keeps all of them: change the chunk "
    "after each `stages` microbatches.": (
        "for first in range(0, microbatches, stages) " + LOOPS,
        "for chunk in range(chunks) for i in range(microbatches)]"),
    "The warm-up is that of 1F1B, so all stages wait forever: before its first B, even the last stage must run "
    "(chunks - 1) * stages more.": (WARM_UP, "min(stages - stage - 1, len(order))"),
    "All forwards run before the first backward, so a stage keeps all microbatches.": (WARM_UP, "len(order)"),
}


@on_ranks(1)
def program(minimal):
    return {f"The list of stage {stage} of {stages} with {m} microbatches and {chunks} chunks":
            minimal.interleaved(stage, stages, m, chunks) for stages, m, chunks in CASES for stage in range(stages)}
