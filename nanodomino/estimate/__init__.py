"""Estimates what a training step takes: formulas.py, accounts.py, rank.py, stages.py."""
