"""Runs a training step without data, memory or GPUs, to learn its memory, its communication and its time.

train.py's own code runs on torch's meta device, whose tensors have shapes but no numbers. So there is no
formula that could differ from the program, and a new option needs no code here.

Read accounts.py (what a rank allocates, sends and computes), shapes.py (makes meta tensors fast), rank.py (one rank of
any layout), clock.py (seconds), stages.py (models and clusters of any size, from a few small runs).
"""
