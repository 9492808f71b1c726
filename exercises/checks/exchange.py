"""Exercise 6: an exchange of messages that cannot deadlock."""

from types import SimpleNamespace

import torch

from ..fake_ranks import Deadlock, RankError, World
from ..judge import expect, judge
from ..workbook import Wrong

FACTS = """
action and following are "F", "B" or None. torch has dist.P2POp(dist.isend or dist.irecv, tensor,
rank) and dist.batch_isend_irecv(list of P2POp), which refuses an empty list and returns works.
"""
HINTS = (
    "grid.previous and grid.next are ranks, or None at the ends. Whom does F receive from, and whom does B send to?",
    "A message has the shape stage.sizes.micro_batch, seq_length, hidden; create it on grid.device.",
    "Neighbours exchange F and B at the same time. If both wait for their send first, who posts the receives?",
    "Call wait() on each of the works, and only then return the received tensor.")
STAGES, MICROBATCHES = 3, 4
RULES = {"isend": "F sends to the next stage and B to the previous one",
         "irecv": "it must receive what the following action needs: F from the previous stage, B from the next"}


def program(minimal, world=None, log=None):
    """Run 1F1B, where each output holds a number that names its stage, action and microbatch.

    log: {rank: [(action, following, posted messages as (kind, peer), how many batches)]}, filled during the run.
    """
    world = world or World(STAGES)

    def rank_program():
        rank, found = minimal.dist.get_rank(), {}
        grid = SimpleNamespace(previous=rank - 1 if rank else None, next=rank + 1 if rank < STAGES - 1 else None,
                               device=torch.device("cpu"), pp_rank=rank, pp=STAGES)
        stage = SimpleNamespace(grid=grid, sizes=minimal.Sizes(micro_batch=2, seq_length=3, hidden=4), verbose=False,
                                action="")
        actions = [(None, 0), *minimal.one_f_one_b(rank, STAGES, MICROBATCHES), (None, 0)]
        for (action, i), (following, j) in zip(actions, actions[1:]):
            output = None if action is None else torch.full((2, 3, 4), 100.0 * rank + 10 * (action == "B") + i)
            start = len(world.posted[rank])
            entry = [action, following, start, None]
            if log is not None:
                log[rank].append(entry)
            received = minimal.exchange(stage, action, output, following)
            entry[3] = len(world.posted[rank])
            found[f"What {following}{j} receives"] = received
        return found

    return world.run(rank_program)


def messages_of(minimal):
    """Run program(); return its error or None, and {rank: [(action, following, ended, batches of (kind, peer))]}."""
    world, log, error = World(STAGES), {rank: [] for rank in range(STAGES)}, None
    try:
        program(minimal, world, log)
    except RankError as caught:
        error = caught
    return error, {rank: [(action, following, end is not None,
                           [[(message.kind, message.peer) for message in batch]
                            for batch in world.posted[rank][start:end]])
                          for action, following, start, end in entries] for rank, entries in log.items()}


def check(answer, reference):
    error, found = messages_of(answer)
    _, right = messages_of(reference)
    last = [(set(sum(one[3], [])), set(sum(other[3], []))) for one, other in zip(found[2], right[2]) if one[2]]
    with_stage_1 = {kind for one, _ in last for kind, _ in one if all(a == b for a, b in last)}
    for rank in range(STAGES):
        for one, other in zip(found[rank], right[rank]):
            compare_messages(rank, *one, sum(other[3], []), error, with_stage_1)
    first_kinds = {batches[0][0][0] for entries in found.values() for *_, batches in entries[-1:] if batches}
    if isinstance(error, Deadlock) and len(first_kinds) == 1:
        first, second = ("send", "receive") if first_kinds == {"isend"} else ("receive", "send")
        raise Wrong(f"Deadlock: all stages {first} first and {second} later, so neighbours wait for each other "
                    f"({error}); post the send and the receive in one batch_isend_irecv, and wait() only "
                    "then.") from error
    if error is not None and "never calls wait()" in str(error):
        raise Wrong(f"exchange returns too early: {error}. A received tensor is filled, and a sent tensor may be "
                    "changed, only after wait(); batch_isend_irecv returns one work for each message.") from error
    if error is not None:
        raise error
    judge(program, answer, {})


def compare_messages(rank, action, following, ended, batches, right, error, with_stage_1):
    """Compare the messages that one call of exchange has posted with the right ones.

    with_stage_1: the kinds of messages that stage 2 exchanges with stage 1, if it makes no mistake.
    """
    where = f"On stage {rank} of {STAGES}, between {action or 'the start'} and {following or 'the end'}, exchange"
    found = sum(batches, [])
    for kind, peer in found:
        if (kind, peer) not in right and kind == "isend":
            raise Wrong(f"{where} sends to stage {peer}, but {RULES[kind]}.") from error
        if (kind, peer) not in right:
            raise Wrong(f"{where} receives from stage {peer}, but {RULES[kind]}.") from error
        expect(found.count((kind, peer)) == 1, f"{where} posts the {kind} with stage {peer} more than once.")
    if ended:
        for kind, peer in right:
            if (kind, peer) not in found and peer == 0 and kind in with_stage_1:
                raise Wrong(f"{where} posts no {kind} with stage 0, although stage 2 posts one with stage 1: rank 0 is "
                            "false, too, so write `is not None` in the condition.") from error
            if (kind, peer) not in found:
                raise Wrong(f"{where} does not {'send to' if kind == 'isend' else 'receive from'} stage {peer}, but "
                            f"{RULES[kind]}.") from error
