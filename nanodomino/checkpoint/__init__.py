"""Saves checkpoints that any layout can load, and that are either complete or absent: format, save, load."""
