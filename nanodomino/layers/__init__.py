"""What a sublayer computes on one rank. domino.py decides when the all-reduces between the ranks run.

Read norms.py, activations.py, positions.py and dropout_and_positions.py (rope, dropout masks, document boundaries).
Then read sublayer.py, with attention.py and mlp.py (two matmuls around a core) and sublayer_inside.py (how domino.py
runs these). cross_entropy.py computes the loss from sharded logits. Two files are for backward: autograd_segment.py
runs autograd for a single operation, and main_grad.py accumulates gradients.

Then the options: varlen.py (attention within documents on GPUs), moe.py (experts, which router.py chooses for each
token), fp8.py (8-bit matmuls), context_parallel.py (several ranks share the tokens of a sample),
multi_token_prediction.py (layers that predict further tokens).
"""
