"""The fixtures of every test: one pool of workers for the whole session, and real processes that start in no time.

With pytest-xdist each worker process of pytest has both of its own.
"""

import pytest
import torch

from support.fork_server import ForkServer
from support.pool import Pool

torch.set_num_threads(1)        # here and in the workers: small tensors, and more processes than cores


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true",
                     help="run the long crossings too, of which the others are a sample")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Without paths and without -n, let pytest-xdist, if it is installed, run the whole suite in three processes.

    Most tests wait for sockets and time-outs, so two cores can serve three. `-n 0` keeps everything in one process.
    """
    options = config.option
    is_worker = hasattr(config, "workerinput")
    if (not is_worker and config.args_source is config.ArgsSource.TESTPATHS and getattr(options, "numprocesses", 0) is None
            and options.capture != "no" and not options.usepdb):
        options.numprocesses, options.dist = 3, "worksteal"


def pytest_collection_modifyitems(config, items):
    """Without --exhaustive, or an -m that asks for them, the tests that are marked so are left out."""
    if not config.getoption("--exhaustive") and "exhaustive" not in config.getoption("-m"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def pool():
    """`pool.run(function, *args, world_size=8, timeout=120)`: see support/pool.py. Tests without it start no
    process."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def fork_server():
    """`fork_server.launch(command, ranks, folder, limit)`: see support/fork_server.py."""
    server = ForkServer()
    yield server
    server.close()
