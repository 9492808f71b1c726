"""The fixtures that all tests share: a pool of ranks, and a server that starts real processes in milliseconds.

Under pytest-xdist, each test process has its own pool and its own fork server. Both start at first use.
"""

import gc
import os
from contextlib import suppress

import pytest
import torch

pytest.register_assert_rewrite("support")       # before it is imported, so that its assertions print their numbers

from support.fork_server import ForkServer      # noqa: E402
from support.pool import Pool                   # noqa: E402

gc.disable()                    # until all tests are collected: what is imported stays
torch.set_num_threads(1)        # more threads would only compete: there are more processes than cores
with suppress(OSError, AttributeError):         # as in tune_host(); the ranks of the pool inherit it
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser):
    parser.addoption("--on-device", choices=("cpu", "cuda"), default="cpu",
                     help="cuda: each rank trains on a GPU of its own; for the tests that bench.py gpu runs")
    parser.addoption("--exhaustive", action="store_true",
                     help="also run the long tests, which combine options that the other tests cover one by one")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in three processes if pytest-xdist is installed. Paths, -n, -s or --pdb switch this off.

    Three processes keep two cores busy, because many tests wait for sockets and time-outs. With "worksteal" most tests
    of a file run in the same process, and a process without tests left takes some from another process.
    """
    options = config.option
    whole_suite = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if (whole_suite and getattr(options, "numprocesses", 0) is None
            and options.capture != "no" and not options.usepdb):
        options.numprocesses, options.dist = 3, "worksteal"


def pytest_configure(config):
    config.exhaustive = config.getoption("--exhaustive") or "exhaustive" in config.getoption("-m")
    if config.getoption("--on-device") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""     # the tests expect a CPU; torch reads it at its first call


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked exhaustive, unless --exhaustive or -m asks for them. Tests marked table run first."""
    if not config.exhaustive:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("table") is None)


def pytest_collection_finish():
    """Let the garbage collector skip all modules and tests: going through them takes a tenth of the tests' time."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(request):
    """The pool: `pool.run(function, *args, world_size=8, timeout=300)` calls a function on every rank (see Pool)."""
    workers = Pool(device=request.config.getoption("--on-device"))
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def fork_server(request):
    """The server: `fork_server.launch(command, ranks, folder, limit)` runs real processes (see ForkServer)."""
    server = ForkServer(request.config.getoption("--on-device"))
    yield server
    server.close()
