"""What every test finds ready: the repository root on the import path, one pool of workers for the whole session, and
real processes for each file that asks for them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `pytest` alone puts only tests/ there

from forks import Forks  # noqa: E402
from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """`pool.run(function, *args, world_size=8, timeout=120)`: see pool.py. Tests that don't use it start no process."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def forks():
    """`forks.launch(command, ranks, folder, limit)`: see forks.py."""
    server = Forks()
    yield server
    server.close()
