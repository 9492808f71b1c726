"""What a sublayer computes between the output h of its norm and the reduce of its result y: its *branch*.

LinearPair is the branch of attention and MLP: two matmuls around a core. Options have others (options/experts).
"""

from dataclasses import dataclass

import torch

from nanodomino.layers.sublayers import Sublayer
from nanodomino.overlap.slices import Flight, SliceOps


class Branch:
    """The interface of a branch: LinearPair below, or an option's.

        keep(h)                           -> h in the form in which the tape keeps it
        forward(slice, h)                 -> (flights of y, tape)
        backward(slice, tape, grad_y, h)  -> (flights of the gradient of h, matmuls of the weight gradients)
        restore(slice, tape, h)              recomputes what a tape policy has dropped from the tape

    All but `keep` are generators, which yield while a collective is in flight. There, h and grad_y are flights of these
    tensors, and the branch waits for them. backward leaves the matmuls of the weight gradients to domino.py, where they
    hide the reduce of the gradient of h.
    """

    def __init__(self, sublayer: Sublayer, output_bias=None):
        """output_bias: the bias [h] that is added to y after the reduce, or None"""
        # plain attributes, because looking parameters up in the nn.Module would take a tenth of the host's time
        self.sublayer, self.site = sublayer, sublayer.site
        self.norm_weights, self.output_bias = sublayer.norm.weights, output_bias


@dataclass
class LinearPairTape:
    """Holds what backward needs of a LinearPair. A field is None after a tape policy has dropped it."""
    column_output: torch.Tensor | None   # c [b, s, .../t]
    core: object                         # what core_backward needs
    activation: torch.Tensor | None      # a [b, s, .../t], the input of the row-parallel matmul


class LinearPair(Branch):
    """Runs the branch of attention and MLP: column-parallel matmul, core, row-parallel matmul.

        forward     c = h W1^T + b1      a = core(c)      y = sum over ranks of a W2^T
        backward    grad_a = grad_y W2   grad_c = core_backward(grad_a)   grad_h = sum over ranks of grad_c W1
        later       grad W2 = grad_y^T a      grad W1 = grad_c^T h      grad b1 = sum of grad_c over the rows
    """

    def __init__(self, sublayer: Sublayer, ops: SliceOps, compiled, factor=lambda weight: weight):
        """factor: weight -> what computes its three products: the weight itself, or an option's object (SliceOps)."""
        super().__init__(sublayer, sublayer.row.bias)
        self.ops, self.b1 = ops, sublayer.column.bias                                      # [out/t]
        self.w1, self.w2 = factor(sublayer.column.weight), factor(sublayer.row.weight)     # [out/t, h], [h, in/t]
        self.forward_kernel, self.backward_kernel = sublayer.kernels(compiled)

    def keep(self, h):
        return h if self.ops.stream.shards > 1 else self.ops.convert_once(h, self.w1)

    def forward(self, slice, h: list[Flight]):
        """Multiply h by W1, run the core, multiply by W2, and launch the sum of y over the ranks."""
        c = self.ops.linear(slice, self.site, h, self.w1, self.b1)
        activation, core = yield from self.core(slice, c)
        tape = LinearPairTape(c, core, activation)
        yield from self.ops.yield_if_sharded()
        return self.ops.linear_then_reduce(slice, self.site, activation, self.w2), tape

    def core(self, slice, c):
        """Return (activation, what core_backward needs)."""
        yield from ()                                          # an option's core may launch collectives and yield
        inputs = slice.masks_and_positions.attention_inputs(self.sublayer, c)
        activation, core = self.sublayer.core_forward(self.forward_kernel, c, inputs, slice.training)
        if not self.sublayer.attends:                          # attention's core keeps its output in any case
            activation = self.ops.convert_once(activation, self.w2)
        return activation, core

    def backward(self, slice, tape: LinearPairTape, grad_y: list[Flight], h: list[Flight]):
        """Go back from the gradient of y to that of h, and launch the sum of the latter over the ranks."""
        ops, w1 = self.ops, self.w1.t()
        gradient, grad_y = ops.linear(slice, self.site, grad_y, self.w2.t()), ops.wait(slice, self.site, grad_y)
        matmuls = [(self.w2, grad_y, tape.activation)]
        gradient = yield from self.core_backward(slice, gradient, tape.core, matmuls)   # now c's; a's is freed
        yield from ops.yield_if_sharded()
        converted = ops.convert_once(gradient, w1)
        matmuls += [(self.w1, converted, ops.wait(slice, self.site, h)),
                    (self.b1, gradient if self.b1 is not None else None, None)]
        return ops.linear_then_reduce(slice, self.site, converted, w1), matmuls

    def core_backward(self, slice, gradient, saved, matmuls):
        """Turn the gradient of the activation into the gradient of c. matmuls: a list with the weight gradient of W2; a
        core may run it and empty the list, to hide a collective."""
        yield from ()
        return self.sublayer.core_backward(self.backward_kernel, gradient, saved)

    def restore(self, slice, tape: LinearPairTape, h: list[Flight]):
        """Compute a again. If the tape lacks c, first wait for h and compute c."""
        c = tape.column_output
        if c is None:
            c = self.ops.linear(slice, self.site, h, self.w1, self.b1)
        tape.column_output = None
        tape.activation, tape.core = yield from self.core(slice, c)
