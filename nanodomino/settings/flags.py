"""Declares settings, and turns them into command-line flags and the tables of docs/settings.md.

    min_lr: float = setting("The training", None, "final learning rate", affects="losses", derived=True)

This line in Config defines a field, its flag, its help, its row in docs/settings.md and its range check. It also
decides what happens when a run is resumed or an older checkpoint is loaded. Four settings as examples:

                                        normalization      min_lr               log_interval    trace
    default                             the preset's       lr / 10              25              None (off)
    may a resumed run change it?        no                 yes; losses change   yes             yes
    does a resumed run remember it?     yes                only if given        yes             no
    the argument affects=               "model"            "losses"             "nothing"       "launch"
    another argument                                       derived=True

A setting is *given* if a flag or a --config file set it, in this launch or in an earlier launch of the run, or if the
run took it from --load. Config.given lists the names. A derived setting that was not given is computed again at each
launch, because its sources (such as lr or the number of processes) may have changed.
"""

import argparse
import dataclasses
import os
from dataclasses import field
from difflib import get_close_matches
from functools import partial

from nanodomino.errors import UserError, require

MAX_INT = 2**31 - 1      # a larger integer would overflow a C int later, with an obscure message
FP32_MAX = (2 - 2**-23) * 2.0**127       # most float settings are used in fp32

# What happens if a run that resumes, or that loads a checkpoint, gives the setting another value.
EFFECTS = {"model": "refused, because the checkpoint's weights would not fit or would compute something else",
           "positions": "refused, because the checkpoint's weights would compute something else; allowed with `--load` "
                        "and `--finetune`, but not with learned positions",
           "optimizer": "refused, because the checkpoint's optimizer state would not fit; allowed with `--load` and "
                        "`--finetune`",
           "run": "refused when a run is resumed, because it would go on with other samples, masks or positions, or "
                  "because it would have no effect; allowed with `--load`",
           "losses": "allowed; the losses change",
           "nothing": "allowed; the losses stay the same up to rounding",
           "launch": "applies to one launch only; a resumed run does not remember it"}


def setting(section, default, help, *, needs=(), **options):
    """Declare a field of Config that is also a command-line flag. The field's annotation is the flag's type.

    section          the heading in --help
    affects          a key of EFFECTS
    choices          the allowed values
    alias            a second name of the flag, such as --tp
    short            {flag: value}: flags without a value that stand for a choice, such as --bf16
    at_least, above  the lower bound, inclusive or exclusive (default: at least 1 for an int, at least 0 for a float)
    at_most, below   the upper bound, inclusive or exclusive (default: at most the largest int32 or fp32)
    needs            what must hold for the setting to have an effect: one text or more that holds() in rules.py reads
    derived          a missing value is computed from other settings, the data or the machine
    """
    absent = dict(choices=(), alias=None, short={}, derived=False)
    return field(default=default, metadata=absent | options | dict(
        section=section, help=help, needs=(needs,) if isinstance(needs, str) else needs))


model_setting = partial(setting, "The model", affects="model")
training_setting = partial(setting, "The training", affects="losses")
data_setting = partial(setting, "The data", affects="run")
run_setting = partial(setting, "The run", affects="nothing")
machine_setting = partial(setting, "The machine", affects="nothing")


def layout_setting(default, help, **options):
    """Declare a setting of the layout, which is derived if it has no default."""
    return setting("The layout", default, help, affects="nothing", derived=default is None, **options)


def family_setting(help, **options):
    """Declare a setting whose default depends on the preset's family, such as GPT2 or LLAMA in presets.py."""
    return model_setting(None, f"{help} (default: the preset's)", **options)


def flag_name(name: str) -> str:
    """Return the flag of a setting: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def names_affecting(config, *effects) -> tuple[str, ...]:
    """Return the names of the settings with one of these effects (keys of EFFECTS). config: Config or an instance."""
    return tuple(setting.name for setting in dataclasses.fields(config) if setting.metadata["affects"] in effects)


def flag_settings(config, *sections) -> list[dataclasses.Field]:
    """Return the fields of Config that are flags: those in the given sections, or all if no section is given."""
    return [setting for setting in dataclasses.fields(config)
            if "section" in setting.metadata and (not sections or setting.metadata["section"] in sections)]


def check_values(config):
    """Check that each value is one of its setting's choices and in its range. Raises UserError."""
    for setting in flag_settings(config):
        rules, flag, value = setting.metadata, flag_name(setting.name), getattr(config, setting.name)
        if value is None:
            continue
        if choices := rules["choices"]:
            require(value in choices, f"unknown {flag} '{value}'; try one of {', '.join(map(str, choices))}")
        elif setting.type in (int, float):
            bounds = {name: rules[name] for name in ("at_least", "above", "at_most", "below") if name in rules}
            check_range(flag, value, **bounds, type=setting.type)


def check_range(flag: str, value, at_least=None, above=None, at_most=None, below=None, type=int):
    """Raise UserError unless `value` lies in its range. setting() says what the bounds mean."""
    at_least = (1 if type is int else 0.0) if at_least is None else at_least
    at_most = (MAX_INT if type is int else FP32_MAX) if at_most is None else at_most
    inside = ((value >= at_least if above is None else value > above)
              and (value <= at_most if below is None else value < below))
    low = f"at least {at_least:g}" if above is None else f"above {above:g}"
    high = f"at most {at_most:{'g' if type is float else 'd'}}" if below is None else f"below {below:g}"
    require(inside, f"{flag} must be {low} and {high}, but is {value}")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing: every rank parses, but only one may print."""

    def error(self, message):
        unknown = message.removeprefix("unrecognized arguments: ").strip().partition(" ")[0].partition("=")[0]
        close = "".join(f"did you mean {flag}? " for flag in get_close_matches(unknown, self._option_string_actions, 1))
        raise UserError(f"{message}; {close}{self.prog} --help lists every flag")

    def parse_known_args(self, args=None, namespace=None):
        """Parse as ArgumentParser does, but refuse an empty value, and replace a leading ~ by the home directory, as a
        shell does in `--flag ~/x` and not in `--flag=~/x`. A prompt stays as it is."""
        parsed, rest = super().parse_known_args(args, namespace)
        for name, value in vars(parsed).items():
            require(value != "" or name == "prompt",
                    f"{flag_name(name)} must not be empty, but is ''; give a value, or leave it out")
            setattr(parsed, name, value if name == "prompt" else expand_home(value))
        return parsed, rest


def expand_home(value):
    """Return a path, or a list of paths, with a leading ~ replaced by the home directory; other values as they are."""
    if isinstance(value, list):
        return [expand_home(each) for each in value]
    return type(value)(os.path.expanduser(value)) if isinstance(value, (str, os.PathLike)) else value


def add_flags(parser, settings: list[dataclasses.Field], **defaults):
    """Add a flag to `parser` for each setting. defaults: {name: value}, which replace the settings' own defaults."""
    sections = dict.fromkeys(setting.metadata["section"] for setting in settings)
    groups = {section: parser.add_argument_group(section) for section in sections}
    for setting in settings:
        options, default, help = setting.metadata, setting.default, setting.metadata["help"].replace("%", "%%")
        if setting.name in defaults:
            default, help = defaults[setting.name], help.partition(" (default")[0]
        if options["needs"]:
            help += f"; needs {' and '.join(options['needs'])}"
        if default is not None and default is not False:
            help += f" (default {default})"
        if parser.argument_default is not None:                # SUPPRESS: leave out flags that are not given
            default = parser.argument_default
        flags, group = [flag_name(setting.name), *filter(None, [options["alias"]])], groups[options["section"]]
        if setting.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=help)
            continue
        group = group.add_mutually_exclusive_group() if options["short"] else group
        shown = dict(choices=options["choices"]) if options["choices"] else dict(metavar=setting.type.__name__.upper())
        group.add_argument(*flags, type=setting.type, default=default, help=help, **shown)
        for flag, value in options["short"].items():
            group.add_argument(flag, dest=setting.name, action="store_const", const=value, default=default,
                               help=f"short for {flags[0]} {value}")


def markdown(config) -> str:
    """Return docs/settings.md, with a table of flags for each section. config: the Config class."""
    lines, section = ["""# Settings

This page is generated by `python -m nanodomino.settings.config > docs/settings.md`.
A JSON file can give the same settings: `--config FILE`. Its keys are those of a run's `config.json`:
`--seq-length` is `seq_length`, and `--tp` is `tensor_model_parallel_size`.

The last column says what happens if a run that resumes, or that starts from `--load`, changes the setting:
""", *(f"- *{effect}*: {meaning}" for effect, meaning in EFFECTS.items())], None
    for setting in flag_settings(config):
        options = setting.metadata
        if options["section"] != section:
            section = options["section"]
            lines += ["", f"## {section}", "", "| flag | default | meaning | a change affects |", "|---|---|---|---|"]
        names = (options["alias"], flag_name(setting.name), *options["short"])
        flags = ", ".join(f"`{flag}`" for flag in names if flag)
        default = "" if setting.default is None else "off" if setting.default is False else f"`{setting.default}`"
        choices = f": {', '.join(f'`{choice}`' for choice in options['choices'])}" if options["choices"] else ""
        needs = f"; needs {' and '.join(options['needs'])}" if options["needs"] else ""
        lines.append(f"| {flags} | {default} | {options['help']}{choices}{needs} | {options['affects']} |")
    return "\n".join(lines)
