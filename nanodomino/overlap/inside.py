"""The inside of a sublayer: everything between the output h of its norm and the reduce of its result y."""

from nanodomino.layers.sublayers import Sublayer


class Inside:
    """The interface of an inside: LinearPair in domino.py, or an option's.

    sublayer, site        the sublayer, and its name in traces
    norm_weights          (weight, bias) of its norm
    output_bias           the bias [h] that is added to y after the reduce, or None

    h and grad_y are flights (flight.py) of these tensors: the inside waits for them. The methods except `keep` are
    generators, which yield while a collective is in flight:

        keep(h)                           -> h in the form in which the tape keeps it
        forward(slice, h)                 -> (flights of y, tape)
        backward(slice, tape, grad_y, h)  -> (flights of the gradient of h, matmuls of the weight gradients)
        restore(slice, tape, h)              recomputes what a tape policy has dropped from the tape

    backward does not run the matmuls of the weight gradients, because domino.py uses them to hide the reduce of the
    gradient of h.
    """

    def __init__(self, sublayer: Sublayer, output_bias=None):
        # plain attributes, because looking parameters up in the nn.Module would take a tenth of the host's time
        self.sublayer, self.site = sublayer, sublayer.site
        self.norm_weights, self.output_bias = sublayer.norm.weights, output_bias
