"""The tests in several processes side by side: most of them wait for sockets, time-outs and sleeps, so one core is idle.

    pytest, after it has collected          its forks
    file 1 --->  tests, shown               file 2  --->  tests, their reports into a file
    file 4 --->  tests, shown               file 3  --->  tests, their reports into a file
    shows what the forks have reported, and goes on so until the last one has ended

The queue is a pipe with the number of each file of tests in it, a byte each: whoever is free reads the next one. A file stays
in one process, so what its tests share is made once; the pool of workers is made once in each process. `--processes 1`
leaves everything to pytest itself, as do -s and --pdb, since only one process can have the screen. Warnings in a fork are
not shown. pytest-xdist does all this and far more, and would be a sixth package.
"""

import gc
import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback

import pytest
from _pytest.runner import runtestprotocol


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=min(4, 1 + (os.cpu_count() or 1)),
                     help="go through the files of tests in so many processes side by side (default: a core each, at most 4)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """In the place of pytest's own loop, which runs where this one returns None."""
    options = session.config.option
    files = [list(tests) for _, tests in itertools.groupby(session.items, key=lambda test: test.path)]
    count = min(options.processes, len(files))
    if count <= 1 or len(files) > 256 or options.collectonly or options.capture == "no" or options.usepdb or session.testsfailed:
        return None
    session.config._tmp_path_factory.getbasetemp()      # one for all, made before they part
    gc.freeze()                                         # what is here by now stays, in memory that they share
    queue, numbers = os.pipe()
    os.write(numbers, bytes(range(len(files))))
    os.close(numbers)
    forks = [Fork(session, files, queue) for _ in range(count - 1)]
    try:
        for test, following in with_next(taken(files, queue)):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            show(session, forks)
        while not all([fork.ended() for fork in forks]):
            show(session, forks)
            time.sleep(0.05)
        show(session, forks)
    except BaseException:
        for fork in forks:
            fork.interrupt()
        raise
    return True


def taken(files, queue):
    """The tests of the files that this process gets from the queue."""
    while number := os.read(queue, 1):
        yield from files[number[0]]


def with_next(tests):
    """Each with its successor, or None: the end of a test leaves in place what the next one needs as well."""
    before, after = itertools.tee(tests)
    next(after, None)
    return itertools.zip_longest(before, after)


def show(session, forks):
    """Passes on what the forks have reported since the last time, and stops everything where -x asks for that."""
    for fork in forks:
        for report in fork.news():
            session.config.hook.pytest_runtest_logreport(report=report)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class Fork:
    """A process that takes files of tests from the queue. It writes a line for each test that begins, and each report."""

    def __init__(self, session, files, queue):
        self.session, self.at, self.code = session, "its first test", None
        descriptor, path = tempfile.mkstemp(prefix="reports-")
        self.reports, self.line = open(path), ""
        os.unlink(path)
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                with open(descriptor, "w", buffering=1) as reports:
                    self.run(files, queue, reports)
                code = 0
            except KeyboardInterrupt:
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(descriptor)

    def run(self, files, queue, reports):
        """In the fork."""
        config = self.session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()                 # its files are the other process's too
        capture.start_global_capturing()
        try:
            for test, following in with_next(taken(files, queue)):
                reports.write(pickle.dumps(test.nodeid).hex() + "\n")
                for report in runtestprotocol(test, log=False, nextitem=following):
                    content = config.hook.pytest_report_to_serializable(config=config, report=report)
                    reports.write(pickle.dumps(content).hex() + "\n")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self.session._setupstate.teardown_exact(None)
            capture.stop_global_capturing()

    def news(self):
        """The reports that have been written since the last time."""
        while piece := self.reports.readline():
            self.line += piece
            if not self.line.endswith("\n"):            # the rest of it is still on its way
                return
            content, self.line = pickle.loads(bytes.fromhex(self.line)), ""
            if isinstance(content, str):
                self.at = content
            else:
                config = self.session.config
                yield config.hook.pytest_report_from_serializable(config=config, data=content)

    def ended(self):
        """Whether the process is through. One that failed ends the tests: it has left some out."""
        if self.code is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if process else None
            if self.code:
                raise self.session.Interrupted(f"a process of the tests ended with exit code {self.code} at {self.at}")
        return self.code is not None

    def interrupt(self):
        if self.code is None:
            os.kill(self.process, signal.SIGINT)
            os.waitpid(self.process, 0)
