"""What every test finds ready: the repository root on the import path, one pool of workers for the whole session, and
real processes that start in no time. shares.py divides the files of tests among processes, each with its own of these."""

import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)        # here and in the workers: small tensors, and more processes than cores
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `pytest` alone puts only tests/ there

from forks import Forks  # noqa: E402
from pool import Pool  # noqa: E402

pytest_plugins = ["shares"]


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run the long crossings too, of which the others are a sample")


def pytest_collection_modifyitems(config, items):
    """Without --exhaustive, or an -m that asks for them, the tests that are marked so are left out."""
    if not config.getoption("--exhaustive") and "exhaustive" not in config.getoption("-m"):
        config.hook.pytest_deselected(items=[one for one in items if one.get_closest_marker("exhaustive")])
        items[:] = [one for one in items if not one.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def pool():
    """`pool.run(function, *args, world_size=8, timeout=120)`: see pool.py. Tests that don't use it start no process."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def forks():
    """`forks.launch(command, ranks, folder, limit)`: see forks.py."""
    server = Forks()
    yield server
    server.close()
