"""Runs a training: session.py, folder.py, report.py, failures.py, determinism.py."""
