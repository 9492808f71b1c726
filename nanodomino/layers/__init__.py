"""What a sublayer computes on one rank. domino.py decides when the all-reduces between the ranks run.

Read norms.py, activations.py, attention_mask.py (rope, and which keys a query sees) and dropout_and_positions.py (what
a sublayer needs besides the residual stream). Then read sublayer.py, with attention.py and mlp.py: two matmuls around a
core. cross_entropy.py computes the loss from sharded logits. Two files are for backward: autograd_segment.py runs
autograd for a single operation, and main_grad.py accumulates gradients.
"""
