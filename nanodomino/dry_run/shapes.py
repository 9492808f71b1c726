"""Runs an operation on meta tensors quickly.

torch's shape functions are written in Python and take 0.2 ms. A training step repeats the same operations on the same
shapes, so each is called once for each combination of shapes, and then remembered.
"""

from functools import lru_cache

import torch

REMEMBERED = {}              # (operation, shapes and other arguments) -> (type, shapes) of the results


def flatten(tree):
    """Yield the tensors in nested tuples and lists."""
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (tuple, list)):
            yield from flatten(leaf)


def signature(value):
    """Return what the shape of a result can depend on, as a hashable value. The type belongs to it, since 1 == 1.0."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(signature, value)) if isinstance(value, (tuple, list)) else (type(value), value)


@lru_cache(maxsize=None)
def written_result(function) -> str | int | None:
    """Return the name and the index of the argument that an operation writes to and returns, as (name, index)."""
    schema = function._schema
    for index, argument in enumerate(schema.arguments):
        if (argument.alias_info and schema.returns and schema.returns[0].alias_info
                and argument.alias_info.before_set == schema.returns[0].alias_info.before_set):
            return argument.name, index
    return None


def result_of(function, args, kwargs):
    """Return function(*args, **kwargs)."""
    if function.namespace == "prim" or not any(one.is_meta for one in flatten((args, [*kwargs.values()]))):
        return function(*args, **kwargs)
    schema = function._schema
    if schema.is_mutable:                                      # meta tensors have no numbers that could change
        written = written_result(function)
        return None if written is None else kwargs.get(written[0]) if written[0] in kwargs else args[written[1]]
    if any(one.alias_info for one in schema.returns):          # a view
        return function(*args, **kwargs)
    try:
        key = function, signature(args), tuple((name, signature(value)) for name, value in kwargs.items())
        known = REMEMBERED.get(key)
    except TypeError:                                          # an argument that is not hashable
        return function(*args, **kwargs)
    if known is None:
        result = function(*args, **kwargs)
        leaves = [result] if isinstance(result, torch.Tensor) else result
        before = {one.untyped_storage()._cdata for one in flatten(args)}
        if (isinstance(leaves, (tuple, list)) and all(isinstance(one, (torch.Tensor, int, type(None))) for one in leaves)
                and not any(one.untyped_storage()._cdata in before for one in flatten(leaves))):
            REMEMBERED[key] = type(result), [signature(one) if isinstance(one, torch.Tensor) else one for one in leaves]
        return result
    kind, leaves = known
    made = [torch.empty_strided(one[0], one[1], dtype=one[2], device=one[3]) if isinstance(one, tuple) else one
            for one in leaves]
    return made[0] if kind is torch.Tensor else kind(made)
