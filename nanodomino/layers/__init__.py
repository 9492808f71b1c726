"""Computes what a sublayer computes on one rank; domino.py decides when its all-reduce runs.

Read norms.py, activations.py, positions.py and masks_and_positions.py (rope, dropout masks, document boundaries),
then sublayer.py with attention.py and mlp.py, which are two matmuls around a core, and cross_entropy.py (the loss
from logits that no rank holds whole). autograd_segment.py and main_grad.py are how backward calls autograd for a
single step and where it adds gradients.
"""
