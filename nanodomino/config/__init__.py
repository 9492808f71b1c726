"""Puts the settings of the core and of all options together, checks them, and reads them from flags and files.

    config.py     all settings of the core, and Config      flags.py             command-line flags
    seams.py      what options may change in the core       saved_settings.py    settings read back from config.json
    options.py    the list of options

`python -m nanodomino.config` prints docs/settings.md.
"""
