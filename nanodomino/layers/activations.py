from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Activation:
    """What stands between an MLP's two products, number by number.

    function(c [.., inputs x ffn]) -> [.., ffn]; backward(gradient [.., ffn], c) -> gradient of c. inputs: numbers of c
    for each of the result's; they lie in so many runs, one behind the other.
    """
    function: Callable
    backward: Callable
    inputs: int


def gelu(x):
    """x P(X < x) of a normal X, by its tanh approximation (1606.08415), as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


def gelu_backward(gradient, x):
    return torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")


def swiglu(c):
    """silu(gate) * up of c = (gate, up); silu(x) = x sigmoid(x) (2002.05202)."""
    gate, up = c.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_backward(gradient, c):
    (gate, up), both = c.chunk(2, dim=-1), torch.empty_like(c)
    grad_gate, grad_up = both.chunk(2, dim=-1)
    torch.mul(gradient, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(gradient)
    return both


ACTIVATIONS = {"gelu": Activation(gelu, gelu_backward, inputs=1),
               "swiglu": Activation(swiglu, swiglu_backward, inputs=2)}
