"""What the settings of a run are made of, before they are put together in config/.

    setting.py    what a setting declares         presets.py    model sizes
    rules.py      rules that several settings must obey together
"""
