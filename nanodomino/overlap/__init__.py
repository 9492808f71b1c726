"""The parts of domino.py: what it runs around the inside of each sublayer, and what it keeps for backward.

Read flight.py (a collective in flight), slice_ops.py (launch, yield, wait, multiply), residual_norm.py (bias, dropout,
residual and norm between two sublayers), inside.py (the interface of what lies between norm and reduce),
embedding_and_head.py (the two ends of the model), slices.py (the state and the tape of a slice).
"""
