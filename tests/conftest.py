"""The fixtures that all tests share: a pool of ranks, and real processes that start in milliseconds.

Under pytest-xdist each of its worker processes has a pool and a fork server of its own, started at first use.
"""

import pytest
import torch

from support.fork_server import ForkServer
from support.pool import Pool

torch.set_num_threads(1)        # tensors are small, and there are more processes than cores


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true",
                     help="run the long crossings too; the other tests sample them")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in three processes if pytest-xdist is installed; paths, -n, -s or --pdb switch that off.

    Many tests wait for sockets and time-outs, so three processes keep two cores busy. With "worksteal" the tests of a
    file mostly stay in one process, and a process that has run its share takes tests from the others.
    """
    options = config.option
    whole_suite = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if (whole_suite and getattr(options, "numprocesses", 0) is None
            and options.capture != "no" and not options.usepdb):
        options.numprocesses, options.dist = 3, "worksteal"


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked exhaustive, unless --exhaustive or -m asks for them."""
    if not config.getoption("--exhaustive") and "exhaustive" not in config.getoption("-m"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def pool():
    """`pool.run(function, *args, world_size=8, timeout=120)` calls a function on every rank: see support/pool.py."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def fork_server():
    """`fork_server.launch(command, ranks, folder, limit)` runs real processes: see support/fork_server.py."""
    server = ForkServer()
    yield server
    server.close()
