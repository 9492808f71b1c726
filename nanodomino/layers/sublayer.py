"""Attention and MLP: two products with a core between them, opened by a norm, added to the stream.

    norm -> f -> column-parallel product -> core -> row-parallel product -> g -> + bias, dropout, residual

The core works on what this rank has of the product: its heads, its features; no rank knows of another there. It comes
twice: as its definition, which autograd differentiates, and as the pair of forward and backward that training runs.

Shapes: b samples, s tokens, h hidden, n heads of d numbers, t tensor-parallel ranks. Heads are in groups that share
keys and values (2305.13245); without, each is a group of its own. The fused qkv matrix is stored group by group,
[groups, (its q's, k, v), d], so that a contiguous cut of its rows is a set of whole groups.
"""

from torch import nn

from nanodomino.layers.linear_pair import LinearPair
from nanodomino.layers.norms import Norm


def drop(x, mask):
    """x * mask; the mask may be of a wider type, since 1/(1 - p) is not a 16-bit number. No mask: x."""
    return x if mask is None else (x * mask).to(x.dtype)


def add_residual(x, y, bias, mask):
    """x + dropout(y + bias): what a sublayer adds, once the sum over ranks is there.
    All [b, s, h]; bias and mask may be None."""
    branch = drop(y if bias is None else y + bias, mask)
    return x + branch if branch is y else branch.add_(x)


class Sublayer(nn.Module):
    """norm, column-parallel linear, core, row-parallel linear, add. The subclass has `column`, `row` and the core:

    core(c, inputs) -> activation                                     the definition
    core_forward(c, inputs, training) -> (activation, kept)           what training runs; kept: what backward needs
    core_backward(gradient, kept) -> gradient of c; those of parameters of its own are added

    inputs: what MasksAndPositions.attention_inputs() returns.
    """
    attends = False

    def __init__(self, config, mesh, site: str):
        super().__init__()
        self.norm = Norm(config, mesh, config.hidden_size)
        self.site = site                                       # names this sublayer's dropout masks

    def inside(self) -> LinearPair:
        """What domino.py runs between the gather of h and the reduce of y."""
        return LinearPair(self)

    def forward(self, x, masks_and_positions):
        """x [b, s, h] -> [b, s, h]: the definition."""
        y = self.row(self.core(self.column(self.norm(x)), masks_and_positions.attention_inputs(self, x)))
        return add_residual(x, y, self.row.bias, masks_and_positions.hidden_dropout_mask(self.site + ".hidden", x))
