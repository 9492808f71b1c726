"""The options: what goes beyond a dense GPT with tensor, pipeline and data parallelism. A list in config names them.

An option is a file, or a folder with a file `settings`, that contains everything about it. Its class Settings becomes a
base of Config: it declares the option's settings, and overrides some of the seams of the core. Next to it there may be
tables SCHEDULES, OPTIMIZERS, LR_DECAY_STYLES or PRESETS, whose entries are added to those of the core.
"""
