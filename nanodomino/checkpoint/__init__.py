"""Saves checkpoints that any layout can resume from, and that are either complete or not there.

Read shards.py (the rectangles of a tensor that a rank holds), save.py, load.py, manifest.py (size and SHA-256 of
each file), safe_load.py (reads an index without running code from it), export.py (one file of plain weights).
`python -m nanodomino.checkpoint` lists, verifies and exports them.
"""
