"""Runs the inside of attention and MLP: column-parallel matmul, core, row-parallel matmul.

A sublayer is a norm, a gather of the norm's output h, its *inside*, a reduce of the result y, and a residual addition.
domino.py runs all of these except the inside. An inside is an object with a method and three generators:

    keep(ops, h)                             -> h as the tape keeps it: h itself, or h in 8 bits (fp8.py)
    forward(ops, slice, h)                   -> (flights of y, tape)
    backward(ops, slice, tape, grad_y, h)    -> (flights of the gradient of h, matmuls of the weight gradients)
    restore(ops, slice, tape, h)             recomputes what forward dropped from the tape

    h, grad_y    flights (overlap/flight.py) of these tensors; the inside waits for them
    ops          the SliceOps (overlap/slice_ops.py) with which the inside multiplies, launches and yields
    tape         what backward needs; domino.py keeps it until then

backward does not run the matmuls of the weight gradients. It returns them, because domino.py uses them to hide the
reduce of h's gradient:

    forward     c = h W1^T + b1      a = core(c)      y = sum over ranks of a W2^T
    backward    grad_a = grad_y W2   grad_c = core_backward(grad_a)   grad_h = sum over ranks of grad_c W1
    later       grad W2 = grad_y^T a      grad W1 = grad_c^T h      grad b1 = sum of grad_c over the rows
"""

from dataclasses import dataclass

import torch


@dataclass
class LinearPairTape:
    """Holds what backward needs. A field is None after recompute.py has dropped it."""
    column_output: torch.Tensor | None   # c [b, s, .../t]
    core: object                         # what core_backward needs
    activation: torch.Tensor | None      # a [b, s, .../t], the input of the row-parallel matmul


class LinearPair:
    """Runs two matmuls with a core between them. Holds the sublayer's parameters as plain attributes, because looking
    them up in the nn.Module would take a tenth of the host's time."""

    def __init__(self, sublayer, forward_kernel, backward_kernel):
        self.sublayer, self.site = sublayer, sublayer.site
        self.forward_kernel, self.backward_kernel = forward_kernel, backward_kernel
        self.column, self.column_bias = sublayer.column.weight, sublayer.column.bias       # [out/t, h], [out/t]
        self.row, self.output_bias = sublayer.row.weight, sublayer.row.bias                # [h, in/t], [h]

    def core(self, ops, slice, c):
        """Return (activation, what core_backward needs). A generator, like core_backward, because some cores launch
        collectives (context_parallel.py). This one never yields."""
        inputs = slice.masks_and_positions.attention_inputs(self.sublayer, c)
        activation, core = self.sublayer.core_forward(self.forward_kernel, c, inputs, slice.training)
        if not self.sublayer.attends:                          # attention's core keeps its output in any case
            activation = ops.convert_once(activation, self.row)
        return activation, core
        yield

    def core_backward(self, ops, slice, gradient, saved, matmuls):
        """Turn the gradient of the activation into the gradient of c. matmuls: the weight gradient of W2, which it may
        run and remove to hide a collective."""
        return self.sublayer.core_backward(self.backward_kernel, gradient, saved)
        yield

    def keep(self, ops, h):
        return h if ops.stream.shards > 1 else ops.convert_once(h, self.column)

    def forward(self, ops, slice, h):
        c = ops.linear(slice, self.site, h, self.column, self.column_bias)
        activation, core = yield from self.core(ops, slice, c)
        tape = LinearPairTape(c, core, activation)
        yield from ops.yield_if_sharded()
        return ops.linear_then_reduce(slice, self.site, activation, self.row), tape

    def restore(self, ops, slice, tape: LinearPairTape, h):
        """Recompute a. If c was dropped, first wait for h and recompute c."""
        c = tape.column_output
        if c is None:
            c = ops.linear(slice, self.site, h, self.column, self.column_bias)
        tape.column_output = None
        tape.activation, tape.core = yield from self.core(ops, slice, c)

    def backward(self, ops, slice, tape: LinearPairTape, grad_y, h):
        gradient, grad_y = ops.linear(slice, self.site, grad_y, self.row.t()), ops.wait(slice, self.site, grad_y)
        matmuls = [(self.row, grad_y, tape.activation)]
        gradient = yield from self.core_backward(ops, slice, gradient, tape.core, matmuls)  # of c; frees that of a
        yield from ops.yield_if_sharded()
        column, bias = self.column.t(), self.column_bias
        converted = ops.convert_once(gradient, column)
        matmuls += [(self.column, converted, ops.wait(slice, self.site, h)),
                    (bias, None if bias is None else gradient, None)]
        return ops.linear_then_reduce(slice, self.site, converted, column), matmuls
