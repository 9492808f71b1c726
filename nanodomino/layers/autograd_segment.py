"""A piece of the forward that autograd differentiates, on its own, when we say so.

Plain autograd keeps one graph of everything and runs it backward in its own order. Domino needs another order, with the
wires between the pieces, and most of them it differentiates by hand. What only torch knows how to differentiate well,
the fused attention of each device, becomes a graph of its own, cut off at its inputs:

    output, segment = run_segment(function, q, k, v)      output = function(q, k, v)
    segment.backward(gradient)                            the gradients of q, k, v

Kept until backward is what the operations inside keep, and the inputs. A fused operation is a graph of one node, and a
node can be called. That takes the host a quarter of the time that autograd's engine takes, which prepares for any
graph, and for each GPU hands over to a thread and back.
"""

from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class Segment:
    inputs: list[torch.Tensor]
    end: GradientEdge

    def backward(self, gradient):
        """Gradient of the output -> gradients of the inputs."""
        count, before = len(self.inputs), [node for node, _ in self.end.node.next_functions]
        alone = [getattr(node, "variable", None) for node in before[:count]]
        if (len(alone) == count and all(one is x for one, x in zip(alone, self.inputs))
                and not any(before[count:])):                  # the fused kernels' masks, say, have no gradient
            return self.end.node(gradient)[:count]
        return torch.autograd.grad(self.end, self.inputs, gradient)


def run_segment(function, *inputs):
    """(function(*inputs), without its graph; the Segment)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = function(*inputs)
    return output.detach(), Segment(inputs, get_gradient_edge(output))
