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


def program(minimal, world=None, wrong=None):
    """Run 1F1B, where each output holds a number that names its stage, action and microbatch. `wrong` gets a sentence
    for each message that an exchange posts and should not, or should and does not."""
    world = world or World(STAGES)

    def rank_program():
        rank, found = minimal.dist.get_rank(), {}
        grid = SimpleNamespace(previous=rank - 1 if rank else None, next=rank + 1 if rank < STAGES - 1 else None,
                               device=torch.device("cpu"), pp_rank=rank, pp=STAGES)
        model = SimpleNamespace(grid=grid, sizes=minimal.Sizes(micro_batch=2, seq_length=3, hidden=4), verbose=False,
                                action="")
        actions = [(None, 0), *minimal.one_f_one_b(rank, STAGES, MICROBATCHES), (None, 0)]
        for (action, i), (following, j) in zip(actions, actions[1:]):
            output = None if action is None else torch.full((2, 3, 4), 100.0 * rank + 10 * (action == "B") + i)
            target, source = ({"F": one, "B": other}.get(name) for name, one, other in (
                (action, grid.next, grid.previous), (following, grid.previous, grid.next)))
            right = {(kind, peer) for kind, peer in (("isend", target), ("irecv", source)) if peer is not None}
            before, ended = len(world.posted[rank]), False
            try:
                found[f"What {following}{j} receives"] = minimal.exchange(model, action, output, following)
                ended = True
            finally:                                         # also if it never returns, because of a wrong message
                posted = {(one.kind, one.peer) for batch in world.posted[rank][before:] for one in batch}
                for kind, peer in sorted(posted - right or (right - posted if ended else ())):
                    missing = (kind, peer) in right
                    wrong.append(
                        f"On stage {rank} of {STAGES}, between {action or 'start'} and {following or 'end'}, "
                        f"exchange posts {'no ' * missing}{kind} with stage {peer}, but {RULES[kind]}"
                        + "; 0 is a rank, too, so write `is not None` in the condition" * (missing and peer == 0) + ".")
        return found

    return world.run(rank_program)


def check(answer, reference):
    world, wrong, error = World(STAGES), [], None
    try:
        program(answer, world, wrong)
    except RankError as caught:
        error = caught
    if wrong:
        raise Wrong(wrong[0]) from error
    kinds = {batches[-1][0].kind for batches in world.posted if batches}          # of what each rank posted last
    if isinstance(error, Deadlock) and len(kinds) == 1:
        first, second = ("send", "receive") if kinds == {"isend"} else ("receive", "send")
        raise Wrong(f"Deadlock: all stages {first} first and {second} later, so neighbours wait for each other "
                    f"({error}); post the send and the receive in one batch_isend_irecv, and wait() only then."
                    ) from error
    if error is not None:
        raise error
    judge(program, answer, {})
