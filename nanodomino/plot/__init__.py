"""Draws loss curves as an SVG, without a plotting library.

Read curves.py, which reads metrics.jsonl and draws the curves; then svg.py, which writes lines, boxes and text as SVG.
"""
