"""Predicts what a training step needs from the sizes alone, without running it.

Read sizes.py (the quantities the formulas are made of), expected_memory.py (bytes of memory), expected_traffic.py
(collectives and bytes sent), step_time.py (seconds, from a few measured rates), hardware.py
(peak FLOP/s of known GPUs).
"""
