"""How gradients are added to what is there of them: in fp32 or wider, each weight's main_grad.

Backward adds many small contributions, of microbatches and slices. In 16 bit most of them would be rounded away beside
the sum. So a sum is wide, and where torch can, a 16-bit product is added to it without being rounded in between.
"""

import torch


def main_grad_of(weight):
    """Where its gradients are added up. ZeRO-2 takes memory for them only now."""
    if weight.main_grad is None:
        weight.bucket.allocate_gradients()
    return weight.main_grad


def add_gradients(weights, gradients):
    """To their main_grad, in one call for all of them that there are (None: there is no such parameter)."""
    found = [main_grad_of(weight) for weight in weights if weight is not None]
    if found:
        torch._foreach_add_(found, [gradient for gradient in gradients if gradient is not None])


# torch from 2.8 on, on CUDA: 16-bit products are added to fp32 without being rounded, or stored, in between
WIDENS = "dtype_out" in torch.ops.aten.addmm.overloads()


def add_weight_gradient(main_grad, grad_output, activation):
    """main_grad [out, in] += grad_output^T activation, over all b x s rows; of a bias [out], whose activation is None,
    += the sum of the rows. main_grad may be of a wider type."""
    grad_output = grad_output.flatten(0, 1)
    if activation is None:
        main_grad.add_(grad_output.sum(dim=0, dtype=main_grad.dtype))
    elif main_grad.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), activation.flatten(0, 1))
    elif main_grad.is_cuda and WIDENS:
        torch.addmm(main_grad, grad_output.t(), activation.flatten(0, 1), out_dtype=main_grad.dtype, out=main_grad)
    elif grad_output.dtype == torch.float16:               # in which a sum over tokens may be too large
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), activation.flatten(0, 1).to(main_grad.dtype))
    else:
        main_grad.add_(grad_output.t() @ activation.flatten(0, 1))


def wide(tensor) -> torch.dtype:
    """fp32, or the tensor's own type if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)
