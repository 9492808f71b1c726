"""A segment of the forward with an autograd graph of its own, which runs backward when the caller says so.

Plain autograd records one graph of the whole forward and runs it backward in its own order. Domino needs another order,
with all-reduces between the segments, and writes most backward passes out by hand. Fused attention is the exception:
each device has its own kernel, and only torch knows its backward. So it gets a graph of its own, cut off at its inputs:

    output, segment = run_segment(function, q, k, v)      output = function(q, k, v)
    segment.backward(gradient)                            -> the gradients of q, k, v

Until backward the segment holds its inputs and what the operations inside it save.

**A shortcut.** The graph of one fused operation is a single autograd node, and a node can be called like a function:
gradient of its output in, gradients of its inputs out. That costs the host a quarter of the time of
torch.autograd.grad(), which prepares for any graph and hands the work to another thread for each GPU. The call is only
right if nothing of the graph is left beyond that node:

    node.next_functions      [AccumulateGrad(q), AccumulateGrad(k), AccumulateGrad(v), None ..]

so backward() checks that the first entries are the leaves q, k, v in this order, and that all others are None (an
attention bias, say, gets no gradient). Otherwise, as in attention with dropout, it uses torch.autograd.grad().
"""

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class Segment:
    inputs: list[torch.Tensor]
    output_edge: GradientEdge

    def backward(self, gradient):
        """Gradient of the output -> gradients of the inputs."""
        node, count = self.output_edge.node, len(self.inputs)
        next_nodes = [next_node for next_node, _ in node.next_functions]
        leaves = [getattr(next_node, "variable", None) for next_node in next_nodes[:count]]
        if (len(leaves) == count and all(leaf is x for leaf, x in zip(leaves, self.inputs))
                and not any(next_nodes[count:])):
            return node(gradient)[:count]
        return torch.autograd.grad(self.output_edge, self.inputs, gradient)


def run_segment(function, *inputs):
    """Return (function(*inputs), detached; the Segment that differentiates it)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = function(*inputs)
    return output.detach(), Segment(inputs, get_gradient_edge(output))
