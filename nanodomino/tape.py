"""Pieces of the forward that autograd differentiates, each on its own, when we say so.

Plain autograd keeps one graph of everything and runs it backward in its own order. Domino needs another order, with the
wires between the pieces, so each piece is a graph of its own, cut off at its inputs:

    segment = Segment(True, function, [x, y], [bias])      runs function(x, y); bias is used inside
    segment.outputs                                         what it returned
    segment.backward(gradient)                              gradients of x and y; that of bias is added to its main_grad

What is kept until backward is what the operations inside keep, and no more: a sublayer's sum y, which is only added to
the residual stream, is freed at once. What a layer keeps in all formulas.py lists, and a test counts.
"""

import torch
from torch.autograd.graph import get_gradient_edge


class Source(torch.autograd.Function):
    """Where the graph of a Segment begins. A leaf would keep its input in memory until backward, though none of the
    operations behind it may need the numbers; this keeps nothing. `anchor` is anything that requires a gradient.
    There is no backward: Segment asks autograd.grad for what arrives at this node, which is therefore never run."""

    @staticmethod
    def forward(ctx, anchor, x):
        return x.view_as(x)


class Segment:
    """A piece of the forward with an autograd graph of its own, cut off at its inputs.

    inputs: tensors whose gradients backward() returns (None is passed through); weights: parameters whose gradients it
    adds to their main_grad. Without `training` there is no graph.
    """

    def __init__(self, training, function, inputs, weights=()):
        self.weights = [weight for weight in weights if weight is not None]
        with torch.set_grad_enabled(training):
            if training:
                anchor = torch.empty(0, requires_grad=True)
                inputs = [None if x is None else Source.apply(anchor, x.detach()) for x in inputs]
                self.edges = [get_gradient_edge(x) for x in inputs if x is not None]
            outputs = function(*inputs)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def backward(self, *gradients):
        """Gradients of the outputs (None where an output went unused) -> gradients of the inputs."""
        used = [(output, gradient) for output, gradient in zip(self.outputs, gradients) if gradient is not None]
        outputs, gradients = zip(*used)
        results = torch.autograd.grad(outputs, self.edges + self.weights, gradients)
        if self.weights:
            torch._foreach_add_([weight.main_grad for weight in self.weights], results[len(self.edges):])
        return results[:len(self.edges)]
