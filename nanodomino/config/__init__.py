"""Declares every setting of a run once, checks it, and reads it from flags and files.

Read the files in this order:

    setting.py           what a setting declares          flags.py             command-line flags
    config.py            all settings                     saved_settings.py    settings read back from config.json
    presets.py           model sizes                      command_exit.py      exit codes and error messages
    rules.py             which combinations are valid

`python -m nanodomino.config` prints docs/settings.md.
"""
