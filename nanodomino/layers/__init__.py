"""What a sublayer computes on one rank. domino.py decides when the all-reduces between the ranks run.

Read norms.py, activations.py, positions.py and dropout_and_positions.py (rope, dropout masks, document boundaries).
Then read sublayer.py, with attention.py and mlp.py (two matmuls around a core) and sublayer_inside.py (how domino.py
runs these). fp8.py multiplies in 8 bits. varlen.py is attention within documents on GPUs. With context_parallel.py
several ranks share the tokens of a sample. moe.py replaces the MLP by experts, which router.py chooses for each token.
multi_token_prediction.py is a further layer that predicts one token further ahead. cross_entropy.py computes the loss
from sharded logits. Two files are for backward: autograd_segment.py runs autograd for a single operation, and
main_grad.py accumulates gradients.
"""
