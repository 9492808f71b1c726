"""What every test finds ready: the repository root on the import path, and one pool of workers for the whole session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `pytest` alone puts only tests/ there

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """`pool.run(function, *args, world_size=8, timeout=120)`: see pool.py. Tests that don't use it start no process."""
    workers = Pool()
    yield workers
    workers.close()
