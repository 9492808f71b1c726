"""A trace's times: the streams that record them on a GPU, what has not ended yet, and the clocks of several hosts."""

import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import torch

from nanodomino.comm.trace import Trace


def test_on_a_gpu_each_groups_collectives_end_in_a_stream_of_their_own(monkeypatch):
    """One stream per group; training's stream must not wait for communication that it overlaps."""
    entered, log, made = ["training's"], defaultdict(list), count()

    @contextmanager
    def enter(stream):
        entered.append(stream)
        yield
        entered.pop()

    def work(name):
        """Return a fake NCCL work: waiting for it makes the current stream wait."""
        wait = SimpleNamespace(wait=lambda: log[entered[-1]].append(f"wait for {name}"))
        return SimpleNamespace(wait=wait.wait, get_future=lambda: wait)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(made))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(
        record=lambda: log[entered[-1]].append("mark")))
    trace = Trace(torch.device("cuda", 0))
    for name in ("first", "second"):
        for group in ("tp", "dp", "world"):
            trace.watch("all_reduce", work(f"{name} of {group}"), group=group, bytes=8)
    assert log == {"training's": 6 * ["mark"], **{i: [f"wait for first of {group}", "mark",
                                                      f"wait for second of {group}", "mark"]
                                                  for i, group in enumerate(("tp", "dp", "world"))}}
    assert all(event.end for event in trace.events)


def test_what_has_not_ended_when_the_events_are_taken_ends_where_it_began():
    """gloo notes a collective's end in a thread of its own, which may run later than the wait."""
    trace, future = Trace(), torch.futures.Future()
    trace.watch("all_reduce", SimpleNamespace(get_future=lambda: future), group="tp", bytes=8)
    (event,) = trace.take()
    assert event.end == event.begin


def test_the_times_of_hosts_that_started_at_other_times_are_comparable(monkeypatch):
    """This host has been running 1000 s longer than its clock says. Its events are taken at the time of day."""
    right, trace = time.perf_counter_ns, Trace()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: right() + 1000 * 10**9)
    with trace.span("step", step=1):
        pass
    (event,) = trace.take()
    assert event.begin <= event.end and abs(event.end - time.time_ns()) < 300e9
