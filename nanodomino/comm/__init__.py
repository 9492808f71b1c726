"""Connects the processes of a run: world.py, collectives.py, trace.py."""
