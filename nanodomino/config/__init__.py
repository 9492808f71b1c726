"""All settings of a run, and what the core asks of them. Reads them from flags and files.

    config.py     all settings, and Config               flags.py             command-line flags
    choices.py    which class computes what              saved_settings.py    settings read back from config.json

`python -m nanodomino.config` prints docs/settings.md.
"""
