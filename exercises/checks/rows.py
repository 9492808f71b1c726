"""Exercise 12: f and g of sequence parallelism, an all-gather and a reduce-scatter."""

import torch

from ..fake_ranks import on_ranks
from ..judge import expect
from ..stages import draw

FACTS = """
torch has dist.all_gather(list of tensors, tensor, group=group) and dist.reduce_scatter(tensor,
list of tensors, group=group); dist.get_world_size(group) is t.
"""
HINTS = ("After f, each rank uses all rows for its own features. So all ranks' gradients of a row are addends.",
         "Which of the two collectives is the backward of which? torch.cat joins rows, tensor.chunk(t) cuts them.")
F_BACKWARD = "own, list(parts), group=ctx.group)\n        return own, None"
G, G_BACKWARD = "dist.reduce_scatter(sums, list(parts), group=group)", "return torch.cat(parts), None"
MISTAKES = {
    "f's backward cuts out this rank's rows without a sum: all ranks' gradients of a row are addends, so sum them, "
    "with reduce-scatter.": ("dist.reduce_scatter(" + F_BACKWARD, "return parts[dist.get_rank(ctx.group)], None"),
    "f's rows come in the wrong order: rank 0 of the group has the first rows.":
        ("return torch.cat(parts)\n", "return torch.cat(parts[::-1])\n"),
    "g's forward cuts out this rank's rows without a sum: each rank has only an addend of every row.":
        (G, "sums.copy_(parts[dist.get_rank(group)])"),
    "g's backward sums: a sum passes its gradient to each addend unchanged, so only gather the rows.":
        (G_BACKWARD, "return torch.cat(parts) * len(parts), None"),
}


@on_ranks(4)
def program(minimal):
    """Run f and g on two groups of two ranks."""
    rank, found = minimal.dist.get_rank(), {}
    group = minimal.dist.new_group([0, 1] if rank < 2 else [2, 3])
    for name, function, rows in (("f", minimal.GatherRows, 3), ("g", minimal.ScatterSum, 6)):
        leaf = draw(None, f"{name} {rank}", (rows, 2)).requires_grad_()
        output = found[f"The output of {name}"] = function.apply(leaf * 1.0, group)
        expect(isinstance(output, torch.Tensor) and output.shape == (9 - rows, 2),
               f"{name} must turn {rows} rows into {9 - rows} here, not {getattr(output, 'shape', output)}.")
        output.backward(draw(None, f"gradient {name} {rank}", (9 - rows, 2)))
        found[f"The gradient that {name}'s backward returns"] = leaf.grad
    return found
