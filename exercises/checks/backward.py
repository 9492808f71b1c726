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
    "The gradient of W1 is missing: defer (w1, c.grad, h).": (REDUCE, REDUCE.replace(", (w1, c.grad, h)", "")),
    "The gradient of W2 is missing: defer (w2, gradient, a).": (REDUCE, REDUCE.replace("(w2, gradient, a), ", "")),
} | {
    f"The gradient of {bias} {what}": (f"{bias}.grad += {total}", patch.format(f"{bias}.grad", total))
    for bias, total in (("b1", "c.grad.sum((0, 1))"), ("b2", "gradient.sum((0, 1))")) for what, patch in (
        ("holds only the last slice: add to it (+=), because slices and microbatches share it.", "{}.copy_({})"),
        ("is missing: it is the gradient of its output, c or y, summed over all tokens.", "pass"))}


@torch.no_grad()
def backward(minimal, sites, slices):
    """Run forward; return (model, slices, generators that run the slices' backward)."""
    model, answer = make_model(minimal, tp=2), minimal.backward_sublayer
    minimal.backward_sublayer = lambda *arguments: expect_generator(answer(*arguments), "backward_sublayer")
    model.sites, model.grid.is_first, model.grid.is_last = sites, False, False       # a stage in the middle
    parts = [SimpleNamespace(tape=[], x=draw(None, f"x {i}", (2, 3, model.sizes.hidden))) for i in range(slices)]
    for part in parts:
        run_to_end(minimal.forward_slice(model, part), "forward")
    return model, parts, [minimal.backward_slice(model, part, draw(None, f"gradient {i}", (2, 3, 8)))
                          for i, part in enumerate(parts)]


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
            found[f"The gradient that slice {i} of {what} returns"] = part.gradient
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
    for slices, matmuls, advice in (
            (1, 2, "one slice only {}: launch grad_h's all-reduce before the matmuls of W1's and W2's gradients, for "
                   "which no other rank waits, and wait() after them."),
            (2, 3, "two slices only {}: yield between the launch and wait(), so that the other slice computes.")):
        share = hidden_share(answer, slices, matmuls)
        expect(share >= 0.8, "The gradients are right, but with " + advice.format(
            f"{share:.0%} of the all-reduce time is hidden where 80 % is required"))
