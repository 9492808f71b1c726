"""A model's choices by name: pure functions of tensors, which know no config, no mesh and no parameters.

A choice is one entry of a table here; the setting's values, its flag and its error sentences are the table's keys, and
model.py calls what the entry holds. Whoever schedules the work (domino.py, pipeline.py) never learns of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F


@dataclass(frozen=True)
class Normalization:
    """function(x [.., h], weight [h], bias [h] or None, epsilon) -> [.., h]; statistics: how many numbers of each token
    its backward keeps, beside x."""
    function: Callable
    has_bias: bool
    statistics: int


def layer_norm(x, weight, bias, epsilon):
    """(x - mean) / deviation * weight + bias, over the last dimension (1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


NORMALIZATIONS = {"LayerNorm": Normalization(layer_norm, has_bias=True, statistics=2)}
