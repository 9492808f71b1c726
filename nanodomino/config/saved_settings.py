"""Reads the settings that are stored with a run or a checkpoint, even if an older version of this code stored them.

A record is the dictionary dataclasses.asdict(config), as stored in config.json and in a checkpoint's manifest. A record
that is older than a setting lacks it. With the setting's legacy_default, today's code behaves as that older code did.
"""

import dataclasses

from nanodomino.config.config import Config
from nanodomino.config.setting import flag_settings, names_affecting
from nanodomino.errors import require


def check_record(record: dict, source) -> dict:
    """Return the record if all its settings are known and have the right types. Settings may be missing.

    source: the name of the record's file, for messages. Raises UserError, for example for a setting of a later version.
    """
    require("architectures" not in record, f"{source} holds a Hugging Face model; convert it with `python -m "
            "nanodomino.huggingface import`, and give the folder of its --output")
    known = {setting.name: setting for setting in dataclasses.fields(Config)}
    unknown = sorted(record.keys() - known.keys())
    require(not unknown, f"{source} has settings that this version does not know ({', '.join(unknown)}); correct "
            "the name, or use the version that wrote the file")
    for name, value in record.items():
        if name == "given":
            require(isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value),
                    f"{source} gives {value!r} as 'given', but must give a list of names; correct it")
        if value is None or name == "given":
            continue
        type = known[name].type
        fits = isinstance(value, (int, float) if type is float else type) and (type is bool) == isinstance(value, bool)
        require(fits, f"{source} gives {value!r} as {name}, but must give a value of type {type.__name__}; correct it")
    return record


def with_legacy_defaults(record: dict, source) -> dict:
    """Return the record, completed with the legacy defaults of the settings that it lacks. Raises UserError."""
    check_record(record, source)
    defaults = {setting.name: setting.metadata["legacy_default"] for setting in dataclasses.fields(Config)
                if "legacy_default" in setting.metadata and setting.name not in record}
    return {name: value(record) if callable(value) else value for name, value in defaults.items()} | record


def from_record(record: dict, source) -> Config:
    """Return the Config that a stored record describes. Raises UserError."""
    return Config(**with_legacy_defaults(record, source) | {"given": tuple(record.get("given", ()))})


def check_settings(record: dict, source, config: Config, *effects):
    """Raise UserError if `config` and the record differ in a setting with one of these effects (keys of EFFECTS)."""
    saved = from_record(record, source)
    derived = {setting.name: setting.metadata["derived"] for setting in flag_settings(Config)}
    # derived settings come last, so that the message names the setting that the user changed, not one derived from it
    for name in sorted(names_affecting(Config, *effects), key=lambda name: derived.get(name, False)):
        recorded, requested = getattr(saved, name), getattr(config, name)
        old, new = (f" (--data-path {each.data_path})" * (name == "data_sha256") for each in (saved, config))
        require(recorded == requested, f"{source} was made with {name.replace('_', '-')} {recorded}{old}, but this run "
                f"has {requested}{new}; go back to the old value, or start another run "
                + ("without --load" if config.finetune else "(if the model is the same, from these weights: --load "
                   "FOLDER --finetune)"))
