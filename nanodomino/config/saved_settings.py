"""Read the settings that a run or a checkpoint stored, also if an older version of this code stored them.

A record is dataclasses.asdict(Config), as config.json and a checkpoint's manifest hold it. A record from before a
setting existed lacks it; the setting's legacy_default says which value the code of that time used.
"""

import dataclasses

from nanodomino.config.config import Config
from nanodomino.config.setting import flag_settings, names_affecting
from nanodomino.errors import require


def check_record(record: dict, source) -> dict:
    """Return the record, which may be incomplete, if its settings are known and have the right types.

    source: the file's name for messages. Raises UserError, also for settings of a later version.
    """
    known = {setting.name: setting for setting in dataclasses.fields(Config)}
    unknown = sorted(record.keys() - known.keys())
    require(not unknown, f"{source} has settings that this version does not know ({', '.join(unknown)}); correct "
            "the name, or use the version that wrote it")
    for name, value in record.items():
        if value is None or "section" not in known[name].metadata:
            continue
        type = known[name].type
        fits = isinstance(value, (int, float) if type is float else type) and (type is bool) == isinstance(value, bool)
        require(fits, f"{source} has {value!r} as {name}, which must be of type {type.__name__}; correct it")
    return record


def with_legacy_defaults(record: dict, source) -> dict:
    """Return a complete record: settings that it lacks get their legacy default. Raises UserError as check_record."""
    check_record(record, source)
    defaults = {setting.name: setting.metadata["legacy_default"] for setting in dataclasses.fields(Config)
                if "legacy_default" in setting.metadata and setting.name not in record}
    return {name: value(record) if callable(value) else value for name, value in defaults.items()} | record


def from_record(record: dict, source) -> Config:
    """Return the Config that a stored record describes. Raises UserError as check_record."""
    return Config(**with_legacy_defaults(record, source) | {"given": tuple(record.get("given", ()))})


def check_settings(record: dict, source, config: Config, *effects):
    """Raise UserError if `config` changes a setting with one of these effects (see setting.EFFECTS)."""
    saved = from_record(record, source)
    derived = {setting.name: setting.metadata["derived"] for setting in flag_settings(Config)}
    # derived settings come last, so that the message names the setting that was changed
    for name in sorted(names_affecting(Config, *effects), key=lambda name: derived.get(name, False)):
        recorded, requested = getattr(saved, name), getattr(config, name)
        require(recorded == requested, f"{source} was made with {name.replace('_', '-')} {recorded}, but this run has "
                f"{requested}; give the same again, or start another run (with --load FOLDER --finetune from its "
                "weights, if the model is the same)")
