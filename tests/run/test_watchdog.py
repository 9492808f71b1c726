"""A rank whose GPU waits forever ends in time with a message, and no other rank does. GPU and clock are simulated."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanodomino.comm.world import LaunchInfo, collective_timeout
from nanodomino.mesh import meta_mesh
from nanodomino.run import watchdog
from nanodomino.run.failures import POLL_INTERVAL, STOP_GRACE, Watchdog

NEVER = float("inf")


@pytest.fixture
def hang(monkeypatch):
    """hang(timeout, ...) -> (second, message) of the first hang that a Watchdog finds within 1000 s, else (None, "").
    The queue is busy until `busy_until`; the device reaches the recorded events at the seconds `marks`."""
    def hang(timeout, busy_until=NEVER, marks=(), signals=None):
        clock = [0.0]
        reached = lambda moment: SimpleNamespace(query=lambda: clock[0] >= moment)  # noqa: E731
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        guard = Watchdog(LaunchInfo(), meta_mesh(1, 1, 1), timeout)
        marks = list(marks)
        guard.queue, guard.context = reached(busy_until), dict(signals=signals)
        guard.queue.record_event = lambda: reached(marks.pop(0))
        for number in range(len(marks)):
            guard.mark(number, 2)
        while clock[0] < 1000:
            if text := guard.find_hang():
                return clock[0], text
            clock[0] += POLL_INTERVAL
        return None, ""

    return hang


def test_a_device_without_progress_ends_its_rank_at_the_timeout(hang):
    """The host may have enqueued a long step at once. The timeout counts from the last event that was reached. A device
    with an empty queue waits for its own host, which may be reading, compiling or saving."""
    not_yet = SimpleNamespace(number=0, received_at=0.0)
    assert hang(60, signals=not_yet) == (
        60.5, "timed out waiting for the device, which has made no progress for 60 seconds")
    assert hang(60, marks=[50, 100, 150, 200])[0] == 260.5
    assert hang(60, busy_until=0.0)[0] is None


def test_after_a_stop_signal_the_timeout_is_short(hang):
    """torchrun signals the other ranks when one has died. A step that still makes progress may finish."""
    assert hang(600, signals=SimpleNamespace(number=15, received_at=7.0))[0] == 7.0 + STOP_GRACE + POLL_INTERVAL
    signals = SimpleNamespace(number=15, received_at=0.0)
    assert hang(600, busy_until=70, marks=[15, 30, 45, 60], signals=signals)[0] is None


def test_the_thread_queries_its_own_gpu_and_ends_the_rank(monkeypatch):
    """A thread starts on GPU 0, where each rank's query would take hundreds of MB for a CUDA context."""
    calls, queue = [], SimpleNamespace(query=lambda: calls.append("query"))
    monkeypatch.setattr(watchdog, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(torch.cuda, "set_device",
                        lambda device: calls.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    mesh = replace(meta_mesh(1, 1, 1), device=torch.device("cuda", 3))
    with Watchdog(LaunchInfo(), mesh, 0.0) as guard:
        guard.context.update(step=7)
        monkeypatch.setattr(watchdog, "report_and_exit", lambda launch, error: (calls.append(error.step),
                                                                                guard.finished.set()))
        guard.thread.join()
    assert calls == [("watchdog", mesh.device), "query", 7]
    with Watchdog(LaunchInfo(), meta_mesh(1, 1, 1), 0.0) as guard:
        guard.mark()
        assert not guard.thread.is_alive(), "a CPU has no queue"


def test_nccls_own_timeout_comes_after_ours():
    """It aborts the process without a message."""
    assert collective_timeout(600, torch.device("cuda", 0)).total_seconds() >= 630
    assert collective_timeout(600, torch.device("cpu")).total_seconds() == 600
