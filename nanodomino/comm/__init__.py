"""Connects the processes of a run and provides the collectives that torch lacks.

Read world.py (joins the process group, picks the device), device.py (which kind of
device code runs for), network_interface.py (finds the interface through which the
other hosts reach this one), scatter_and_gather.py (reduce-scatter and all-gather that are fast on gloo too), trace.py
(records or prints what a rank does, and when).
"""
