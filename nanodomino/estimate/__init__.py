"""Estimates what a training step takes, without data, memory or GPUs: its memory, its communication and its time.

train.py's own code runs on torch's meta device, whose tensors have shapes but no numbers. So there is no
formula that could differ from the program, and a new option needs no code here.

Read formulas.py (what a student should know by heart, data sheets, a machine as a few rates), accounts.py (what a rank
allocates, sends and computes), rank.py (a dry run of one rank of any layout, and its seconds), stages.py (models and
clusters of any size, from a few small runs).
"""
