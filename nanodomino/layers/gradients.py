"""What the hand-written backward shares: sums of gradients, the residual addition, autograd for a single operation.

**main_grad.** Backward adds up many small contributions to a weight's gradient, from all microbatches and slices. In 16
bits, a contribution that is much smaller than the sum so far would be rounded away. So the sum is kept in fp32 or
wider, in main_grad (Megatron-LM's name). Where torch can, it adds a matmul of 16-bit tensors without rounding it first.

**Segments.** Plain autograd records one graph of the whole forward and runs it backward in its own order. Domino needs
another order, so backward is written by hand. Fused attention is the exception: each device has its own kernel, and
only torch knows the kernel's backward. So attention gets a separate graph, which starts at q, k and v:

    output, segment = run_segment(function, q, k, v)      output = function(q, k, v)
    segment.backward(gradient)                            returns the gradients of q, k, v

**A shortcut.** The graph of one fused operation is a single autograd node. It can be called like a function that turns
the gradient of its output into the gradients of its inputs. That costs the host a quarter of the time of
torch.autograd.grad(), which prepares for any graph and uses another thread for each GPU. The call is only correct if
nothing but the inputs comes after the node in backward:

    node.next_functions      [AccumulateGrad(q), AccumulateGrad(k), AccumulateGrad(v), None ..]

None stands for an argument without a gradient, such as an attention bias. In all other cases, such as attention with
dropout, Segment.backward() uses torch.autograd.grad().
"""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanodomino.comm.device import on_gpu


def main_grad_of(weight):
    """Return the tensor that accumulates this weight's gradient. With ZeRO-2 it is allocated here, at its first use."""
    if weight.main_grad is None:
        weight.bucket.allocate_gradients()
    return weight.main_grad


def add_gradients(weights, gradients):
    """Add each gradient to its weight's main_grad. If the model has no such weight, both are None."""
    main_grads = [main_grad_of(weight) for weight in weights if weight is not None]
    if main_grads:
        torch._foreach_add_(main_grads, [gradient for gradient in gradients if gradient is not None])


# From torch 2.10 on, CUDA can add the matmul of 16-bit tensors to an fp32 tensor without rounding or storing it first.
# In 2.8 and 2.9 addmm has `out_dtype` too, but takes no fp32 tensor to add to.
ADDS_TO_FP32 = torch.__version__ >= "2.10"


def add_weight_gradient(main_grad, grad_output, activation):
    """Add grad_output^T activation to a weight's main_grad [out, in], whose dtype may be wider. grad_output [b, s,
    out], activation [b, s, in]; None: add the sum of grad_output over all tokens to a bias's main_grad [out]. main_grad
    may have more rows than `out`, because a head does not multiply by all padding rows."""
    grad_output = grad_output.flatten(0, 1)
    main_grad = main_grad[:grad_output.size(-1)]
    if activation is None:
        main_grad.add_(grad_output.sum(dim=0, dtype=main_grad.dtype))
    elif main_grad.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), activation.flatten(0, 1))
    elif on_gpu(main_grad) and ADDS_TO_FP32:
        torch.addmm(main_grad, grad_output.t(), activation.flatten(0, 1), out_dtype=main_grad.dtype, out=main_grad)
    elif grad_output.dtype == torch.float16:               # sum in fp32: in fp16 a sum over tokens may overflow
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), activation.flatten(0, 1).to(main_grad.dtype))
    else:
        main_grad.add_(grad_output.t() @ activation.flatten(0, 1))


def wide_dtype(tensor) -> torch.dtype:
    """Return fp32, or the tensor's own dtype if that is wider: the dtype for sums over many numbers."""
    return torch.promote_types(tensor.dtype, torch.float32)


def drop(x, mask):
    """Return x * mask in x's dtype; x if mask is None. Masks are fp32, because 16 bits would round 1/(1 - p)."""
    return x if mask is None else (x * mask).to(x.dtype)


def add_residual(x, y, bias, mask):
    """Return x + dropout(y + bias) for x, y, mask [b, s, h] and bias [h], which may be None, as may the mask."""
    branch = drop(y if bias is None else y + bias, mask)
    return x + branch if branch is y else branch.add_(x)


def residual_backward(gradient, mask, has_bias):
    """Turn the gradient of add_residual() into the gradients of x, y and bias (None without a bias). Without
    dropout, the gradients of x and y are the same tensor, so the caller must not write to either."""
    grad_y = drop(gradient, mask)
    return gradient, grad_y, grad_y.sum(dim=(0, 1), dtype=wide_dtype(grad_y)) if has_bias else None


@dataclass
class Segment:
    """Holds the inputs of a segment, and the autograd graph with whatever autograd saved in it."""
    inputs: list[torch.Tensor]
    output_edge: GradientEdge

    def backward(self, gradient):
        """Turn the gradient of the output into the gradients of the inputs."""
        node = self.output_edge.node
        ends = [getattr(following, "variable", following) for following, _ in node.next_functions]
        if all(end is x for end, x in zip_longest(ends, self.inputs)):         # all ends after the inputs are None
            return node(gradient)[:len(self.inputs)]
        return torch.autograd.grad(self.output_edge, self.inputs, gradient)


def run_segment(function, *inputs):
    """Return (function(*inputs), detached from autograd, and the Segment for its backward)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        output = function(*inputs)
    return output.detach(), Segment(inputs, get_gradient_edge(output))
