"""Recomputation: backward recomputes activations instead of keeping them.

    tape_policy.py    what a tape keeps        host_offload.py    the host's memory
"""
