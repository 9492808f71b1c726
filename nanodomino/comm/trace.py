"""Records what a rank does, and when: spans, moments, and collectives in flight.

The code that does the work reports it:

    with trace.span("matmul", slice=0, site="layers.3.mlp"): ...     from here to the end of the block
    trace.moment("send", message="F2", peer=1, bytes=4096)           an instant
    trace.watch("all_reduce", work, group="tp", bytes=4096)          from its launch until it is done

The kinds of spans:

    step                one optimizer step
    forward, backward   a microbatch passes through a chunk of this stage; in a pair, each turn is a span
    input_backward      the part of backward that the previous stage waits for, in schedules that split backward
    weight_backward     the other part of backward: the weight gradients
    resume              inside one of these passes: a slice runs until it yields
    matmul              inside one of these passes: a matmul of the forward, or of an input gradient
    weight_gradient     inside one of these passes: the matmuls of weight gradients
    wait                the rank waits for a collective or a message and has nothing to compute
    optimizer           adding up received gradients, gradient norm, clipping, update of this rank's partition

The kinds of moments are `send` and `receive` of a message between stages.

On the CPU, times are read from the clock. On CUDA, calls return before the work is done. So there a CUDA event is
recorded in the current stream, and take() turns it into a time later. The ends of a group's collectives are recorded in
a separate stream, where nothing can delay them. With `recording` off, each call costs one comparison.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Event:
    """A span, which is its own context manager, a moment or a watched collective."""
    kind: str
    begin: int                       # nanoseconds since 1970; until take(), a result of mark()
    end: int                         # the same, or 0 before the end
    args: dict                       # slice, site, microbatch, bytes
    mark: Callable | None = None     # the Trace's, for the end of a span

    def __enter__(self):
        pass

    def __exit__(self, *error):
        self.end = self.mark()


class Trace:
    """Collects events while `recording` is true. Events are in the order in which they began."""
    nothing = nullcontext()

    def __init__(self, device=torch.device("cpu"), recording=True):
        self.device, self.recording = device, recording
        self.events: list[Event] = []
        self.streams = {}                            # group -> the CUDA stream that records the ends of its collectives

    def mark(self):
        """Return the time in nanoseconds or, on CUDA, an event in the current stream."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, kind, **args):
        """Return a context manager that records how long its block takes."""
        if not self.recording:
            return self.nothing
        self.events.append(Event(kind, self.mark(), 0, args, self.mark))
        return self.events[-1]

    def moment(self, kind, **args):
        if self.recording:
            now = self.mark()
            self.events.append(Event(kind, now, now, args))

    def watch(self, kind, work, **args):
        """Record how long a collective is in flight, from now until `work` is done, even if wait() is called later."""
        if self.recording:
            event = Event(kind, self.mark(), 0, args)
            self.events.append(event)
            if self.device.type == "cuda":
                self.record_end(event, work)
            else:
                work.get_future().add_done_callback(lambda _: setattr(event, "end", self.mark()))

    def record_end(self, event: Event, work):
        """Let a CUDA event fire when `work` is done. The group's own stream waits for that, not the training stream.
        With a single hardware queue every stream would wait with it, so device.find_device refuses to trace then. In a
        callback, a message might be waiting for its sender. work.wait() would release its tensors early."""
        group = event.args["group"]
        if group not in self.streams:
            self.streams[group] = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.streams[group]):
            work.get_future().wait()
            event.end = self.mark()

    def take(self) -> list[Event]:
        """Return all events recorded so far and forget them. Their times are nanoseconds since 1970."""
        events, self.events = self.events, []
        offset = max(time.time_ns() - time.perf_counter_ns() for _ in range(20))     # the least delay is the most exact
        if self.device.type == "cuda":               # times are counted back from now; a short way back is more precise
            self.now = self.mark()
            torch.cuda.synchronize(self.device)
            self.now_time = time.perf_counter_ns()
        return [Event(event.kind, self.time_of(event.begin) + offset, self.time_of(event.end or event.begin) + offset,
                      event.args) for event in events]

    def time_of(self, mark) -> int:
        return mark if self.device.type != "cuda" else self.now_time - int(mark.elapsed_time(self.now) * 1e6)


NO_TRACE = Trace(recording=False)
