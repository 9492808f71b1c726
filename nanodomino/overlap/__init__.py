"""Runs the work between two sublayers for Domino, and decides what is kept for backward.

Read residual_norm.py (bias, dropout, residual and norm between two sublayers), sequence_parallel.py (each rank
holds a part of the tokens there), recompute.py (keep fewer activations and compute them again), host_offload.py
(keep them in host memory).
"""
