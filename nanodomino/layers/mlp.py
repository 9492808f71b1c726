from nanodomino.layers.activations import ACTIVATIONS
from nanodomino.layers.sublayer import Sublayer
from nanodomino.parallel import ColumnParallelLinear, RowParallelLinear


class MLP(Sublayer):
    """h -> ffn -> h with config.activation between, on this rank's part of the ffn features."""

    def __init__(self, config, mesh, site: str):
        super().__init__(config, mesh, site)
        self.activation, has_bias = ACTIVATIONS[config.activation], not config.disable_bias_linear
        stride = self.activation.inputs
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, stride * config.ffn_hidden_size, config, mesh,
                                                  has_bias, stride)
        self.dense_4h_to_h = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config, mesh, has_bias)

    @property
    def column(self):
        return self.dense_h_to_4h

    @property
    def row(self):
        return self.dense_4h_to_h

    def core(self, c, inputs):
        """[b, s, inputs x ffn/t] -> [b, s, ffn/t]."""
        return self.activation.function(c)

    def core_forward(self, c, inputs, training):
        return self.activation.function(c), c

    def core_backward(self, gradient, c):
        return self.activation.backward(gradient, c)
