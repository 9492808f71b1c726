"""Configurations of published size and ideal machines, for the formulas of nanodomino/analysis."""

from nanodomino.analysis.step_time import Machine
from nanodomino.config.config import Config


def cluster(world_size, **changes) -> Config:
    """Return the resolved Config of a preset (default gpt3-13b) with GPT-3's vocabulary."""
    return Config(**{"model": "gpt3-13b", "vocab_size": 50257, "dtype": "bfloat16", **changes}).resolve(world_size)


def machine(**changes) -> Machine:
    """Return a machine that is infinitely fast except in the given rates."""
    return Machine(**{**dict(products=1e40, near=1e40, far=1e40, latency=0.0, per_host=8, memory=1e40), **changes})
