from bisect import bisect_left
from collections import deque
from functools import lru_cache

from nanodomino.schedules.placement import Message, Timetable, message_sent, timetable


# ---- what a schedule costs

def peak_microbatches(actions, size=lambda chunk: 1):
    """The most that is held at once of microbatches that have gone forward and have something left to do: their number,
    or the sum of size(chunk). (What an InputBackward frees, it needs for the gradients that it leaves behind.)"""
    alive = most = 0
    for action in actions:
        for half in reversed(action.halves):                 # a pair holds both
            if half.kind == "forward":
                alive += size(half.chunk)
                most = max(most, alive)
            elif half.kind in ("backward", "weight_backward"):
                alive -= size(half.chunk)
    return most


def simulate(table: Timetable, duration=lambda stage, action: action.length, message=0) -> list[list[tuple]]:
    """When each stage would do what: for each stage a list of (action, begin, end).

    duration(stage, action): of the action there; message: from the end of an action until its output is at another
    stage, which nobody spends working. Any unit of time.
    Raises ValueError if the schedule can't be executed (somebody waits for a message that is never sent).
    """
    queues, rows = [deque(row) for row in table.dependencies], [[] for _ in table.rows]
    there = {}                                       # number of a message, or of what is done -> since when
    while any(queues):
        before = len(there)
        for stage, queue in enumerate(queues):
            free = rows[stage][-1][2] if rows[stage] else 0
            while queue and all(one in there for one in queue[0][1]):
                action, needed, done, sent = queue.popleft()
                begin = max([free, *[there[one] for one in needed]])
                free = begin + duration(stage, action)
                rows[stage].append((action, begin, free))
                there.update(dict.fromkeys(done, free))
                there.update(dict.fromkeys(sent, free + message))
        if len(there) == before:
            raise ValueError(f"the schedule stops with {[str(queue[0][0]) for queue in queues if queue]} waiting for "
                             "each other")
    return rows


def step_time(rows) -> float:
    """From the first action's begin to the last one's end, over all stages."""
    return max(end for row in rows for _, _, end in row)


def busy_time(rows) -> float:
    """Of the stage that has most to do: the step's ideal time, as nothing is shorter."""
    return max(sum(end - begin for _, begin, end in row) for row in rows)


def bubble(rows) -> float:
    """Idle time of the busiest stage as a part of the ideal time: (p - 1)/m for 1F1B and GPipe with equal stages."""
    return step_time(rows) / busy_time(rows) - 1


@lru_cache(maxsize=16)
def receives_to_post(table: Timetable, actions_ahead=0) -> list[list[list[Message]]]:
    """For each stage and each of its actions the messages whose receive is posted before that action begins: those that
    others have sent by then, when the schedule is simulated, or `actions_ahead` actions earlier. pipeline.py says
    why."""
    rows = simulate(table)
    sent = sorted(((end, place, *given) for place, row in enumerate(rows) for action, _, end in row
                   for half in action.halves if (given := message_sent(table.placement, place, half))
                   and given[0] != place),
                  key=lambda one: one[:3])               # of a pair, whose two may have one taker, in the halves' order
    begins, receives = [[begin for _, begin, _ in row] for row in rows], [[[] for _ in row] for row in rows]
    for moment, _, taker, message in sent:
        receives[taker][max(bisect_left(begins[taker], moment) - actions_ahead, 0)].append(message)
    return receives


def picture(name: str, stages: int, microbatches: int, chunks=1, shown=8) -> str:
    """The schedule as text, a column per unit of time; at most `shown` microbatches are drawn."""
    drawn = min(microbatches, shown)
    rows = simulate(timetable(name, stages, drawn, chunks))
    cost = bubble(simulate(timetable(name, stages, microbatches, chunks)))
    width = 1 + max(-(-len(str(action)) // action.length) for row in rows for action, _, _ in row)
    lines = [f"schedule {name}: {microbatches} microbatches"
             + (f" (the first {drawn} drawn)" if drawn < microbatches else "")
             + (f" through {chunks} chunks a stage" if chunks > 1 else "") + f", bubble {cost:.0%} of the ideal time"]
    for stage, row in enumerate(rows):
        cells = [""] * row[-1][2]
        for action, begin, end in row:
            cells[begin:end] = [half for one in action.halves for half in [str(one)] * one.length]
        lines.append(f"  stage {stage} |" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)
