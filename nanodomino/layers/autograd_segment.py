"""A segment of the forward that has its own autograd graph, so that the caller decides when its backward runs.

Plain autograd records one graph of the whole forward and runs it backward in its own order. Domino needs another order,
with all-reduces between the segments, so most backward passes are written by hand. Fused attention is the exception:
each device has its own kernel, and only torch knows the kernel's backward. So attention gets a separate graph, which
starts at q, k and v:

    output, segment = run_segment(function, q, k, v)      output = function(q, k, v)
    segment.backward(gradient)                            returns the gradients of q, k, v

Until backward, the segment keeps its inputs and whatever autograd saved in its graph.

**A shortcut.** The graph of one fused operation is a single autograd node. A node can be called like a function: it
takes the gradient of its output and returns the gradients of its inputs. That costs the host a quarter of the time of
torch.autograd.grad(), which prepares for any graph and uses another thread for each GPU. The call is only correct if
the node is the whole graph, so that nothing but the inputs comes after it in backward:

    node.next_functions      [AccumulateGrad(q), AccumulateGrad(k), AccumulateGrad(v), None ..]

So backward() checks that the first entries are the leaves q, k, v in this order, and that all others are None (such as
the entry for an attention bias, which gets no gradient). Otherwise, as in attention with dropout or in
varlen_attention(), backward() uses torch.autograd.grad().
"""

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class Segment:
    """Holds the inputs and the autograd graph of a segment."""
    inputs: list[torch.Tensor]
    output_edge: GradientEdge

    def backward(self, gradient):
        """Turn the gradient of the output into the gradients of the inputs."""
        node, count = self.output_edge.node, len(self.inputs)
        next_nodes = [next_node for next_node, _ in node.next_functions]
        leaves = [getattr(next_node, "variable", None) for next_node in next_nodes[:count]]
        if (len(leaves) == count and all(leaf is x for leaf, x in zip(leaves, self.inputs))
                and not any(next_nodes[count:])):
            return node(gradient)[:count]
        return torch.autograd.grad(self.output_edge, self.inputs, gradient)


def run_segment(function, *inputs):
    """Return (function(*inputs), detached from autograd, and the Segment for its backward)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = function(*inputs)
    return output.detach(), Segment(inputs, get_gradient_edge(output))
