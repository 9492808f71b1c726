"""What a sublayer computes on one rank. domino.py decides when the all-reduces between the ranks run.

Read sublayers.py: norm, two matmuls around a core, MLP. residual.py adds a sublayer's output to the residual stream.
Then read attention.py, with attention_mask.py (rope, and which keys a query sees) and dropout_and_positions.py (what a
sublayer needs besides the residual stream). cross_entropy.py computes the loss from sharded logits. gradients.py is for
backward: it accumulates gradients, and runs autograd for a single operation.
"""




