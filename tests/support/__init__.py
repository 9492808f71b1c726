"""What the tests are built from. No file here is a test, except the pool's own.

    harness              tiny models, fixed data, train_step on every rank; joins the shards of all ranks
    reference            the plain model in torch.nn, which imports nothing from nanodomino
    pool                 eight processes that live as long as the test session, for tests that need ranks
    fork_server          real processes without the seconds that `import torch` takes
    runs                 a tiny training: in the pool, under the fork server or torchrun; what it leaves
    pitfall_runner       trains with a bug, or with late collectives, and compares with the right numbers
    fake_world           one rank alone: collectives that move no data, for tests that look at operations
    fake_cuda            a dry run of a training step on a GPU: what it asks of the GPU, and when the host waits
    checkpoints          layouts and damaged checkpoints
    huggingface          a small model of every family, and ways to change its files
    benchmark            runs bench.py
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def needs(module: str):
    """Return a module of requirements-extra.txt. Skip the test, with its reason, if the module is not installed."""
    return pytest.importorskip(module, reason=f"needs {module.split('.')[0]}: pip install -r requirements-extra.txt")
