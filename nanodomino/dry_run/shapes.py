"""Runs operations on meta tensors quickly.

torch's shape functions are written in Python and take 0.2 ms. A training step repeats the same operations on the same
shapes, so each is called once for each combination of shapes, and then remembered.
"""

from functools import cache

import torch

REMEMBERED = {}              # (operation, shapes and other arguments) -> (type, leaves of the result)


def flatten(tree):
    """Yield the tensors in nested tuples and lists."""
    for leaf in tree:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, (tuple, list)):
            yield from flatten(leaf)


def storage(tensor) -> int:
    """Return a number that identifies the tensor's storage as long as that storage exists."""
    return tensor.untyped_storage()._cdata


def signature(value):
    """Return what the shape of a result can depend on, as a hashable value. The type belongs to it, since 1 == 1.0."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(signature, value)) if isinstance(value, (tuple, list)) else (type(value), value)


@cache
def arguments_of(function) -> tuple[list[str], list[str], list[str]]:
    """Return the names of an operation's arguments, of those that it writes to, and of those that it does not read."""
    arguments = function._schema.arguments
    return tuple([one.name for one in arguments if test(one)] for test in (
        lambda one: True, lambda one: one.alias_info is not None and one.alias_info.is_write, lambda one: one.is_out))


@cache
def is_view(function) -> bool:
    """Return whether the operation only returns views of its arguments."""
    schema = function._schema
    return not schema.is_mutable and len(schema.returns) > 0 and all(one.alias_info for one in schema.returns)


def result_of(function, args, kwargs, tensors):
    """Return function(*args, **kwargs). tensors: all tensors among its arguments."""
    if function.namespace == "prim" or not any(one.is_meta for one in tensors):
        return function(*args, **kwargs)
    schema, (names, written, _) = function._schema, arguments_of(function)
    if written:                                                # meta tensors have no numbers that could change
        results = [(dict(zip(names, args)) | kwargs)[name] for name in written[:len(schema.returns)]]
        return tuple(results) if len(results) > 1 else results[0] if results else None
    try:
        key = function, signature(args), signature([*kwargs.items()])
        kind, leaves = REMEMBERED[key]
    except (KeyError, TypeError):                              # not remembered, or an argument is not hashable
        result = function(*args, **kwargs)
        leaves = [result] if isinstance(result, torch.Tensor) else result
        if (not any(one.alias_info for one in schema.returns) and isinstance(leaves, (tuple, list))
                and all(isinstance(one, (torch.Tensor, int, type(None))) for one in leaves)
                and not {*map(storage, flatten(leaves))} & {*map(storage, tensors)}):      # or it is a view
            REMEMBERED[key] = type(result), [signature(one) if isinstance(one, torch.Tensor) else one for one in leaves]
        return result
    made = [torch.empty_strided(one[0], one[1], dtype=one[2], device=one[3]) if isinstance(one, tuple) else one
            for one in leaves]
    return made[0] if kind is torch.Tensor else kind(made)
