"""Places layers on stages, and simulates a schedule: when each stage runs each action and sends each message.

A model is cut into stages x chunks parts, its *virtual stages*. They are numbered in the order in which a microbatch
passes through them: first chunk 0 of all stages, then chunk 1, and so on. If folded, every second chunk is reversed:

    virtual stages of 3 stages, 2 chunks      stage 0   stage 1   stage 2
    chunk 0                                      0         1         2
    chunk 1                                      3         4         5
    chunk 1 if folded                            5         4         3

The placement says which message each action sends to which stage. In the simulation, actions have durations and
messages have delays, in any unit of time. An action starts when its stage has finished the previous one and its inputs
have arrived. The times give the bubble, a picture, and the moment at which pipeline.py must post each receive.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, count

from nanodomino.errors import counted
from nanodomino.schedules.definitions import SCHEDULES, Action, Forward, InputBackward, Schedule


# ---- which layers each stage holds, and what it sends

def stage_layers(num_layers: int, stage: int, stages: int, behind_head=0) -> range:
    """Return the indices of the layers that a stage holds. For example, 10 layers on 4 stages are split into 3, 3, 2
    and 2, so stage 1 holds layers 3, 4 and 5. behind_head: the number of further layers behind the head. The last stage
    holds them all, so it has fewer layers of the model, but at least one."""
    if behind_head and stages > 1:
        first = num_layers - max((num_layers + behind_head) // stages - behind_head, 1)         # the last stage's
        return stage_layers(first, stage, stages - 1) if stage < stages - 1 else range(first, num_layers)
    each, extra = divmod(num_layers, stages)
    first = stage * each + min(stage, extra)
    return range(first, first + each + (stage < extra))


@dataclass(frozen=True)
class Placement:
    stages: int
    chunks: int = 1
    folded: bool = False

    # the number of the last virtual stage, which computes the loss
    last = property(lambda self: self.stages * self.chunks - 1)

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of stages that exchange messages, for example [(0, 1), (1, 2)]."""
        route = [self.location(virtual_stage)[0] for virtual_stage in range(self.last + 1)]
        return sorted({(min(pair), max(pair)) for pair in zip(route, route[1:]) if pair[0] != pair[1]})

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the number of a stage's chunk in the order of the model."""
        return chunk * self.stages + (self.stages - 1 - stage if self.folded and chunk % 2 else stage)

    def location(self, virtual_stage: int) -> tuple[int, int] | None:
        """Return the (stage, chunk) of a virtual stage, or None if the number lies beyond either end of the model."""
        if not 0 <= virtual_stage <= self.last:
            return None
        chunk, index = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - index if self.folded and chunk % 2 else index), chunk

    def source(self, stage: int, action):
        """Return the (stage, chunk) that sends the input of an action of `stage`, or a Message to it; None if there is
        no sender, as at the model's ends and for weight gradients."""
        return self.location(self.virtual_stage(stage, action.chunk) - action.direction) if action.direction else None

    def target(self, stage: int, action: Action):
        """Return the (stage, chunk) that receives the action's output, or None if there is no receiver."""
        return self.location(self.virtual_stage(stage, action.chunk) + action.direction) if action.direction else None


def describe_stage(config, stage: int) -> str:
    """Return what a pipeline stage holds, chunk by chunk: 'embedding, layers 0 to 3; layers 8 to 11'."""
    placement, chunks, behind_head = config.placement, [], config.behind_head
    for virtual_stage in (placement.virtual_stage(stage, chunk) for chunk in range(placement.chunks)):
        layers = stage_layers(config.num_layers, virtual_stage, placement.last + 1, behind_head.layers)
        held = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        ends = ("head", behind_head.in_words) if virtual_stage == placement.last else ()
        chunks.append(", ".join(filter(None, ("embedding" * (virtual_stage == 0), held, *ends))))
    return "; ".join(chunks)


@dataclass(frozen=True)
class Message:
    """A microbatch's hidden states (direction 1) or their gradient (direction -1)."""
    microbatch: int
    chunk: int               # the receiving stage's chunk
    direction: int

    def __str__(self):
        return ("F" if self.direction == 1 else "B") + str(self.microbatch) + "'" * self.chunk


def message_received(half: Action) -> Message:
    """Return the message that an action receives. Call this only if source() is not None."""
    return Message(half.microbatch, half.chunk, half.direction)


def message_sent(placement: Placement, stage: int, half: Action) -> tuple[int, Message] | None:
    """Return (receiving stage, message) for an action's output, or None. In a V, the last stage sends to itself."""
    target = placement.target(stage, half)
    return target and (target[0], Message(half.microbatch, target[1], half.direction))


# ---- the timetable

@dataclass(frozen=True, eq=False)        # a key of caches in every step: comparing thousands of actions would take long
class Timetable:
    """The actions of all stages: rows[i] lists those of stage i in order."""
    placement: Placement
    rows: tuple[tuple, ...]

    @cached_property
    def forwards(self) -> "Timetable":
        """The timetable with only the forwards, for evaluation."""
        return Timetable(self.placement, tuple(
            tuple(half for action in row for half in action.halves if half.kind == "forward") for row in self.rows))

    @cached_property
    def dependencies(self) -> list[list[tuple]]:
        """The input of simulate(): a list of (action, needed, caused) for each stage. needed: the events for which the
        action waits. caused: (event, whether on another stage) for each event that it causes. An event is the end of a
        pass or the arrival of a message, as an integer, which is fast."""
        number, table = defaultdict(count().__next__), [[] for _ in self.rows]
        previous = {"backward": Forward, "input_backward": Forward, "weight_backward": InputBackward}
        for stage, row in enumerate(self.rows):
            for action in row:
                needed = [previous[half.kind](half.microbatch, half.chunk) for half in action.halves
                          if half.kind in previous]
                needed += [message_received(half) for half in action.halves if self.placement.source(stage, half)]
                sent = [target for half in action.halves if (target := message_sent(self.placement, stage, half))]
                table[stage].append((action, [number[stage, event] for event in needed],
                                     [(number[stage, half], False) for half in action.halves]
                                     + [(number[target], target[0] != stage) for target in sent]))
        return table


@lru_cache(maxsize=256)
def timetable(schedule: Schedule | str, stages: int, microbatches: int, chunks=1) -> Timetable:
    """Return the timetable of a schedule, which may be given by its name in SCHEDULES."""
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    return Timetable(Placement(stages, chunks, schedule.folded), tuple(
        tuple(schedule.actions(stage, stages, microbatches, chunks)) for stage in range(stages)))


# ---- the simulation

def simulate(table: Timetable, duration=lambda stage, action: action.length, message=0) -> list[list[tuple]]:
    """Return for each stage a list of (action, start, end). duration(stage, action): how long an action takes. message:
    the delay until its output arrives on another stage. Raises ValueError if stages wait for each other forever."""
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
            raise ValueError(f"a schedule must run to its end, but {', '.join(stuck)} are waiting for each other")
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


def peak_microbatches(actions) -> int:
    """Return the largest number of microbatches that a stage holds at the same time, counted in each chunk. A stage
    holds a microbatch from its forward to the end of its Backward or WeightBackward, which needs activations too."""
    change = {"forward": 1, "backward": -1, "weight_backward": -1}
    halves = (half for action in actions for half in reversed(action.halves))  # a pair holds both of its microbatches
    return max(accumulate(change.get(half.kind, 0) for half in halves), default=0)


@lru_cache(maxsize=16)
def receives_to_post(table: Timetable, actions_ahead=0) -> list[list[list[Message]]]:
    """Return, as result[stage][i], the messages whose receives a stage posts right before its action i: the first
    action that starts at or after the simulated time of the send, or `actions_ahead` actions earlier (pipeline.py)."""
    rows = simulate(table)
    sent = sorted(((end, sender, *target) for sender, row in enumerate(rows) for action, _, end in row
                   for half in action.halves if (target := message_sent(table.placement, sender, half))
                   and target[0] != sender), key=lambda message: message[:3])      # stable: a pair's B is sent first
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
