"""Turns the events of a dry run into seconds, on a machine that is given by a few rates (estimate/formulas.py).

    operation    moves the clock
    launch       occupies a wire as soon as it is free: a collective its group's, a copy the one to or from the host.
                 While a collective is in flight, it takes a share of the GPU from compute
    wait         moves the clock to the end of the collective. The time that passes is exposed

So what the program overlaps, overlaps here. Messages between stages take no time here: schedules/simulation.py knows
when they arrive.
"""

import statistics
from collections import Counter, defaultdict
from functools import lru_cache

from nanodomino.estimate.formulas import Machine
from nanodomino.estimate.accounts import ActionEnd, Launch, Operation

PARTS = {"matmul": "matmuls", **dict.fromkeys(("attention", "attention backward"), "attention"),
         "memory": "element-wise work"}


class Clock:
    """Plays the events of a RankRun. actions: {kinds of action: {part: seconds}}, medians; after: {part: seconds} of
    what follows the last action. The parts add up to the time that passes."""

    def __init__(self, run, machine: Machine):
        self.machine, self.ranks_of = machine, run.ranks_of
        self.now, self.in_flight_until, self.after = 0.0, 0.0, Counter()
        self.wires, self.ends, passed = defaultdict(float), {}, []
        for event in run.events:
            if type(event) is Operation:
                self.compute(PARTS[event.kind], machine.operation_seconds(event))
            elif type(event) is Launch:
                self.launch(event)
            elif type(event) is ActionEnd:
                passed.append((event.kinds, self.after))
                self.after = Counter()
            elif event.number in self.ends:
                group, end = self.ends.pop(event.number)
                self.after[f"{group} exposed"] += max(0.0, end - self.now)
                self.now = max(self.now, end)
        self.parts = {name for _, parts in passed for name in parts} | set(self.after)
        self.actions = {kinds: Counter({name: statistics.median(parts[name] for same, parts in passed if same == kinds)
                                        for name in self.parts}) for kinds in {kinds for kinds, _ in passed}}

    def compute(self, part: str, seconds: float):
        """Move the clock by an operation, which is slower while a collective is in flight."""
        share = 1.0 - self.machine.overlap_slowdown
        slow = min(seconds, max(0.0, self.in_flight_until - self.now) * share)
        passed = slow / share + seconds - slow
        self.after[part] += passed
        self.now += passed

    def launch(self, event: Launch):
        wire, seconds = event.group, 0.0
        if event.group == "host":
            wire, seconds = event.kind, event.bytes / self.machine.host_copy_rate
        elif event.group != "pp":                              # the simulated schedule knows when messages arrive
            seconds = self.machine.collective_seconds(event.kind, event.bytes, self.ranks_of[event.group])
        end = self.wires[wire] = max(self.now, self.wires[wire]) + seconds
        self.ends[event.number] = event.group, end
        if seconds and event.group != "host":
            self.in_flight_until = max(self.in_flight_until, end)


@lru_cache(maxsize=256)
def clock_of(run, machine: Machine) -> Clock:
    return Clock(run, machine)
