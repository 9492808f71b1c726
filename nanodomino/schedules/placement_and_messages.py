"""Says which layers each stage holds, and which message each action sends to which stage.

A model is cut into stages x chunks parts, its *virtual stages*, numbered in the order in which a microbatch passes
through them. Chunk 0 of all stages comes first, then chunk 1, and so on. If the placement is folded, every second chunk
is placed in the reverse order of stages:

    virtual stages of 3 stages, 2 chunks      stage 0   stage 1   stage 2
    chunk 0                                      0         1         2
    chunk 1                                      3         4         5
    chunk 1 if folded                            5         4         3
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from nanodomino.schedules.definitions import SCHEDULES, Action, Forward, InputBackward, Schedule


def stage_layers(num_layers: int, stage: int, stages: int, behind_head=0) -> range:
    """Return the indices of the layers that a stage holds. If the layers cannot be split equally, each of the
    first stages holds one layer more.

    For example, 10 layers on 4 stages are split into 3, 3, 2 and 2, so stage 1 holds layers 3, 4 and 5.
    behind_head: the number of further layers behind the head. The last stage holds them all, so it has fewer layers of
        the model, but at least one.
    """
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

    @property
    def last(self) -> int:
        """The number of the last virtual stage, which computes the loss."""
        return self.stages * self.chunks - 1

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
        """Return the (stage, chunk) that sends the input of an action of `stage`, or None if there is no sender, as at
        the model's ends and for weight gradients. `action` may also be a Message that `stage` receives."""
        return self.location(self.virtual_stage(stage, action.chunk) - action.direction) if action.direction else None

    def target(self, stage: int, action: Action):
        """Return the (stage, chunk) that receives the action's output, or None if there is no receiver."""
        return self.location(self.virtual_stage(stage, action.chunk) + action.direction) if action.direction else None


@dataclass(frozen=True)
class Message:
    """A microbatch's hidden states (direction 1) or their gradient (direction -1)."""
    microbatch: int
    chunk: int               # the receiving stage's chunk
    direction: int

    def __str__(self):
        return ("F" if self.direction == 1 else "B") + str(self.microbatch) + "'" * self.chunk


@dataclass(frozen=True)
class Timetable:
    """The actions of all stages: rows[i] lists those of stage i in order."""
    placement: Placement
    rows: tuple[tuple, ...]

    def __hash__(self):
        """Hash only the lengths of the rows. The table is a cache key in every step, and hashing its thousands of
        actions each time would be slow."""
        return hash((self.placement, *map(len, self.rows)))

    @cached_property
    def forwards(self) -> "Timetable":
        """The timetable with only the forwards, for evaluation."""
        return Timetable(self.placement, tuple(
            tuple(half for action in row for half in action.halves if half.kind == "forward") for row in self.rows))

    @cached_property
    def dependencies(self) -> list[list[tuple]]:
        """The input of simulate(): a list of (action, needed, caused) for each stage.

        needed: the events for which the action waits.
        caused: (event, elsewhere) for each event that the action causes; elsewhere: True if on another stage.
        An event is the end of a pass or the arrival of a message. It is represented by an integer, which keeps the
        simulation of thousands of actions fast.
        """
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
def timetable(schedule: Schedule | str, stages: int, microbatches: int, chunks=1) -> Timetable:
    """Return the timetable of a schedule, which may be given by its name in SCHEDULES."""
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    return Timetable(Placement(stages, chunks, schedule.folded), tuple(
        tuple(schedule.actions(stage, stages, microbatches, chunks)) for stage in range(stages)))


def prerequisites(placement: Placement, stage: int, half: Action) -> list:
    """Return what an action waits for: earlier actions of its stage, and the message that it receives."""
    earlier = {"forward": (), "weight_backward": (InputBackward,)}.get(half.kind, (Forward,))
    message = [message_received(half)] if placement.source(stage, half) else []
    return [action(half.microbatch, half.chunk) for action in earlier] + message


def message_received(half: Action) -> Message:
    """Return the message that an action receives. Call this only if source() is not None."""
    return Message(half.microbatch, half.chunk, half.direction)


def message_sent(placement: Placement, stage: int, half: Action) -> tuple[int, Message] | None:
    """Return (receiving stage, message) for an action's output, or None if no stage receives it. The receiver may be
    the same stage, for example between the two chunks of the last stage in a V."""
    target = placement.target(stage, half)
    return target and (target[0], Message(half.microbatch, target[1], half.direction))
