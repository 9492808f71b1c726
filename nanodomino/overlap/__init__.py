"""The parts of domino.py: what it runs around the inside of each sublayer, and what it keeps for backward.

Read flight.py (a collective in flight), slice_ops.py (launch, yield, wait, multiply), residual_norm.py (bias, dropout,
residual and norm between two sublayers), embedding_and_head.py (the two ends of the model). Then the options:
sequence_parallel.py (each rank holds a shard of the residual stream), recompute.py (keep fewer activations and
recompute the others), host_offload.py (keep activations in the host's memory), multi_token_prediction.py (layers after
the head, which predict further tokens).
"""
