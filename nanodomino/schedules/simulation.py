"""Simulates a schedule: when each stage runs each action, how long it idles, and when each message is sent.

Actions have durations and messages have delays, in any unit of time. An action starts when its stage has finished the
previous one and its inputs have arrived. The simulated times give the step time, the bubble, a picture, and the moment
at which pipeline.py must post each receive.
"""

from bisect import bisect_left
from collections import deque
from functools import lru_cache

from nanodomino.errors import counted
from nanodomino.schedules.definitions import Schedule
from nanodomino.schedules.simulation import Message, Timetable, message_sent, timetable


def simulate(table: Timetable, duration=lambda stage, action: action.length, message=0) -> list[list[tuple]]:
    """Return for each stage a list of (action, start, end).

    duration(stage, action): how long an action takes.
    message: the delay between an action's end and the arrival of its output on another stage.
    Raises ValueError if the stages wait for each other forever.
    """
    queues, rows = [deque(row) for row in table.dependencies], [[] for _ in table.rows]
    times = {}                                       # when each event happened
    while any(queues):
        before = len(times)
        for stage, queue in enumerate(queues):
            free = rows[stage][-1][2] if rows[stage] else 0
            while queue and all(event in times for event in queue[0][1]):
                action, needed, caused = queue.popleft()
                start = max([free, *[times[event] for event in needed]])
                free = start + duration(stage, action)
                rows[stage].append((action, start, free))
                for event, elsewhere in caused:
                    times[event] = free + message * elsewhere
        if len(times) == before:
            stuck = [f"{queue[0][0]} on stage {stage}" for stage, queue in enumerate(queues) if queue]
            raise ValueError(f"a schedule must run to its end, but {', '.join(stuck)} are waiting for each other; "
                             "change the order of the actions")
    return rows


def step_time(rows) -> float:
    """Return the time from the first action's start to the last action's end, over all stages."""
    return max(end for row in rows for _, _, end in row)


def busy_time(rows) -> float:
    """Return how long the busiest stage computes: the ideal step time, which no schedule can beat."""
    return max(sum(end - start for _, start, end in row) for row in rows)


def bubble(rows) -> float:
    """Return the busiest stage's idle time divided by its busy time: (p - 1)/m for 1F1B and GPipe on equal stages."""
    return step_time(rows) / busy_time(rows) - 1


def peak_microbatches(actions, size=lambda chunk: 1):
    """Return the largest number of microbatches that a stage holds at the same time, each weighted by size(chunk).

    A stage holds a microbatch from its forward to the end of its backward. If the backward is split, that is the end of
    its WeightBackward, which needs the activations too.
    """
    held = peak = 0
    for action in actions:
        for half in reversed(action.halves):                 # a pair holds both of its microbatches
            if half.kind == "forward":
                held += size(half.chunk)
                peak = max(peak, held)
            elif half.kind in ("backward", "weight_backward"):
                held -= size(half.chunk)
    return peak


@lru_cache(maxsize=16)
def receives_to_post(table: Timetable, actions_ahead=0) -> list[list[list[Message]]]:
    """Return, as result[stage][i], the messages whose receives a stage posts right before its action i.

    Each receive is posted before the first action that starts at or after the time at which the simulation sends the
    message. With `actions_ahead` it is posted that many actions earlier. pipeline.py says why.
    """
    rows = simulate(table)
    sent = sorted(((end, sender, *target) for sender, row in enumerate(rows) for action, _, end in row
                   for half in action.halves if (target := message_sent(table.placement, sender, half))
                   and target[0] != sender),
                  key=lambda message: message[:3])       # stable: a pair sends its backward's output first
    starts, receives = [[start for _, start, _ in row] for row in rows], [[[] for _ in row] for row in rows]
    for time, _, receiver, message in sent:
        receives[receiver][max(bisect_left(starts[receiver], time) - actions_ahead, 0)].append(message)
    return receives


def picture(schedule: Schedule | str, stages: int, microbatches: int, chunks=1, shown=8) -> str:
    """Return a schedule as text, one column per unit of time. At most `shown` microbatches are drawn."""
    drawn = min(microbatches, shown)
    rows = simulate(timetable(schedule, stages, drawn, chunks))
    cost = bubble(simulate(timetable(schedule, stages, microbatches, chunks)))
    width = 1 + max(-(-len(str(action)) // action.length) for row in rows for action, _, _ in row)
    lines = [f"schedule {getattr(schedule, 'name', schedule)}: {counted(microbatches, 'microbatch')}"
             + (f" (the first {drawn} drawn)" if drawn < microbatches else "")
             + (f" through {chunks} chunks a stage" if chunks > 1 else "")
             + f", bubble {cost:.0%} of the ideal time = {cost / (1 + cost):.0%} of the step"
             + ("; more microbatches shrink it" if cost else "")]
    for stage, row in enumerate(rows):
        cells = [""] * row[-1][2]
        for action, start, end in row:
            cells[start:end] = [str(half) for half in action.halves for _ in range(half.length)]
        lines.append(f"  stage {stage} |" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)
