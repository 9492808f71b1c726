"""Declares every setting of a run once, checks it, and reads it from flags and files.

Read the files in this order:

    setting.py    what a setting declares           rules.py             which combinations are valid
    config.py     all settings                      flags.py             command-line flags
    presets.py    model sizes                       saved_settings.py    settings read back from config.json

`python -m nanodomino.config` prints docs/settings.md.
"""
