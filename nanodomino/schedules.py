"""Pipeline schedules as data: what each stage does in a step, in which order, and what that costs.

Stage r of p holds a run of layers. A global batch is cut into m microbatches, and what a stage does in a step is a list
of actions, made by a pure function of (stage, stages, microbatches, chunks): it can be printed, counted and tested
without a process; pipeline.py executes it. p = 4, m = 6, a backward twice as long as a forward:

    stage 0 |F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 B2 B2    B3 B3    B4 B4    B5 B5
    stage 1 |   F0 F1 F2             B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3    B4 B4    B5 B5            1F1B: at most p - r
    stage 2 |      F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 F5 B4 B4    B5 B5                  microbatches alive
    stage 3 |         F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 F5 B5 B5                        on stage r

The *bubble* is the time in which a stage is idle, as a part of the ideal time, in which it is busy. In this project the
word means nothing else. F, B, W: a forward, a backward's input gradients, its weight gradients, of one stage:

                 idle in a step             microbatches alive             source
    gpipe        (p - 1)(F + B + W)         m                              1811.06965
    1f1b         the same                   p - r                          2006.09503; 2104.04473, section 2.2
    paired       the same                   2 (p - r)                      Megatron-Core's combined 1F1B, DualPipe
    interleaved  the same / v               p + (p - 2 r - 1)/v            2104.04473, section 2.2
    zb-h1        (p - 1)(F + B - W)         p                              2401.10241, section 2.1
    zb-v         (p - 1) F/2 if F = B = W   p                              2401.10241, section 6; 2405.15362

Three ideas stand behind them. A stage may hold v *chunks*, shorter runs of layers: then the pipeline fills in shorter
steps. Input gradients are what the stage before waits for, weight gradients nobody waits for: done later, they fill
idle time. And a forward and a backward of two microbatches, done as a *pair*, hide each other's wires (domino.py).

Of few microbatches more is idle: of fewer than p in zb-h1, than (3 p - 1)/2 in zb-v. (p - 1)(F + B - W) holds where W
is not longer than B, else it is (p - 1) F; interleaved stages want m divisible by p.

zb-v's (p - 1) F/2 is no stage's own idle time: each begins so much later than the first, and ends so much later. But
clipping by the global norm joins all stages at each step's end. The paper's post-validation (section 4), which updates
before the norm is known and takes back what it should not have done, would save it. 2 (p - r) microbatches are alive in
a pair, but one tape grows as the other shrinks.

What a schedule costs is read off its actions, and never asked by its name: how many microbatches are alive at once, and
by playing it through, with any durations and with messages that take time, its step and its bubble; the order of the
messages too. So a new schedule is one function and one line in SCHEDULES.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count


# ---- actions

@dataclass(frozen=True)
class Action:
    """What a stage does with one microbatch, in one of its chunks."""
    microbatch: int
    chunk: int = 0
    letter, kind = "", ""
    length = 1               # in the picture's units: a forward's products
    direction = 0            # of the message that it takes and the one that it gives: 1 down the model, -1 up, 0 none

    def __str__(self):
        return f"{self.letter}{self.microbatch}" + "'" * self.chunk

    @property
    def halves(self) -> tuple["Action", ...]:
        return (self,)


class Forward(Action):
    letter, kind, direction = "F", "forward", 1


class Backward(Action):
    """Input and weight gradients, these as the cover of those's wires."""
    letter, kind, length, direction = "B", "backward", 2, -1


class InputBackward(Action):
    """What the stage before waits for."""
    letter, kind, direction = "I", "input_backward", -1


class WeightBackward(Action):
    """What an InputBackward left to do."""
    letter, kind = "W", "weight_backward"


PASSES = (Forward, Backward, InputBackward, WeightBackward)      # of a microbatch through a chunk


@dataclass(frozen=True)
class Pair:
    """A backward and the forward of a later microbatch, both under way at once."""
    backward: Backward
    forward: Forward
    kind, length = "pair", 3

    def __str__(self):
        return f"{self.backward}{self.forward}"

    @property
    def halves(self) -> tuple[Action, ...]:
        return self.backward, self.forward


# ---- schedules: the actions of one stage

def gpipe(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """All forwards, then all backwards: simple, and all microbatches are alive at once."""
    return [Forward(i) for i in range(microbatches)] + [Backward(i) for i in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """After a warm-up that is the longer the earlier the stage, a forward and a backward in turn: one activation comes,
    one goes."""
    warm_up = min(stages - stage - 1, microbatches)
    actions = [Forward(i) for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        actions += [Forward(warm_up + i), Backward(i)]
    return actions + [Backward(i) for i in range(microbatches - warm_up, microbatches)]


def paired(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """1F1B with each backward and the forward after it as a pair.

    A pair takes its gradient from the pair of the next stage, so it begins when that one ends; and what it sends
    forward is wanted there after that stage's next pair. Hence two forwards of warm-up for each stage that follows, and
    one for the pair's own. With fewer, a pair would wait for a pair that waits for it.
    """
    warm_up = min(2 * (stages - stage - 1) + 1, microbatches)
    return ([Forward(i) for i in range(warm_up)]
            + [Pair(Backward(i), Forward(warm_up + i)) for i in range(microbatches - warm_up)]
            + [Backward(i) for i in range(microbatches - warm_up, microbatches)])


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list:
    """1F1B over chunks. They take turns: `stages` microbatches through the first, the same through the second, and so
    on; so a microbatch comes back to the stage when the stage is done with the others. In a last round of fewer
    microbatches a stage waits where the others would be."""
    rounds = range(0, microbatches, stages)
    order = [(i, chunk) for first in rounds for chunk in range(chunks) for i in range(first, first + stages)]
    forwards = [Forward(i, chunk) for i, chunk in order]
    backwards = [Backward(i, chunks - 1 - chunk) for i, chunk in order]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(order))
    actions = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        actions += [forward, backward]
    return only_first(microbatches, actions + backwards[len(order) - warm_up:])


def zb_h1(stage: int, stages: int, microbatches: int, chunks=1) -> list:
    """1F1B whose weight gradients come `stage` microbatches late: on the last stages they are left for the cool-down,
    where 1F1B would be idle. So each stage holds p microbatches, as 1F1B's first one does."""
    warm_up, actions = min(stages - stage - 1, microbatches), []
    for i in range(microbatches + stages):
        actions += [Forward(i)] if i < microbatches else []
        if 0 <= (back := i - warm_up) < microbatches:
            actions += [InputBackward(back)] if stage else [Backward(back)]      # nobody waits for the first stage's
        if stage and 0 <= (late := i - warm_up - stage) < microbatches:
            actions += [WeightBackward(late)]
    return actions


def zb_v(stage: int, stages: int, microbatches: int, chunks=2) -> list:
    """Two chunks in a V: down the stages and up again, so that the first stage holds both ends of the model, and the
    last one turns a forward into the next at once.

    In the steady state each stage does F, B, W of one chunk, then of the other. Before it, the stage fills up while the
    first microbatches go down and come up; after it, input gradients go on and weight gradients fill what is idle. The
    pattern needs 2 p - 1 microbatches: of fewer, a stage waits where the others would be.
    """
    count = max(microbatches, 2 * stages - 1)
    down, up = [{action: deque(action(i, chunk) for i in range(count))
                 for action in (Forward, InputBackward, WeightBackward)} for chunk in (0, 1)]
    actions = []

    def do(times, *steps):
        for _ in range(times):
            actions.extend(chunk[action].popleft() for chunk, action in steps)

    do(2 * (stages - stage) - 1, (down, Forward))
    do(stage, (up, Forward), (down, Forward))
    do(stages - stage, (up, Forward), (up, InputBackward), (up, WeightBackward))
    for _ in range(len(up[Forward])):
        do(min(1, len(down[Forward])), (down, Forward))
        do(1, (down, InputBackward), (down, WeightBackward), (up, Forward), (up, InputBackward), (up, WeightBackward))
    do(stage, (down, InputBackward), (up, InputBackward))
    do(stages - stage, (down, InputBackward), (down, WeightBackward))
    actions += [*up[WeightBackward], *down[WeightBackward]]
    return only_first(microbatches, actions if stage else undivided(actions, chunk=0))


def undivided(actions: list, chunk: int) -> list:
    """With both gradients of a chunk in one action again, so that the wires have their cover: nobody waits for the
    input gradient of the model's first layers."""
    return [Backward(one.microbatch, chunk) if isinstance(one, InputBackward) and one.chunk == chunk else one
            for one in actions if not (isinstance(one, WeightBackward) and one.chunk == chunk)]


def only_first(microbatches: int, actions: list) -> list:
    """Without those of microbatches that are not there: whatever the others wait for is among them, in this order."""
    return [action for action in actions if action.microbatch < microbatches]


@dataclass(frozen=True)
class Schedule:
    """actions: one of the functions above; chunks: how many of them a stage may hold; folded: they lie in a V."""
    actions: object
    chunks: range = range(1, 2)
    folded: bool = False


SCHEDULES = {"1f1b": Schedule(one_f_one_b), "gpipe": Schedule(gpipe), "paired": Schedule(paired),
             "interleaved": Schedule(interleaved, chunks=range(2, 1000)), "zb-h1": Schedule(zb_h1),
             "zb-v": Schedule(zb_v, chunks=range(2, 3), folded=True)}


# ---- where the chunks lie, and who gives what to whom

@dataclass(frozen=True)
class Placement:
    """Each stage's chunks among the stages x chunks runs of layers, the virtual stages, that a microbatch goes through
    one after the other: round and round, or folded, every second round backwards."""
    stages: int
    chunks: int = 1
    folded: bool = False

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.stages * self.chunks - 1

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of stages that send each other messages."""
        route = [self.place(virtual_stage)[0] for virtual_stage in range(self.last + 1)]
        return sorted({(min(pair), max(pair)) for pair in zip(route, route[1:]) if pair[0] != pair[1]})

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + (self.stages - 1 - stage if self.folded and chunk % 2 else stage)

    def place(self, virtual_stage: int) -> tuple[int, int] | None:
        """(stage, chunk); None beyond the ends."""
        if not 0 <= virtual_stage <= self.last:
            return None
        chunk, place = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - place if self.folded and chunk % 2 else place), chunk

    def source(self, stage: int, half):
        """(stage, chunk) whose output is the input of an action, or of a message's taker; None at the ends, and where
        there is none."""
        return self.place(self.virtual_stage(stage, half.chunk) - half.direction) if half.direction else None

    def target(self, stage: int, half):
        """(stage, chunk) that takes this action's output; None as above."""
        return self.place(self.virtual_stage(stage, half.chunk) + half.direction) if half.direction else None


@dataclass(frozen=True)
class Message:
    """To one of a stage's chunks: a microbatch's hidden states (direction 1), or their gradient (-1)."""
    microbatch: int
    chunk: int
    direction: int

    def __str__(self):
        return ("F" if self.direction == 1 else "B") + str(self.microbatch) + "'" * self.chunk


@dataclass(frozen=True)
class Timetable:
    """The actions of all stages."""
    placement: Placement
    rows: tuple[tuple, ...]

    def __hash__(self):
        """Cheap, since each step looks its messages up by it; that of the rows would go through every action."""
        return hash((self.placement, *map(len, self.rows)))

    @cached_property
    def forwards(self) -> "Timetable":
        """Evaluation: the same without what comes after."""
        return Timetable(self.placement, tuple(
            tuple(half for action in row for half in action.halves if half.kind == "forward") for row in self.rows))

    @cached_property
    def links(self) -> list[list[tuple]]:
        """For each stage's actions: (the action, what it needs, what there is at its end, and a message's time later).
        Numbers stand for messages and for what is done, as a plan plays thousands of actions again and again."""
        number, placement = defaultdict(count().__next__), self.placement
        links = [[] for _ in self.rows]
        for stage, row in enumerate(self.rows):
            for action in row:
                given = [one for half in action.halves if (one := gives(placement, stage, half))]
                links[stage].append((
                    action,
                    [number[stage, one] for half in action.halves for one in needs(placement, stage, half)],
                    [number[stage, half] for half in action.halves] + [number[one] for one in given if one[0] == stage],
                    [number[one] for one in given if one[0] != stage]))
        return links


@lru_cache(maxsize=256)
def timetable(name: str, stages: int, microbatches: int, chunks=1) -> Timetable:
    schedule = SCHEDULES[name]
    return Timetable(Placement(stages, chunks, schedule.folded), tuple(
        tuple(schedule.actions(stage, stages, microbatches, chunks)) for stage in range(stages)))


# ---- what a schedule costs

def most_alive(actions, size=lambda chunk: 1):
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


def play(table: Timetable, duration=lambda stage, action: action.length, message=0) -> list[list[tuple]]:
    """When each stage would do what: for each stage a list of (action, begin, end).

    duration(stage, action): of the action there; message: from the end of an action until its output is at another
    stage, which nobody spends working. Any unit of time.
    Raises ValueError if the schedule can't be executed (somebody waits for a message that is never sent).
    """
    queues, rows = [deque(row) for row in table.links], [[] for _ in table.rows]
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


def needs(placement: Placement, stage: int, half: Action) -> list:
    """A message, and what the stage itself must have done before."""
    before = {"forward": (), "weight_backward": (InputBackward,)}.get(half.kind, (Forward,))
    message = [takes(half)] if placement.source(stage, half) else []
    return [kind(half.microbatch, half.chunk) for kind in before] + message


def takes(half: Action) -> Message:
    """The message that an action takes, where it has a source."""
    return Message(half.microbatch, half.chunk, half.direction)


def gives(placement: Placement, stage: int, half: Action) -> tuple[int, Message] | None:
    """(stage, message) that an action's output is."""
    target = placement.target(stage, half)
    return target and (target[0], Message(half.microbatch, target[1], half.direction))


def step_time(rows) -> float:
    """From the first action's begin to the last one's end, over all stages."""
    return max(end for row in rows for _, _, end in row)


def busy_time(rows) -> float:
    """Of the stage that has most to do: the step's ideal time, as nothing is shorter."""
    return max(sum(end - begin for _, begin, end in row) for row in rows)


def bubble(rows) -> float:
    """Idle time of the busiest stage as a part of the ideal time: (p - 1)/m for 1F1B and GPipe with equal stages."""
    return step_time(rows) / busy_time(rows) - 1


def asked(table: Timetable, stage: int, ahead=0) -> list[list[Message]]:
    """For each of a stage's actions the messages that it asks for before that action begins: those that others have
    sent by then, when the schedule is played through, or `ahead` actions earlier. pipeline.py says why."""
    return asked_by_all(table, ahead)[stage]


@lru_cache(maxsize=16)
def asked_by_all(table: Timetable, ahead: int) -> list[list[list[Message]]]:
    """The same of each stage."""
    rows = play(table)
    sent = sorted(((end, place, *given) for place, row in enumerate(rows) for action, _, end in row
                   for half in action.halves if (given := gives(table.placement, place, half)) and given[0] != place),
                  key=lambda one: one[:3])               # of a pair, whose two may have one taker, in the halves' order
    begins, asks = [[begin for _, begin, _ in row] for row in rows], [[[] for _ in row] for row in rows]
    for moment, _, taker, message in sent:
        asks[taker][max(bisect_left(begins[taker], moment) - ahead, 0)].append(message)
    return asks


def picture(name: str, stages: int, microbatches: int, chunks=1, shown=8) -> str:
    """The schedule as text, a column per unit of time; at most `shown` microbatches are drawn."""
    drawn = min(microbatches, shown)
    rows = play(timetable(name, stages, drawn, chunks))
    cost = bubble(play(timetable(name, stages, microbatches, chunks)))
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
