"""The MLP of a transformer layer, cut over t tensor-parallel ranks (Megatron-LM, 1909.08053, section 3).

    h [b, s, h] -> W1 (column-parallel) -> c [b, s, ffn/t] -> activation -> [b, s, ffn/t] -> W2 (row-parallel) -> y

With SwiGLU, W1 stacks two matrices, [gate; up], of ffn rows each. The two are cut separately
(partition_stride=2), so that every rank has the gate and the up projection of the same ffn/t features.
"""

from nanodomino.layers.sublayers import ACTIVATIONS, Sublayer
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


class MLP(Sublayer):
    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        self.activation, has_bias = ACTIVATIONS[config.activation], not config.disable_bias_linear
        matrices = self.activation.inputs
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, matrices * config.ffn_hidden_size, config, mesh,
                                                  has_bias, partition_stride=matrices)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config, mesh, has_bias)

    column = property(lambda self: self.dense_h_to_4h)
    row = property(lambda self: self.dense_4h_to_h)

    def core(self, c, inputs):
        return self.activation.function(c)

    def kernels(self, compiled):
        functions = self.activation.function, self.activation.backward
        return map(compiled, functions) if self.activation.inputs > 1 else functions     # GELU is one kernel as it is

    def core_forward(self, kernel, c, inputs, training):
        return kernel(c), c

    def core_backward(self, kernel, gradient, c):
        return kernel(gradient, c)
