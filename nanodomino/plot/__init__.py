"""Draws loss curves as an SVG, without a plotting library.

Read curves.py (reads metrics.jsonl, scales the axes), svg.py (the elements). `python -m nanodomino.plot` is the
command.
"""
