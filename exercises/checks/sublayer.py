"""Exercise 4: a column-parallel and a row-parallel matrix with a core between them, equal to one process."""

import torch

from ..fake_ranks import World
from ..judge import judge
from ..stages import draw, make_model, shard

HINTS = (
    'matrices() returns W1, b1, W2, b2, and norm(model, f"{site}.norm", x) normalizes. core() works on [b, s, n/t].',
    "CopyToRanks is f, SumOverRanks is g. Where does the picture have them?",
    "norm, b1, b2 and x: which of them are the same on all ranks, and so belong outside of f and g?")
F = 'h = CopyToRanks.apply(norm(model, f"{site}.norm", x), model.grid.tp_group)'
G = "return x + SumOverRanks.apply(addend, model.grid.tp_group) + b2"
MISTAKES = {
    "f and g are exchanged: f stands before W1, because its backward sums the gradient that leaves W1; g stands after "
    "W2, whose outputs are addends.": (F, F.replace("CopyToRanks", "SumOverRanks"),
                                       G, G.replace("SumOverRanks", "CopyToRanks")),
    "The output contains b2 two times, once per tp rank: add b2 after g, whose sum would count it on every rank.":
        (G, "return x + SumOverRanks.apply(addend + b2, model.grid.tp_group)"),
    "The output contains x two times, once per tp rank: add x after g, whose sum would count it on every rank.":
        (G, "return SumOverRanks.apply(addend + x, model.grid.tp_group) + b2"),
    "The output misses x: a sublayer returns x + sublayer(x).":
        (G, "return SumOverRanks.apply(addend, model.grid.tp_group) + b2"),
    "The output misses b1, the bias of W1.":
        ("addend = F.linear(core(model, site, F.linear(h, w1, b1)), w2)",
         "addend = F.linear(core(model, site, F.linear(h, w1)), w2)"),
    "The output contains only this rank's addend: g must sum the addends over the tp ranks.":
        (G, "return x + addend + b2"),
    "The output misses the norm: W1 multiplies norm(x), not x.":
        (F, "h = CopyToRanks.apply(x, model.grid.tp_group)"),
    "The output adds the sublayer to norm(x): the residual stream is x itself, which no norm touches.":
        (G, 'return norm(model, f"{site}.norm", x) + SumOverRanks.apply(addend, model.grid.tp_group) + b2'),
    "The gradient of x has only this rank's part of the sublayer's gradient: pass norm(x) through f, whose backward "
    "sums the ranks' parts before they reach the norm.": (F, 'h = norm(model, f"{site}.norm", x)'),
    "The gradient of x counts the skip path two times: f must surround only the sublayer, not x itself.":
        (F, 'x = CopyToRanks.apply(x, model.grid.tp_group); h = norm(model, f"{site}.norm", x)'),
}


def program(minimal, tp=2):
    """Run an MLP and an attention sublayer on tp ranks. Return outputs and gradients for two ranks, in shards."""
    def rank_program():
        model, found = make_model(minimal, tp), {}
        for kind, site in (("MLP", "layers.0.mlp"), ("attention", "layers.0.attention")):
            x = draw(None, "x", (2, 3, 8)).requires_grad_()
            y = found[f"The output of the {kind} sublayer"] = minimal.plain_sublayer(model, site, x)
            if isinstance(y, torch.Tensor):
                y.backward(draw(None, "gradient", (2, 3, 8)))
            found[f"The gradient of x, behind the {kind} sublayer,"] = x.grad
            found |= {f"The gradient of {name}": weight.grad for name, weight in model.weights.items() if site in name}
        return found

    return World(tp).run(rank_program)


def check(answer, reference):
    """Judge by what one process computes with the whole matrices, with gradients cut into the two ranks' shards."""
    def cut():
        model = make_model(reference, tp=2)
        return {name: shard(reference, model, name.removeprefix("The gradient of "), value)
                for name, value in whole.items()}

    whole, = program(reference, tp=1)
    judge(program, answer, MISTAKES, right=World(2).run(cut))
