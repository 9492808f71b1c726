"""Describes pipeline schedules as data: lists of actions that can be printed, simulated and tested without a process.

Read actions.py (forward, backward and their halves), definitions.py (1F1B, GPipe, paired, interleaved and two
zero-bubble schedules), placement_and_messages.py (which layers each stage holds, and who sends what to whom),
simulation.py (bubble, peak memory, pictures).
"""
