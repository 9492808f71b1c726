"""What a rank did, and when: a list of spans, of moments, and of what travelled meanwhile.

Whoever works says so, whoever puts something on the wires says that too:

    with trace.span("matmul", slice=0, site="layers.3.mlp"): ...     from here to there, on this rank's own time
    trace.moment("send", message="F2", peer=1, bytes=4096)           an instant
    trace.watch("all_reduce", work, group="tp", bytes=4096)          from the launch until the wires are done

The kinds of spans are

    step                one optimizer step, the whole of it
    forward, backward   a microbatch passes through a chunk of this stage; two of them as a pair: a span for each turn
    input_backward      the same, if weight gradients are left for later: what the stage before waits for
    weight_backward     and what was left
    resume              within: a slice runs until it has put something on the wires
    matmul              within: a matrix product on the way forward, or of an input gradient
    weight_gradient     within: the deferred products
    wait                somebody needs what is on the wires, or will be, and has nothing else to do
    optimizer           the last sum, norm, clipping, the update of this rank's part

the kinds of moments `send` and `receive` (a message between stages leaves, has been received), and the kinds of what is
watched `all_reduce`, `reduce_scatter` and `all_gather`.

On the CPU the time is the clock's. On CUDA, where calls return before the work is done, a mark is an event in the
stream that is current there, and becomes a time when all is over; a collective's last mark is set in a stream beside
training's, one for each group, where nothing else is and so nothing delays it. The clocks of several hosts differ:
`clock_offset` measures by how much, in the way of the network time protocol, from the quickest of a few round trips to
rank 0.

With `recording` off, each call costs a comparison. timeline.py draws what was recorded.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

ROUND_TRIPS = 20


@dataclass(slots=True)
class Event:
    """kind: see above; begin, end: nanoseconds of this process's clock (end 0: never; a list, until take(), of what is
    watched: its end will be in it); args: slice, site, microbatch, bytes, ..."""
    kind: str
    begin: int
    end: int | list
    args: dict


class Span:
    """Ends an event. By hand, since @contextmanager takes as long as all the rest of a span."""
    __slots__ = ("trace", "event")

    def __init__(self, trace, event):
        self.trace, self.event = trace, event

    def __enter__(self):
        pass

    def __exit__(self, *error):
        self.event.end = self.trace.mark()


class Trace:
    """Events in the order in which they began, as long as `recording` is true."""
    nothing = nullcontext()

    def __init__(self, device=torch.device("cpu"), recording=True):
        self.device, self.recording = device, recording
        self.events: list[Event] = []
        self.beside = {}                             # group -> the stream in which its collectives' ends are marked

    def mark(self):
        """Now: nanoseconds, or on CUDA an event in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, kind, **args):
        """A context manager: from here to its end."""
        if not self.recording:
            return self.nothing
        event = Event(kind, self.mark(), 0, args)
        self.events.append(event)
        return Span(self, event)

    def moment(self, kind, **args):
        if self.recording:
            now = self.mark()
            self.events.append(Event(kind, now, now, args))

    def watch(self, kind, work, **args):
        """A collective that has just been launched: from now until `work` is done, whoever waits for it or not."""
        if self.recording:
            end = []
            self.events.append(Event(kind, self.mark(), end, args))
            if self.device.type == "cuda":
                self.mark_beside(args["group"], work, end)
            else:
                work.get_future().add_done_callback(self.time_to(end))

    def mark_beside(self, group: str, work, end: list):
        """Append an event that comes when `work` is done, without a wait of training's stream. A callback of the future
        would run in a stream of torch's pool, which may be the one of a message that waits for its sender. Of work and
        future the future is waited for: it leaves the work's hold on its tensors to whoever waits for the work."""
        if group not in self.beside:
            self.beside[group] = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.beside[group]):
            work.get_future().wait()
            end.append(self.mark())

    def time_to(self, end: list):
        """A callback that appends the time to `end`. gloo calls it in a thread of its own, where a Python function
        would cost some 60 microseconds, since a stack is mapped for it first. So all of this is C: next() makes map()
        pass the next tick of an endless clock to append()."""
        return partial(next, map(end.append, iter(time.perf_counter_ns, None)))

    def take(self, offset=0) -> list[Event]:
        """All events so far, with times in nanoseconds of rank 0's clock, which is `offset` ahead of ours; forgets
        them."""
        events, self.events = self.events, []
        if self.device.type == "cuda":               # all marks count back from now: the further, the coarser
            self.now = self.mark()
            torch.cuda.synchronize(self.device)
            self.now_time = time.perf_counter_ns()
        for event in events:
            if isinstance(event.end, list):
                event.end = event.end[0] if event.end else 0
        return [Event(event.kind, self.time_of(event.begin) + offset, self.time_of(event.end or event.begin) + offset,
                      event.args) for event in events]

    def time_of(self, mark) -> int:
        return mark if self.device.type != "cuda" else self.now_time - int(mark.elapsed_time(self.now) * 1e6)


NO_TRACE = Trace(recording=False)


def clock_offset() -> int:
    """Nanoseconds by which rank 0's clock is ahead of this process's. All ranks call it together; on one host it is
    close to 0. Wrong by at most half of the quickest round trip."""
    rank, offset = dist.get_rank(), 0
    clock = torch.zeros(1, dtype=torch.int64)
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            for _ in range(ROUND_TRIPS):
                dist.recv(clock, other)
                clock[0] = time.perf_counter_ns()
                dist.send(clock, other)
        elif rank == other:
            trips = []
            for _ in range(ROUND_TRIPS):
                asked = time.perf_counter_ns()
                dist.send(clock, 0)
                dist.recv(clock, 0)
                answered = time.perf_counter_ns()
                trips.append((answered - asked, int(clock) - (asked + answered) // 2))
            offset = min(trips)[1]
    return offset
