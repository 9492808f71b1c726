"""Exercise 14: the schedule of pairs, and two generators that take turns."""

from ..fake_ranks import on_ranks

HINTS = (
    "The three phases are those of one_f_one_b; only the length of the warm-up differs. Read it off the picture.",
    "What a pair computes is sent when the pair has ended. So a later stage delays a microbatch by a pair on its way "
    "there, and by another one on its way back.",
    "run_pair is interleave of exercise 7, and one thing more: when does the previous stage get its gradient?")
WARM_UP = "num_warmup = min(2 * (stages - stage - 1) + 1, microbatches)"
SEND = "        elif generator is backward:\n            send()"
MISTAKES = {
    "The warm-up is that of 1F1B, so pairs wait for each other forever: each later stage delays a backward by two "
    "pairs, and the last stage by one, so it is 2 * (stages - stage - 1) + 1.":
        (WARM_UP, "num_warmup = min(stages - stage - 1, microbatches)"),
    "The warm-up is one forward too short: the last stage runs the backward one pair after its forward.":
        (WARM_UP, WARM_UP.replace(" + 1", "")),
    "The warm-up is one forward too long, so a stage keeps one microbatch more than it must.":
        (WARM_UP, WARM_UP.replace("+ 1", "+ 2")),
    "The warm-up may have more forwards than there are microbatches: take the minimum.":
        (WARM_UP, "num_warmup = 2 * (stages - stage - 1) + 1"),
    "The forward takes the first turn: the previous stage waits for the backward, so it goes first.":
        ("running = deque([backward, forward])", "running = deque([forward, backward])"),
    "The backward runs to its end before the forward starts, so neither hides the other's all-reduces: take turns.":
        ("running.append(generator)\n" + SEND, "running.appendleft(generator)\n" + SEND),
    "send() is called after both have ended: the previous stage waits for the gradient, so call it when the backward "
    "has ended.": (SEND, "    send()"),
    "send() is never called.": (SEND, ""),
}


@on_ranks(1)
def program(minimal):
    found = {f"The list of stage {stage} of {stages} with {m} microbatches": minimal.paired(stage, stages, m)
             for stages, m in ((3, 6), (4, 9), (2, 2), (4, 3), (1, 3)) for stage in range(stages)}
    for lengths in ((2, 3), (3, 1), (2, 2)):
        log = found[f"The order of a backward of {lengths[0]} turns and a forward of {lengths[1]}"] = []

        def turns(name, length, log=log):
            for turn in range(length):
                log.append(f"{name}{turn}")
                yield

        minimal.run_pair(turns("B", lengths[0]), turns("F", lengths[1]), lambda log=log: log.append("send"))
    return found
