"""Models of published size on imaginary machines, for the formulas of nanodomino/analysis."""

from nanodomino.analysis.step_time import Machine
from nanodomino.config.config import Config


def cluster(world_size, **changes) -> Config:
    """A Config of the presets' sizes, with GPT-3's vocabulary."""
    return Config(**{"model": "gpt3-13b", "vocab_size": 50257, "dtype": "bfloat16", **changes}).resolve(world_size)


def machine(**changes) -> Machine:
    """Infinitely fast, except for what is given."""
    return Machine(**{**dict(products=1e40, near=1e40, far=1e40, latency=0.0, per_host=8, memory=1e40), **changes})
