"""Settings that are declared once: fields of a dataclass that are flags, have a range, and know what a change means.

    num_layers: int = setting("The model", None, "transformer layers", role="model", kind=int)

From that line follow the flag, its line in --help and in docs/settings.md, its check, and whether a run that goes on
may change it. config.py declares them; nothing here knows which there are.
"""

import dataclasses
import math
from dataclasses import field

from nanodomino.errors import require

LARGEST = 2**31 - 1      # of every whole number: beyond it some C int or list of ours overflows, later and less clearly

# What it means to give a setting another value than a checkpoint or a run that has begun was made with.
ROLES = {"model": "another model: its weights would not fit, or mean something else",
         "optimizer": "its state would not fit",
         "run": "the rest would be another run: other data, other masks",
         "learning": "allowed, and its losses will show it",
         "free": "allowed, and the numbers stay the same to rounding",
         "launch": "of this start alone: a run that goes on does not remember it"}


def setting(section, default, text, *, role, choices=(), short=None, kind=None, least=None, above=None, below=None,
            follows=False, absent=...):
    """A field of Config that is also a command line flag.

    default: None means that resolve() fills it in: from the preset, or where `follows`, from other settings, so that
    it is filled in anew when those change; choices: a table, by name; kind: its type; least, above, below: its range
    (whole numbers from 1 on, others from 0 on); role: of ROLES; absent: what a checkpoint that does not know the
    setting was made with (the default at the time when the setting was new), or a function of its record.
    """
    kind = kind or type(default)
    if least is None and above is None:
        least = {int: 1, float: 0.0}.get(kind)
    return field(default=default, metadata=dict(
        section=section, text=text, role=role, choices=tuple(choices), short=short, kind=kind, least=least, above=above,
        below=below, follows=follows, absent=default if absent is ... else absent))


def spelling(name: str) -> str:
    """The flag of a field: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def names(config, *roles) -> tuple[str, ...]:
    """The settings of these ROLES. config: the dataclass, or an instance of it."""
    return tuple(one.name for one in dataclasses.fields(config) if one.metadata["role"] in roles)


def flags_of(config, *sections) -> list[dataclasses.Field]:
    """The settings that are flags, of these sections or of all."""
    return [one for one in dataclasses.fields(config)
            if "section" in one.metadata and (not sections or one.metadata["section"] in sections)]


def check_values(config):
    """Every setting that is given, by itself: its choices and its range. Raises UserError."""
    for one in flags_of(config):
        about, name, value = one.metadata, spelling(one.name), getattr(config, one.name)
        require(value != "", f"{name} must not be empty; give a name, or leave the flag out")
        if value is None:
            continue
        require(not about["choices"] or value in about["choices"],
                f"unknown {name} '{value}'; try one of {', '.join(map(str, about['choices']))}")
        if about["kind"] is int:
            require(value >= about["least"], f"{name} must be at least {about['least']}, but is {value}")
            require(value <= LARGEST, f"{name} must be at most {LARGEST}, but is {value}")
        elif about["kind"] is float:
            least, above, below = about["least"], about["above"], about["below"]
            low = f"above {above:g}" if least is None else f"at least {least:g}"
            rule = (f"{low} and below {below:g}" if below is not None
                    else f"a finite number {'of ' if least is not None else ''}{low}")
            inside = value > above if least is None else value >= least
            require(inside and value < (math.inf if below is None else below),
                    f"{name} must be {rule}, but is {value}")
