"""Which layers each stage holds, and which messages a schedule's actions send to which stage.

A model is cut into stages x chunks runs of layers, its *virtual stages*. A microbatch passes through them in order.
Stages take turns in holding them, round by round; if the placement is folded, every second round runs backwards:

    3 stages, 2 chunks      stage 0   stage 1   stage 2
    chunk 0                    0         1         2
    chunk 1                    3         4         5         folded:   5   4   3
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from nanodomino.schedules.actions import Action, Forward, InputBackward
from nanodomino.schedules.definitions import SCHEDULES


@dataclass(frozen=True)
class Placement:
    stages: int
    chunks: int = 1
    folded: bool = False

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.stages * self.chunks - 1

    @property
    def neighbours(self) -> list[tuple[int, int]]:
        """The pairs of stages that exchange messages."""
        route = [self.location(virtual_stage)[0] for virtual_stage in range(self.last + 1)]
        return sorted({(min(pair), max(pair)) for pair in zip(route, route[1:]) if pair[0] != pair[1]})

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + (self.stages - 1 - stage if self.folded and chunk % 2 else stage)

    def location(self, virtual_stage: int) -> tuple[int, int] | None:
        """Return (stage, chunk), or None beyond either end of the model."""
        if not 0 <= virtual_stage <= self.last:
            return None
        chunk, index = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - index if self.folded and chunk % 2 else index), chunk

    def source(self, stage: int, half):
        """Return the (stage, chunk) that sends an action's input, or a message to `stage`; None at the model's ends
        and for weight gradients, which need no message."""
        return self.location(self.virtual_stage(stage, half.chunk) - half.direction) if half.direction else None

    def target(self, stage: int, half):
        """Return the (stage, chunk) that receives an action's output; None as in source()."""
        return self.location(self.virtual_stage(stage, half.chunk) + half.direction) if half.direction else None


@dataclass(frozen=True)
class Message:
    """A microbatch's hidden states (direction 1) or their gradient (-1), sent to a chunk of the receiving stage."""
    microbatch: int
    chunk: int
    direction: int

    def __str__(self):
        return ("F" if self.direction == 1 else "B") + str(self.microbatch) + "'" * self.chunk


@dataclass(frozen=True)
class Timetable:
    """The actions of all stages, a row for each."""
    placement: Placement
    rows: tuple[tuple, ...]

    def __hash__(self):
        """Hash only the lengths of the rows. The table is a cache key in every step, and hashing its thousands of
        actions each time would be slow."""
        return hash((self.placement, *map(len, self.rows)))

    @cached_property
    def forwards(self) -> "Timetable":
        """The forwards alone, for evaluation."""
        return Timetable(self.placement, tuple(
            tuple(half for action in row for half in action.halves if half.kind == "forward") for row in self.rows))

    @cached_property
    def dependencies(self) -> list[list[tuple]]:
        """Return for each stage a list of (action, events that it waits for, [(event that it causes, whether that event
        happens on another stage)]). An event is the end of a forward or backward, or the arrival of a message. Events
        are integers, which keeps the simulation of thousands of actions fast."""
        number, table = defaultdict(count().__next__), [[] for _ in self.rows]
        for stage, row in enumerate(self.rows):
            for action in row:
                needed = [event for half in action.halves for event in prerequisites(self.placement, stage, half)]
                sent = [target for half in action.halves if (target := message_sent(self.placement, stage, half))]
                table[stage].append((
                    action,
                    [number[stage, event] for event in needed],
                    [(number[stage, half], False) for half in action.halves]
                    + [(number[target], target[0] != stage) for target in sent]))
        return table


@lru_cache(maxsize=256)
def timetable(name: str, stages: int, microbatches: int, chunks=1) -> Timetable:
    schedule = SCHEDULES[name]
    return Timetable(Placement(stages, chunks, schedule.folded), tuple(
        tuple(schedule.actions(stage, stages, microbatches, chunks)) for stage in range(stages)))


def prerequisites(placement: Placement, stage: int, half: Action) -> list:
    """Return what an action waits for: an earlier action of its own stage, a message, both, or nothing."""
    earlier = {"forward": (), "weight_backward": (InputBackward,)}.get(half.kind, (Forward,))
    message = [message_received(half)] if placement.source(stage, half) else []
    return [action(half.microbatch, half.chunk) for action in earlier] + message


def message_received(half: Action) -> Message:
    """Return the message that an action receives if it has a source."""
    return Message(half.microbatch, half.chunk, half.direction)


def message_sent(placement: Placement, stage: int, half: Action) -> tuple[int, Message] | None:
    """Return (receiving stage, message) of an action's output, or None if it has no target."""
    target = placement.target(stage, half)
    return target and (target[0], Message(half.microbatch, target[1], half.direction))
