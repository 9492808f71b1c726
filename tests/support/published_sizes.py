"""Configurations of published size and ideal machines, for estimates."""

from nanodomino.estimate.formulas import Machine
from nanodomino.settings.config import Config


def cluster(world_size, **changes) -> Config:
    """Return the resolved Config of a preset (default gpt3-13b) with GPT-3's vocabulary."""
    return Config(**{"model": "gpt3-13b", "vocab_size": 50257, "dtype": "bfloat16", **changes}).resolve(world_size)


def machine(**changes) -> Machine:
    """Return a machine that is infinitely fast except in the given rates."""
    fast = dict(matmul_rate=1e40, intra_host_rate=1e40, inter_host_rate=1e40, latency=0.0, ranks_per_host=8,
                memory_rate=1e40)
    return Machine(**fast | changes)
