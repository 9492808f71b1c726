"""The computation of a sublayer on one rank; domino.py decides when its all-reduces run.

Read norms.py, activations.py, positions.py and dropout_and_positions.py (rope, dropout masks, document boundaries).
Then sublayer.py, with attention.py and mlp.py (two matmuls around a core) and sublayer_inside.py (how domino.py runs
them), and cross_entropy.py (the loss from logits that no rank holds whole). autograd_segment.py and main_grad.py are
for backward: how it calls autograd for one operation, and where it adds gradients.
"""
