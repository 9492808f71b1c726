"""Exercise 10: the gradient norm that counts every parameter once."""

import torch

from ..fake_ranks import on_ranks
from ..judge import expect
from ..stages import fill_gradients, make_model

FACTS = """
loss is this rank's: its replica's loss on each tp rank of the last stage, 0 on other stages.
gradient [n/dp] is the part that this replica owns. Return two floats.
"""
HINTS = (
    "model.counts [n] is 1 for each number that this rank shall count, 0 for copies; cut it like the gradient.",
    "Is the norm of the whole the sum of the parts' norms?",
    "One all-reduce over all ranks is enough for both sums. Which ranks have the same loss?")
SUM = "(gradient.square() * own).sum()"
REDUCE = "    dist.all_reduce(sums)\n    return"
MISTAKES = {
    "The norm counts copies: norms and b2 once per tp rank, and the word embedding on both of its stages; multiply by "
    "model.counts.": (SUM, "gradient.square().sum()"),
    "The norm is a sum of the ranks' norms: sum the squares first, then take the square root.":
        (REDUCE, "    sums[1] = sums[1].sqrt(); dist.all_reduce(sums); sums[1] = sums[1].square()\n    return"),
    "The norm is not a root: take the square root of the sum of squares.":
        ("sums[1].sqrt().item()", "sums[1].item()"),
    "The loss is 2 x too large: every tp rank has the same loss, so only tp rank 0 may count it.":
        ("loss * (model.grid.tp_rank == 0)", "loss"),
} | {
    f"The {name} is {scope}: sum {what} over all ranks, or the ranks would disagree.": (
        REDUCE, f"    alone = sums[{i}].clone(); {call}; dist.all_reduce(sums); sums[{i}] = alone\n    return")
    for i, name, what in ((0, "loss", "the losses"), (1, "norm", "the squares"))
    for scope, call in {"only this rank's own": "pass",
                        "summed over the tp ranks only": "dist.all_reduce(alone, group=model.grid.tp_group)",
                        "summed over the replicas only": "dist.all_reduce(alone, group=model.grid.dp_group)"}.items()
}


@on_ranks(8)
def program(minimal):
    """Call global_sums once on eight ranks."""
    model = make_model(minimal, tp=2, pp=2, dp=2)
    grid = model.grid
    fill_gradients(minimal, model)
    minimal.dist.all_reduce(model.weights[minimal.WORDS].grad, group=grid.tied_group)      # so both stages have the sum
    own = torch.empty_like(model.grad.chunk(2)[0])
    minimal.dist.reduce_scatter(own, list(model.grad.chunk(2)), group=grid.dp_group)
    result = minimal.global_sums(model, torch.tensor(3.0 + grid.dp_rank) * grid.is_last, own)
    expect(isinstance(result, tuple) and len(result) == 2, "global_sums must return (loss, norm).")
    return {"The loss": torch.as_tensor(result[0]).double(), "The norm": torch.as_tensor(result[1]).double()}
