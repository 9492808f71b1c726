"""Exercise 6: an exchange of messages that cannot deadlock."""

from types import SimpleNamespace

import torch

from ..fake_ranks import Deadlock, RankError, World
from ..judge import judge
from ..workbook import Wrong

FACTS = """
action and following are "F", "B" or None. torch has dist.P2POp(dist.isend or dist.irecv, tensor,
rank) and dist.batch_isend_irecv(list of P2POp), which refuses an empty list and returns works.
"""
HINTS = (
    "grid.previous and grid.next are ranks, or None at the ends. Whom does F receive from, and whom does B send to?",
    "A message has the shape model.sizes.micro_batch, seq_length, hidden; create it on grid.device.",
    "Neighbours exchange F and B at the same time. If both wait for their send first, who posts the receives?",
    "Call wait() on each of the works, and only then return the received tensor.")
STAGES, MICROBATCHES = 3, 4
RULES = {"isend": "F sends to the next stage and B to the previous one",
         "irecv": "it must receive what the following action needs: F from the previous stage, B from the next"}


def program(minimal, world=None):
    """Run 1F1B, where each output holds a number that names its stage, action and microbatch.

    world.exchanges[rank] gets, for each call of exchange, the first of its batches of messages and the one after them.
    """
    world = world or World(STAGES)
    world.exchanges = [[] for _ in range(STAGES)]

    def rank_program():
        rank, found = minimal.dist.get_rank(), {}
        grid = SimpleNamespace(previous=rank - 1 if rank else None, next=rank + 1 if rank < STAGES - 1 else None,
                               device=torch.device("cpu"), pp_rank=rank, pp=STAGES)
        model = SimpleNamespace(grid=grid, sizes=minimal.Sizes(micro_batch=2, seq_length=3, hidden=4), verbose=False,
                                action="")
        actions = [(None, 0), *minimal.one_f_one_b(rank, STAGES, MICROBATCHES), (None, 0)]
        for (action, i), (following, j) in zip(actions, actions[1:]):
            output = None if action is None else torch.full((2, 3, 4), 100.0 * rank + 10 * (action == "B") + i)
            call = SimpleNamespace(action=action, following=following, first=len(world.posted[rank]), after=None)
            world.exchanges[rank].append(call)
            found[f"What {following}{j} receives"] = minimal.exchange(model, action, output, following)
            call.after = len(world.posted[rank])
        return found

    return world.run(rank_program)


def exchanges_of(minimal):
    """Run program(); return its error or None, and each rank's calls of exchange, with messages as (kind, peer)."""
    world, error = World(STAGES), None
    try:
        program(minimal, world)
    except RankError as caught:
        error = caught
    for calls, posted in zip(world.exchanges, world.posted):
        for call in calls:
            call.messages = [(one.kind, one.peer) for batch in posted[call.first:call.after] for one in batch]
    return error, world.exchanges


def check(answer, reference):
    error, found = exchanges_of(answer)
    _, right = exchanges_of(reference)
    for rank in range(STAGES):
        for call, its_right in zip(found[rank], right[rank]):
            if sentence := mistake_in(call, its_right.messages):
                raise Wrong(f"On stage {rank} of {STAGES}, between {call.action or 'the start'} and "
                            f"{call.following or 'the end'}, exchange {sentence}.") from error
    first_kinds = {calls[-1].messages[0][0] for calls in found if calls and calls[-1].messages}
    if isinstance(error, Deadlock) and len(first_kinds) == 1:
        first, second = ("send", "receive") if first_kinds == {"isend"} else ("receive", "send")
        raise Wrong(f"Deadlock: all stages {first} first and {second} later, so neighbours wait for each other "
                    f"({error}); post the send and the receive in one batch_isend_irecv, and wait() only then."
                    ) from error
    if error is not None and "never calls wait()" in str(error):
        raise Wrong(f"exchange returns too early: {error}. A received tensor is filled, and a sent tensor may be "
                    "changed, only after wait(); batch_isend_irecv returns one work for each message.") from error
    if error is not None:
        raise error
    judge(program, answer, {})


def mistake_in(call, right):
    """Say what is wrong with the messages that one call of exchange has posted, or return None."""
    for kind, peer in call.messages:
        if (kind, peer) not in right:
            return f"{'sends to' if kind == 'isend' else 'receives from'} stage {peer}, but {RULES[kind]}"
    for kind, peer in set(right) - set(call.messages) if call.after is not None else ():
        return (f"does not {'send to' if kind == 'isend' else 'receive from'} stage {peer}, but {RULES[kind]}"
                + "; 0 is a rank, too, so write `is not None` in the condition" * (peer == 0))
    return None
