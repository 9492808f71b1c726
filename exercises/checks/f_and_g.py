"""Exercise 2: f and g as autograd functions."""

import torch

from ..fake_ranks import on_ranks
from ..judge import expect
from ..stages import draw

HINTS = (
    "Read the picture above. ctx keeps what backward needs, such as the group.",
    "Each backward returns a gradient for every argument of its forward. The group has none: return None.",
    "all_reduce works in place, but neither forward nor backward may change its argument: autograd uses it elsewhere.")
F_BACKWARD = "dist.all_reduce(gradient := gradient.clone(), group=ctx.group)"
G_FORWARD = "dist.all_reduce(total := addend.clone(), group=group)"
G_BACKWARD = '''        return total
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None'''
MISTAKES = {
    "f and g are exchanged: f copies h forward and sums the outgoing gradient backward; g sums the addends forward and "
    "passes the incoming gradient on.": (
        "return h.view_as(h)", "dist.all_reduce(h := h.clone(), group=group); return h", F_BACKWARD, "pass",
        G_FORWARD, "total = addend.clone(); ctx.group = group", G_BACKWARD, G_BACKWARD.replace(
            "return gradient,", "dist.all_reduce(gradient := gradient.clone(), group=ctx.group); return gradient,")),
    "The output of f is 2 x too large: every rank has the same h already, so f's forward must not sum.":
        ("return h.view_as(h)", "dist.all_reduce(h := h.clone(), group=group); return h"),
    "The gradient of h is only this rank's own part: every rank computes a part of h's gradient, so f's backward "
    "must all-reduce it.": (F_BACKWARD, "pass"),
    "The gradient of h is summed over all ranks of the world: pass the group to all_reduce.":
        (F_BACKWARD, "dist.all_reduce(gradient := gradient.clone())"),
    "The output of g is this rank's addend alone: g's forward must all-reduce it.":
        (G_FORWARD, "total = addend.clone()"),
    "The output of g is summed over all ranks of the world: pass the group to all_reduce.":
        (G_FORWARD, "dist.all_reduce(total := addend.clone())"),
    "The gradient of the row-parallel weight is 2 x too large: g's backward must not sum again, since d sum / d addend "
    "= 1.": (G_BACKWARD, G_BACKWARD.replace("return gradient,", "return 2 * gradient,")),
}


def apply(function, name, x, group):
    y = function.apply(x, group)
    expect(isinstance(y, torch.Tensor), f"{name}'s forward returns {y} where it must return a tensor. dist.all_reduce "
           "itself returns None, because it changes its argument in place.")
    return y


@on_ranks(4)
def program(minimal):
    """Run f and g on two groups of two ranks. g sums the products of x and a row-parallel weight."""
    rank = minimal.dist.get_rank()
    group = minimal.dist.new_group([0, 1] if rank < 2 else [2, 3])
    leaf = draw(None, f"h {group}", (2, 3)).requires_grad_()
    h = leaf * 1.0
    found = {"The output of f": apply(minimal.CopyToRanks, "f", h, group)}
    gradient = draw(None, f"gradient {rank}", (2, 3))
    found["The output of f"].backward(gradient)
    expect(torch.equal(h, leaf), "f's forward changes h in place: clone it before all_reduce.")
    expect(torch.equal(gradient, draw(None, f"gradient {rank}", (2, 3))),
           "f's backward changes the gradient that it gets in place: clone it before all_reduce.")
    found["The gradient of h, the input of f,"] = leaf.grad

    x, weight = draw(None, f"x {rank}", (2, 4)), draw(None, f"weight {rank}", (4, 3)).requires_grad_()
    addend = x @ weight
    before = addend.detach().clone()
    found["The output of g"] = apply(minimal.SumOverRanks, "g", addend, group)
    expect(torch.equal(addend, before), "g's forward changes its addend in place: clone it before all_reduce.")
    found["The output of g"].backward(draw(None, f"gradient {group}", (2, 3)))
    found["The gradient of the row-parallel weight, used before g,"] = weight.grad
    expect(all(value is not None for value in found.values()),
           "A backward returns None for its tensor: it must return the tensor's gradient first, then None for the "
           "group.")
    return found
