"""Runs a training step without data, memory or GPUs, to know its memory, its communication and its time.

train.py's own code runs on torch's meta device, whose tensors have shapes but no numbers. So there are no formulas that
could differ from the program, and a new option is known at once.

Read accounts.py (what a rank allocates, sends and computes), shapes.py (makes meta tensors fast), rank.py (one rank of
any layout), clock.py (seconds), stages.py (models and clusters of any size, from a few small runs).
"""
