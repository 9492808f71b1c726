"""What attention and MLP have in common: a norm, two matmuls with a core between them, and a residual addition.

    x -> norm -> f -> column-parallel matmul -> core -> row-parallel matmul -> g -> + bias, dropout -> + x

The core is attention itself, or the activation function of an MLP. It works on this rank's output of the first matmul:
the rank's own heads, or its own ffn features. So f and g (parallel.py) are the only communication.

A core is written twice: once as a plain definition, which autograd differentiates, and once as a hand-written forward
and backward, which training runs (LinearPair in domino.py). Tests compare the two.

Shapes in this folder: b samples, s tokens, h hidden size, d numbers per head, t tensor-parallel ranks.
"""

from torch import nn

from nanodomino.layers.dropout_and_positions import add_residual
from nanodomino.layers.sublayers import Norm


class Sublayer(nn.Module):
    """The base of Attention and MLP, which supply the two matmuls, `column` and `row`, and the core:

    core(c, inputs) -> activation                              the definition
    kernels(compiled) -> (forward, backward)      the functions of the core that torch.compile can fuse
    core_forward(kernel, c, inputs, training)     what training runs; returns (activation, saved for backward)
    core_backward(kernel, gradient, saved)        returns the gradient of c; adds the gradients of the core's own
                                                  parameters to main_grad

    c: the output of `column`. inputs: an AttentionInputs; None for an MLP. kernel: forward or backward from kernels()
    """
    attends = False                                            # True for attention

    def __init__(self, config, mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh, config.hidden_size)
        self.site = site                                       # the name that seeds this sublayer's dropout masks

    def forward(self, x, masks_and_positions):
        """Turn x [b, s, h] into the next x, with blocking all-reduces and plain autograd. This is the definition."""
        y = self.row(self.core(self.column(self.norm(x)), masks_and_positions.attention_inputs(self, x)))
        return add_residual(x, y, self.row.bias, masks_and_positions.hidden_dropout_mask(self.site + ".hidden", x))
