"""A rank whose device waits forever ends in time with a message, and no other rank does. The device is simulated."""

import threading
import time
from collections import deque
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from nanodomino.comm.world import LaunchInfo, collective_timeout
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.run import watchdog
from nanodomino.run.watchdog import Watchdog


class Group:
    """A group whose backend is its own name."""

    def __init__(self, backend):
        self.backend = backend

    def _get_backend(self, device):
        return SimpleNamespace(name=lambda: "nccl", group=self.backend)


def test_the_watchdog_asks_every_group_of_the_mesh_for_errors(monkeypatch):
    monkeypatch.setattr(watchdog.dist, "group", SimpleNamespace(WORLD=Group("world")))
    names = [field.name for field in fields(Mesh) if field.name.endswith("_group")]
    mesh = replace(meta_mesh(1, 1, 1), **{name: Group(name) for name in names})
    asked = Watchdog(LaunchInfo(), mesh, 1.0).nccl_backends
    assert [backend.group for backend in asked] == ["world", *names] and {"ep_group", "tp_group"} < {*names}


class Event:
    """An event that the device reaches at a given time."""

    def __init__(self, moment):
        self.moment = moment

    def query(self):
        return time.monotonic() >= self.moment


class Device:
    """A queue that is busy until a given time; marks[i] is when it reaches the i-th recorded event."""

    def __init__(self, busy_until, marks=()):
        self.busy_until, self.moments = busy_until, deque(marks)

    def query(self):
        return time.monotonic() >= self.busy_until

    def record_event(self):
        return Event(self.moments.popleft())


@pytest.fixture
def watched(monkeypatch):
    """watched(timeout, device, seconds, ...) -> [(seconds, error)] of the exits that a real Watchdog asks for."""
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(watchdog.dist, "group", SimpleNamespace(WORLD=None))

    def watched(timeout, device, seconds=3.0, backends=(), signals=None):
        ends, begin = [], time.monotonic()
        guard = Watchdog(LaunchInfo(), meta_mesh(1, 1, 1), timeout)
        guard.queue, guard.nccl_backends = device or guard.queue, backends
        guard.context = dict(step=7, signals=signals)

        def fail(place, error):
            ends.append((time.monotonic() - begin, error))
            guard.finished.set()                                      # the real one does not come back

        monkeypatch.setattr(watchdog, "report_and_exit", fail)
        with guard:
            for _ in range(len(device.moments) if device else 3):
                guard.mark(1, 2)
            guard.thread.join(seconds)
        guard.thread.join()
        return ends

    return watched


NEVER = float("inf")


def test_a_device_without_progress_ends_its_rank_at_the_timeout(watched):
    (seconds, error), = watched(0.4, Device(NEVER))
    assert 0.4 < seconds < 1.5 and isinstance(error, RuntimeError) and error.step == 7
    assert str(error) == "timed out waiting for the device, which has made no progress for 0 seconds"


def test_a_long_step_makes_progress_event_by_event(watched):
    """The host has enqueued the whole step at once. The timeout counts from the last event that was reached."""
    begin = time.monotonic()
    (seconds, _), = watched(0.5, Device(NEVER, [begin + 0.3 * number for number in range(1, 6)]))
    assert 2.0 <= seconds < 3.0, "the last mark is at 1.5"


def test_a_device_that_waits_for_its_own_host_is_not_ended(watched):
    """The host may be reading, compiling or saving. On a CPU there is no device to wait for."""
    assert watched(0.3, Device(0.0), seconds=1.0) == []
    assert watched(0.3, None, seconds=1.0) == []
    (seconds, _), = watched(0.3, Device(NEVER), signals=SimpleNamespace(number=0, received_at=0.0))
    assert seconds < 1.3, "or this could not fail"


def test_after_a_stop_signal_the_timeout_is_short(watched, monkeypatch):
    """torchrun signals the other ranks when one has died. A step that still makes progress may finish."""
    monkeypatch.setattr(watchdog, "STOP_GRACE", 0.4)
    begin = time.monotonic()
    told = SimpleNamespace(number=15, received_at=begin + 0.2)
    (seconds, error), = watched(600, Device(NEVER), signals=told)
    assert 0.6 <= seconds < 1.6 and error.signals is told, "from the signal on"
    begin = time.monotonic()
    told = SimpleNamespace(number=15, received_at=begin)
    assert watched(600, Device(begin + 1.0, [begin + 0.2 * number for number in range(1, 6)]), seconds=1.2,
                   signals=told) == []


def test_the_thread_queries_its_own_gpu(monkeypatch):
    """A thread starts on GPU 0, where each rank's query would take hundreds of MB for a CUDA context."""
    calls = []
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(watchdog.dist, "group", SimpleNamespace(WORLD=None))
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: calls.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "current_stream",
                        lambda device: SimpleNamespace(query=lambda: calls.append("query") or True))
    mesh = replace(meta_mesh(1, 1, 1), device=torch.device("cuda", 3))
    with Watchdog(LaunchInfo(), mesh, 600) as guard:
        guard.thread.join(0.2)
    guard.thread.join()
    assert calls[0] == ("watchdog", mesh.device) and set(calls[1:]) == {"query"}


def test_an_error_reported_by_nccl_ends_the_rank_at_once(watched):
    sound, broken = (SimpleNamespace(get_error=lambda name=name: SimpleNamespace(name=name))
                     for name in ("SUCCESS", "COMM_ERROR"))
    assert watched(600, Device(NEVER), seconds=0.5, backends=[sound]) == []
    (seconds, error), = watched(600, Device(NEVER), backends=[sound, broken])
    assert seconds < 1.0 and "NCCL reports COMM_ERROR" in str(error)


def test_nccls_own_timeout_comes_after_ours():
    """It aborts the process without a message."""
    assert collective_timeout(600, torch.device("cuda", 0)).total_seconds() >= 630
    assert collective_timeout(600, torch.device("cpu")).total_seconds() == 600
