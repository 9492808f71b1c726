"""Gradient accumulation in fp32 or wider: each weight's main_grad (Megatron-LM's name).

Backward adds up many small contributions, from all microbatches and slices. In 16 bits, a contribution that is much
smaller than the sum so far would be rounded away. So the sum is kept in fp32. Where torch supports it, a matmul of
16-bit tensors is added to the sum without being rounded to 16 bits first.
"""

import torch

from nanodomino.comm.world import on_gpu


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
    """Add grad_output^T activation to a weight's main_grad [out, in].

    grad_output [b, s, out], activation [b, s, in]. If activation is None, add the sum of grad_output over all tokens to
    a bias's main_grad [out]. main_grad may have a wider dtype than both. It may also have more rows than grad_output
    has features, because a head does not multiply by all padding rows.
    """
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
