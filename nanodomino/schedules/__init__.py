"""Describes pipeline schedules as data: lists of actions that can be printed, simulated and tested without a process.

Read actions.py (forward, backward, the two parts of a backward, and pairs), definitions.py (1F1B, GPipe, paired,
interleaved and two zero-bubble schedules), placement_and_messages.py (which layers each stage holds, and which stage
sends what to which), simulation.py (bubble, peak memory, pictures).
"""
