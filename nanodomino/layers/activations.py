"""The activation functions of an MLP, each with its backward.

    gelu(x)            = x Phi(x), where Phi is the normal distribution function; computed with the tanh
                         approximation (1606.08415), as in GPT-2
    swiglu(gate, up)   = silu(gate) * up, silu(x) = x sigmoid(x) (2002.05202); as in Llama

An activation works element by element, so each rank applies it to its own ffn/t features without communication.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Activation:
    """Holds an activation function and its backward.

    function(c [.., inputs x ffn]) -> [.., ffn]
    backward(gradient [.., ffn], c) -> the gradient of c
    inputs: how many numbers of c make one number of the result; for example 2 for SwiGLU (gate and up)
    """
    function: Callable
    backward: Callable
    inputs: int


def swiglu(c):
    gate, up = c.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(gradient, c):
    """Return the gradient of c. Both halves are written into one tensor, which saves a temporary and a torch.cat.
    torch.compile fuses the torch.cat instead."""
    gate, up = c.chunk(2, dim=-1)
    if torch.compiler.is_compiling():
        return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate) * gradient], dim=-1)
    grad_c = torch.empty_like(c)
    grad_gate, grad_up = grad_c.chunk(2, dim=-1)
    torch.mul(gradient, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(gradient)
    return grad_c


ACTIVATIONS = {"gelu": Activation(partial(F.gelu, approximate="tanh"),
                                  partial(torch.ops.aten.gelu_backward, approximate="tanh"), inputs=1),
               "swiglu": Activation(swiglu, swiglu_backward, inputs=2)}
