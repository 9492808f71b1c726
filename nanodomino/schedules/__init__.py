"""Describes pipeline schedules as data: lists of actions that can be printed, simulated and tested without a process.

Read definitions.py (the actions of a stage; 1F1B, eager 1F1B, GPipe, paired, interleaved and two zero-bubble
schedules), then simulation.py (which layers a stage holds and what it sends; bubble, peak memory, pictures).
"""
