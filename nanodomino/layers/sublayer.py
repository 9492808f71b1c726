"""What attention and MLP have in common: a norm, two matmuls with a core between them, and a residual addition.

    x -> norm -> f -> column-parallel matmul -> core -> row-parallel matmul -> g -> + bias, dropout -> + x

The core works on this rank's output of the first matmul: its own heads, or its own ffn features. No rank needs another
rank's output there, so f and g (parallel.py) are the only communication.

A core comes in two forms: its definition, which autograd differentiates, and a hand-written forward and backward, which
training runs. Tests compare the two forms.

Shapes in this folder: b samples, s tokens, h hidden size, d numbers per head, t tensor-parallel ranks.
"""

from torch import nn

from nanodomino.layers.dropout_and_positions import add_residual
from nanodomino.layers.norms import Norm
from nanodomino.layers.sublayer_inside import LinearPair


class Sublayer(nn.Module):
    """The base of Attention and MLP, which supply `column`, `row` (the two matmuls) and the core:

    core(c, inputs) -> activation                              the definition
    core_forward(c, inputs, training) -> (activation, saved)   as training runs it; saved: what backward needs
    core_backward(gradient, saved) -> gradient of c            adds the gradients of the core's own parameters

    inputs is what MasksAndPositions.attention_inputs() returns: AttentionInputs, None for an MLP.
    """
    attends = False                                            # True for attention

    def __init__(self, config, mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh, config.hidden_size)
        self.site = site                                       # the name that seeds this sublayer's dropout masks

    def inside(self) -> LinearPair:
        """What domino.py runs between the gather of h and the reduce of y."""
        return LinearPair(self)

    def forward(self, x, masks_and_positions):
        """x [b, s, h] -> [b, s, h], with blocking all-reduces and plain autograd: the definition."""
        y = self.row(self.core(self.column(self.norm(x)), masks_and_positions.attention_inputs(self, x)))
        return add_residual(x, y, self.row.bias, masks_and_positions.hidden_dropout_mask(self.site + ".hidden", x))
