"""How a setting is declared: one line in Config gives a field its flag, its help text, its range and its rules.

    min_lr: float = setting("The training", None, "final learning rate", affects="losses", derived=True)

The flag, its line in --help and in docs/settings.md, its range check, and what happens when a run is resumed or an
older checkpoint is loaded all follow from this line. Five questions about four settings:

                                    normalization    min_lr                log_interval    trace
    where does its default come     the preset       resolve(): lr / 10    the line: 25    the line: None, off
      from?
    may a resumed run change it?    no               yes, losses change    yes             yes
    does a run remember it?         yes              only if given         yes             no
    what does a checkpoint that     LayerNorm        None, so lr / 10      25              None
      lacks it mean?
    which arguments say so?         affects="model"  affects="losses"      affects=        affects=
                                    legacy_default=  derived=True          "nothing"       "launch"

A setting is given if a flag or a --config file set it in this or an earlier launch of the run; Config.given lists the
names. A derived setting that was not given is computed again at each launch, since the settings that it is computed
from (the number of processes, lr) may have changed.
"""

import dataclasses
import math
from dataclasses import field

from nanodomino.errors import require

MAX_INT = 2**31 - 1      # larger integers overflow a C int somewhere, later and with an obscure message

# What changes if a resumed run, or a run that loads a checkpoint, gives the setting another value.
EFFECTS = {"model": "refused: the checkpoint's weights would not fit, or would mean something else",
           "optimizer": "refused, except with `--finetune`: the checkpoint's optimizer state would not fit",
           "run": "refused when a run is resumed: the remaining steps would use other data or other masks",
           "losses": "allowed; the losses change",
           "nothing": "allowed; the losses stay the same up to rounding",
           "launch": "applies to one launch only; a resumed run does not remember it"}


def setting(section, default, help, *, affects, choices=(), alias=None, at_least=None, above=None, below=None,
            derived=False, legacy_default=...):
    """Declare a field of Config that is also a command-line flag; the field's annotation is the flag's type.

    section: heading in --help; affects: a key of EFFECTS; choices: the allowed values; alias: a second spelling of the
    flag; at_least, above, below: the range (without at_least and above, integers start at 1 and floats at 0); derived:
    Config.resolve() computes a missing value from other settings; legacy_default: the value that checkpoints older than
    the setting were made with, or a function of their record (today's default if not given).
    """
    return field(default=default, metadata=dict(
        section=section, help=help, affects=affects, choices=tuple(choices), alias=alias, at_least=at_least,
        above=above, below=below, derived=derived,
        legacy_default=default if legacy_default is ... else legacy_default))


def flag_name(name: str) -> str:
    """Return the flag of a setting: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def names_affecting(config, *effects) -> tuple[str, ...]:
    """Return the names of the settings with these EFFECTS. config: the Config class or an instance."""
    return tuple(setting.name for setting in dataclasses.fields(config) if setting.metadata["affects"] in effects)


def flag_settings(config, *sections) -> list[dataclasses.Field]:
    """Return the fields that are flags, in these sections or in all."""
    return [setting for setting in dataclasses.fields(config)
            if "section" in setting.metadata and (not sections or setting.metadata["section"] in sections)]


def check_values(config):
    """Check the choices and the range of each setting on its own. Raises UserError."""
    for setting in flag_settings(config):
        rules, flag, value = setting.metadata, flag_name(setting.name), getattr(config, setting.name)
        require(value != "", f"{flag} must not be empty; give a name, or leave the flag out")
        if value is None:
            continue
        require(not rules["choices"] or value in rules["choices"],
                f"unknown {flag} '{value}'; try one of {', '.join(map(str, rules['choices']))}")
        at_least, above, below = rules["at_least"], rules["above"], rules["below"]
        if setting.type is int:
            at_least = 1 if at_least is None else at_least
            require(value >= at_least, f"{flag} must be at least {at_least}, but is {value}")
            require(value <= MAX_INT, f"{flag} must be at most {MAX_INT}, but is {value}")
        elif setting.type is float:
            inside = value >= (at_least or 0.0) if above is None else value > above
            low = f"at least {at_least or 0.0:g}" if above is None else f"above {above:g}"
            rule = (f"{low} and below {below:g}" if below is not None
                    else f"a finite number {'of ' if above is None else ''}{low}")
            require(inside and value < (math.inf if below is None else below),
                    f"{flag} must be {rule}, but is {value}")
