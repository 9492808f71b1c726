"""All settings of a run: what they are, what they must obey, and what the core asks of them.

Read config.py (all settings, and Config), choices.py (which class computes what), rules.py (defaults and rules that
join several settings), presets.py (model sizes), flags.py (what a setting declares, and its flag), records.py (settings
read back from config.json).
"""
