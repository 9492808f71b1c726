"""Declares every setting of a run once, checks it, and reads it from flags and files.

Read setting.py (what a setting declares), config.py (all settings), presets.py (model sizes), rules.py (which
combinations are valid), flags.py (command-line flags), saved_settings.py (config.json), command_exit.py (how a command
starts and reports errors). `python -m nanodomino.config` prints docs/settings.md.
"""
