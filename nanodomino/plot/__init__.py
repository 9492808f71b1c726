"""Draws a run's loss curve as an SVG, without a plotting library.

Read curves.py, which draws the curve; then svg.py, which writes lines, boxes and text as SVG.
"""
