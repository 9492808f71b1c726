import dataclasses

from nanodomino.config.config import Config
from nanodomino.config.setting import flag_settings, names_affecting
from nanodomino.errors import require


def check_record(record: dict, source) -> dict:
    """A Config as dataclasses.asdict once made a record of it, or a part of one: the record, if it can be used.
    Raises UserError for settings of a later version, or values that are none."""
    known = {one.name: one for one in dataclasses.fields(Config)}
    unknown = sorted(record.keys() - known.keys())
    require(not unknown, f"{source} has settings that this version does not know ({', '.join(unknown)}); use the "
            "version that wrote it")
    for name, value in record.items():
        kind = known[name].metadata.get("type")
        fits = isinstance(value, {float: (int, float)}.get(kind, kind)) if kind else True
        require(value is None or fits and (kind is bool) == isinstance(value, bool) or not kind,
                f"{source} has {value!r} as {name}, which must be of type {kind and kind.__name__}; correct it")
    return record


def with_legacy_defaults(record: dict, source) -> dict:
    """A whole record; what it does not know has the value that was the only one at that time."""
    check_record(record, source)
    absent = {one.name: one.metadata["legacy_default"] for one in dataclasses.fields(Config)
              if "legacy_default" in one.metadata and one.name not in record}
    return {name: value(record) if callable(value) else value for name, value in absent.items()} | record


def from_record(record: dict, source) -> Config:
    """The Config of a whole record."""
    return Config(**with_legacy_defaults(record, source) | {"given": tuple(record.get("given", ()))})


def check_settings(record: dict, source, config: Config, *roles):
    """Raise UserError with both values if a setting of these roles differs from the record: it can't change."""
    saved = from_record(record, source)
    derived = {setting.name: setting.metadata["derived"] for setting in flag_settings(Config)}
    # name the setting that was changed, not one derived from it
    for name in sorted(names_affecting(Config, *roles), key=lambda name: derived.get(name, False)):
        recorded, asked = getattr(saved, name), getattr(config, name)
        require(recorded == asked, f"{source} was made with {name.replace('_', '-')} {recorded}, but this run has "
                f"{asked}; give the same again, or start another run (with --load FOLDER --finetune from its weights, "
                "if the model is the same)")
