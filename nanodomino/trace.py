"""What a rank did, and when: a list of spans and moments.

Whoever works says so: `with trace.span("matmul", slice=0, site="layers.3.mlp"): ...`, `trace.moment("launch", ...)`.
The kinds are

    resume             a slice runs until it has put something on the wires; what follows lies within
    matmul             a matrix product on the way forward, or of an input gradient
    weight_gradient    the deferred products
    launch, wait       a collective is put on the wires; somebody needs its result
    forward, backward  a microbatch passes through this stage

A test can so prove that between a slice's launch and its wait another slice computed. `NO_TRACE` records nothing.
"""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field


@dataclass
class Event:
    """kind: see above; begin, end: nanoseconds of this process's clock; about: slice, site, microbatch, bytes, ..."""
    kind: str
    begin: int
    end: int
    about: dict


@dataclass
class Trace:
    """Events in the order in which they began."""
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def span(self, kind, **about):
        event = Event(kind, time.perf_counter_ns(), 0, about)
        self.events.append(event)
        yield
        event.end = time.perf_counter_ns()

    def moment(self, kind, **about):
        now = time.perf_counter_ns()
        self.events.append(Event(kind, now, now, about))


class NoTrace:
    """The same calls, doing nothing."""
    nothing = nullcontext()

    def span(self, kind, **about):
        return self.nothing

    def moment(self, kind, **about):
        pass


NO_TRACE = NoTrace()
