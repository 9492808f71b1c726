"""Computes what is known of a training step without running it; dry_run/ finds out the rest.

Read formulas.py (what a student should know by heart: parameters, FLOPs, bytes), machine.py (a machine as a few rates),
hardware.py (data sheets of GPUs).
"""
