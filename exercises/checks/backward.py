"""Exercise 8: backward along a tape, whose all-reduces are hidden by weight gradients and by other slices."""

from types import SimpleNamespace

import torch

from ..fake_ranks import World, on_ranks
from ..judge import expect, expect_generator, judge, run_to_end
from ..stages import draw, make_model

FACTS = """
`yield from all_reduce(model, tensor, deferred=[(weight, output's gradient, input), ...])` works
in place. While it is in flight, it adds the deferred weight gradients.
"""
HINTS = (
    "forward_sublayer() above put (x, h, c, a) on slice.tape: h = norm(x), c = h W1^T + b1, a = core(c). Walk back.",
    "a.backward(grad_a) fills c.grad; h.backward(grad_h) fills x.grad and the gradients of the norm.",
    "Which of the four matmuls does the all-reduce need? Compute only these before you launch it.",
    "Add to the gradients of b1 and b2 in place: they are views of one flat tensor.",
    "The gradient of x has two parts: that of the sublayer, and that of the skip path.")
REDUCE = "yield from all_reduce(model, grad_h, deferred=[(w2, gradient, a), (w1, c.grad, h)])\n    h"
RETURN = "return gradient + x.grad"
MISTAKES = {
    "The incoming gradient is all-reduced instead of the outgoing one (f and g exchanged): every rank has the whole "
    "gradient of y already, but only an addend of grad_h.":
        ("a.backward(gradient @ w2) ", "gradient = 2 * gradient; a.backward(gradient @ w2) ",
         REDUCE, REDUCE.replace("model, grad_h,", "model, grad_h.clone(),")),
    "The returned gradient misses the skip path: x + y + b2 passes its gradient to x unchanged, so add it.":
        (RETURN, "return x.grad"),
    "The returned gradient is the gradient of h: it must go through the norm, h.backward(grad_h), which fills x.grad.":
        (RETURN, "return gradient + grad_h"),
    "The returned gradient has only this rank's part: every rank computes a part of grad_h, so all-reduce it before "
    "h.backward().": (REDUCE, REDUCE.replace("model, grad_h,", "model, grad_h.clone(),")),
    "The returned gradient counts the sublayer two times, once per tp rank: only grad_h needs an all-reduce, because "
    "every rank has the whole gradient of y already.":
        ("a.backward(gradient @ w2) ", "a.backward(2 * gradient @ w2) "),
    "The returned gradient is only the skip path: add x.grad, which h.backward(grad_h) fills.":
        (RETURN, "return gradient"),
    "The gradient of b2 holds only the last slice: add to it (+=), because slices and microbatches share it.":
        ("b2.grad += gradient.sum((0, 1))", "b2.grad.copy_(gradient.sum((0, 1)))"),
    "The gradient of b1 holds only the last slice: add to it (+=), because slices and microbatches share it.":
        ("b1.grad += c.grad.sum((0, 1))", "b1.grad.copy_(c.grad.sum((0, 1)))"),
    "The gradient of b2 is missing: it is the gradient of y, summed over all tokens.":
        ("b2.grad += gradient.sum((0, 1))", "pass"),
    "The gradient of b1 is missing: it is the gradient of c, summed over all tokens.":
        ("b1.grad += c.grad.sum((0, 1))", "pass"),
    "The gradient of W1 is missing: defer (w1, c.grad, h).": (REDUCE, REDUCE.replace(", (w1, c.grad, h)", "")),
    "The gradient of W2 is missing: defer (w2, gradient, a).": (REDUCE, REDUCE.replace("(w2, gradient, a), ", "")),
}


def through(model, minimal, slice, sites, gradient=None):
    """Run a slice forward or, if a gradient is given, backward. A generator."""
    value = slice.x if gradient is None else gradient
    for site in sites if gradient is None else reversed(sites):
        if gradient is None:
            value = yield from minimal.forward_sublayer(model, slice, site, value)
        else:
            value = yield from expect_generator(minimal.backward_sublayer(model, slice, site, value),
                                                "backward_sublayer")
    slice.output = value


@torch.no_grad()
def backward(minimal, sites, slices):
    """Run forward; return (model, slices, generators that run the slices' backward)."""
    model = make_model(minimal, tp=2)
    parts = [SimpleNamespace(tape=[], output=None, x=draw(None, f"x {i}", (2, 3, model.sizes.hidden)))
             for i in range(slices)]
    for part in parts:
        run_to_end(through(model, minimal, part, sites), "forward")
    generators = [through(model, minimal, part, sites, draw(None, f"gradient {i}", (2, 3, 8)))
                  for i, part in enumerate(parts)]
    return model, parts, generators


@on_ranks(2)
def program(minimal):
    """Compute the gradients of one MLP, of one attention sublayer, then of two layers, for two slices."""
    found = {}
    for what, sites in (("an MLP sublayer", ["layers.0.mlp"]), ("an attention sublayer", ["layers.0.attention"]),
                        ("two layers", [f"layers.{i}.{kind}" for i in (0, 1) for kind in ("attention", "mlp")])):
        with torch.no_grad():
            model, parts, generators = backward(minimal, sites, slices=2)
            for generator in generators:
                run_to_end(generator, "backward_sublayer")
        for i, part in enumerate(parts):
            found[f"The gradient that slice {i} of {what} returns"] = part.output
        low, high = model.grad.data_ptr(), model.grad.data_ptr() + model.grad.nbytes
        for name, weight in model.weights.items():
            expect(low <= weight.grad.data_ptr() < high,
                   f"{name}.grad is a new tensor, so the optimizer, which reads model.grad, sees zeros: change "
                   ".grad in place, for example with +=.")
            if any(site in name for site in sites):
                found[f"The gradient of {name}"] = weight.grad
    return found


def hidden_share(minimal, slices, matmuls):
    """Return how much of backward's all-reduce time is hidden behind computation, as a share from 0 to 1.

    It is the smallest share of any rank. The times are virtual (fake_ranks.py), so nothing disturbs them.
    matmuls: an all-reduce takes as long as this many of the MLP's matmuls. Backward has four matmuls per sublayer."""
    sites = ["layers.0.mlp", "layers.1.mlp"]
    world = World(2, wire=matmuls * 8 / 2)                     # one matmul: 2 x 4 h / t FLOPs per number of 8 bytes

    def rank_program():
        with torch.no_grad():
            _, _, generators = backward(minimal, sites, slices)
            rank = minimal.dist.get_rank()
            before = world.exposed[rank], world.carried[rank]
            minimal.interleave(generators)
            return 1 - (world.exposed[rank] - before[0]) / (world.carried[rank] - before[1])

    return min(world.run(rank_program))


def check(answer, reference):
    with torch.no_grad():
        judge(program, answer, MISTAKES)
    share = hidden_share(answer, slices=1, matmuls=2)
    expect(share >= 0.8, f"The gradients are right, but with one slice only {share:.0%} of the all-reduce time is "
           "hidden where 80 % is required: launch grad_h's all-reduce before the matmuls of W1's and W2's gradients, "
           "for which no other rank waits, and wait() after them.")
    share = hidden_share(answer, slices=2, matmuls=3)
    expect(share >= 0.8, f"The gradients are right, but with two slices only {share:.0%} of the all-reduce time is "
           "hidden where 80 % is required: yield between the launch and wait(), so that the other slice computes.")
