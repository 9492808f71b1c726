"""Connects the processes of a run and provides the collectives that torch lacks.

Read world.py (picks the device and joins the process group), collectives.py (reduce-scatter, all-gather and all-to-all
that are fast on gloo too), trace.py (records what a rank does, and when).
"""
