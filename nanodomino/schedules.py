"""Pipeline schedules as data: what each stage does in a step, in which order, and what that costs.

Stage r of p holds a run of layers. A global batch is cut into m microbatches, and what a stage does in a step is a list
of actions, Forward(i) and Backward(i), made by a pure function of (stage, stages, microbatches): it can be printed,
counted and tested without a process; pipeline.py executes it. p = 4, m = 6, a backward twice as long as a forward:

    stage 0 |F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 B2 B2    B3 B3    B4 B4    B5 B5
    stage 1 |   F0 F1 F2             B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5            1F1B: at most p - r
    stage 2 |      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4    B5 B5                  microbatches alive
    stage 3 |         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5                        on stage r

1F1B (PipeDream-flush, 2006.09503; Megatron-LM's pipeline paper, 2104.04473, section 2.2) has three phases on stage r:

    warm-up    w = min(p - r - 1, m) forwards
    steady     a forward, a backward, in turn: one activation comes, one goes
    cool-down  the w backwards that are left

GPipe (1811.06965) runs all forwards before the first backward: simpler, and all m are alive at once.

The *bubble* is the time in which a stage is idle, as a part of the ideal time, in which it is busy. Both leave
(p - 1)(F + B) idle in a step of m (F + B): a bubble of (p - 1)/m. In this project the word means nothing else.

What a schedule costs is read off its actions, and never asked by its name: how many microbatches are alive at once, and
by playing it through, with any durations and with messages that take time, its step and its bubble. So a new schedule
is one function and one line in SCHEDULES.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    microbatch: int

    def __str__(self):
        return f"F{self.microbatch}"


@dataclass(frozen=True)
class Backward:
    microbatch: int

    def __str__(self):
        return f"B{self.microbatch}"


def forward_only(stage: int, stages: int, microbatches: int) -> list:
    """Evaluation: every microbatch forward."""
    return [Forward(i) for i in range(microbatches)]


def gpipe(stage: int, stages: int, microbatches: int) -> list:
    """All forwards, then all backwards (1811.06965)."""
    return forward_only(stage, stages, microbatches) + [Backward(i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list:
    """One forward, one backward, after a warm-up that is the longer the earlier the stage."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [Forward(i) for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    return actions + [Backward(i) for i in range(microbatches - warm_up, microbatches)]


SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}


# ---- what a schedule costs

def most_alive(actions) -> int:
    """The most microbatches whose activations are held at once."""
    alive = most = 0
    for action in actions:
        alive += 1 if isinstance(action, Forward) else -1
        most = max(most, alive)
    return most


def unit_time(stage: int, action) -> int:
    """The picture's durations: a backward is twice a forward's products."""
    return 1 if isinstance(action, Forward) else 2


def play(schedule, stages: int, microbatches: int, duration=unit_time, message=0) -> list[list[tuple]]:
    """When each stage would do what: for each stage a list of (action, begin, end).

    duration(stage, action): of the action there; message: from the end of an action until its output is at the next
    stage, which nobody spends working. Any unit of time.
    Raises ValueError if the schedule can't be executed (somebody waits for a message that is never sent).
    """
    queues = [deque(schedule(stage, stages, microbatches)) for stage in range(stages)]
    rows, done = [[] for _ in range(stages)], {}
    while any(queues):
        before = len(done)
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                up = isinstance(action, Forward)
                source = stage - 1 if up else stage + 1
                needed = [] if up else [(stage, Forward(action.microbatch), 0)]
                if 0 <= source < stages:
                    needed.append((source, action, message))
                if not all((giver, given) in done for giver, given, _ in needed):
                    break
                begin = max([done[giver, given] + delay for giver, given, delay in needed]
                            + [rows[stage][-1][2] if rows[stage] else 0])
                done[stage, action] = begin + duration(stage, action)
                rows[stage].append((queue.popleft(), begin, done[stage, action]))
        if len(done) == before:
            raise ValueError(f"the schedule stops with {[str(queue[0]) for queue in queues if queue]} waiting for "
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


def picture(name: str, stages: int, microbatches: int, shown=8) -> str:
    """The schedule as text, a column per unit of time; at most `shown` microbatches are drawn."""
    drawn = min(microbatches, shown)
    rows, width = play(SCHEDULES[name], stages, drawn), len(str(drawn - 1)) + 2
    lines = [f"schedule {name}: {microbatches} microbatches"
             + (f" (the first {drawn} drawn)" if drawn < microbatches else "")
             + f", bubble {bubble(play(SCHEDULES[name], stages, microbatches)):.0%} of the ideal time"]
    for stage, row in enumerate(rows):
        cells = [""] * row[-1][2]
        for action, begin, end in row:
            cells[begin:end] = [str(action)] * (end - begin)
        lines.append(f"  stage {stage} |" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
    return "\n".join(lines)
