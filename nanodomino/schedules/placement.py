from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from nanodomino.schedules.actions import Action, Forward, InputBackward
from nanodomino.schedules.definitions import SCHEDULES


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
        route = [self.location(virtual_stage)[0] for virtual_stage in range(self.last + 1)]
        return sorted({(min(pair), max(pair)) for pair in zip(route, route[1:]) if pair[0] != pair[1]})

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + (self.stages - 1 - stage if self.folded and chunk % 2 else stage)

    def location(self, virtual_stage: int) -> tuple[int, int] | None:
        """(stage, chunk); None beyond the ends."""
        if not 0 <= virtual_stage <= self.last:
            return None
        chunk, place = divmod(virtual_stage, self.stages)
        return (self.stages - 1 - place if self.folded and chunk % 2 else place), chunk

    def source(self, stage: int, half):
        """(stage, chunk) whose output is the input of an action, or of a message's taker; None at the ends, and where
        there is none."""
        return self.location(self.virtual_stage(stage, half.chunk) - half.direction) if half.direction else None

    def target(self, stage: int, half):
        """(stage, chunk) that takes this action's output; None as above."""
        return self.location(self.virtual_stage(stage, half.chunk) + half.direction) if half.direction else None


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
    def dependencies(self) -> list[list[tuple]]:
        """For each stage's actions: (the action, what it needs, what there is at its end, and a message's time later).
        Numbers stand for messages and for what is done, as a plan plays thousands of actions again and again."""
        number, placement = defaultdict(count().__next__), self.placement
        dependencies = [[] for _ in self.rows]
        for stage, row in enumerate(self.rows):
            for action in row:
                given = [one for half in action.halves if (one := message_sent(placement, stage, half))]
                dependencies[stage].append((
                    action,
                    [number[stage, one] for half in action.halves for one in prerequisites(placement, stage, half)],
                    [number[stage, half] for half in action.halves] + [number[one] for one in given if one[0] == stage],
                    [number[one] for one in given if one[0] != stage]))
        return dependencies


@lru_cache(maxsize=256)
def timetable(name: str, stages: int, microbatches: int, chunks=1) -> Timetable:
    schedule = SCHEDULES[name]
    return Timetable(Placement(stages, chunks, schedule.folded), tuple(
        tuple(schedule.actions(stage, stages, microbatches, chunks)) for stage in range(stages)))


def prerequisites(placement: Placement, stage: int, half: Action) -> list:
    """A message, and what the stage itself must have done before."""
    before = {"forward": (), "weight_backward": (InputBackward,)}.get(half.kind, (Forward,))
    message = [message_received(half)] if placement.source(stage, half) else []
    return [kind(half.microbatch, half.chunk) for kind in before] + message


def message_received(half: Action) -> Message:
    """The message that an action takes, where it has a source."""
    return Message(half.microbatch, half.chunk, half.direction)


def message_sent(placement: Placement, stage: int, half: Action) -> tuple[int, Message] | None:
    """(stage, message) that an action's output is."""
    target = placement.target(stage, half)
    return target and (target[0], Message(half.microbatch, target[1], half.direction))
