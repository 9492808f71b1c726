"""Turns settings into command-line flags and into the tables of docs/settings.md."""

import argparse
import dataclasses
import os

from nanodomino.errors import UserError, require
from nanodomino.settings.flags import flag_name, flag_settings


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing: every rank parses, but only one may print."""

    def error(self, message):
        raise UserError(f"{message}; {self.prog} --help lists every flag")

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
    groups = {}
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
        flags = [flag_name(setting.name)] + ([options["alias"]] if options["alias"] else [])
        if options["section"] not in groups:
            groups[options["section"]] = parser.add_argument_group(options["section"])
        group = groups[options["section"]]
        if setting.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=default, help=help)
            continue
        group = group.add_mutually_exclusive_group() if options["short"] else group
        metavar = None if options["choices"] else setting.type.__name__.upper()
        group.add_argument(*flags, type=setting.type, choices=options["choices"] or None, metavar=metavar,
                           default=default, help=help)
        for flag, value in options["short"].items():
            group.add_argument(flag, dest=setting.name, action="store_const", const=value, default=default,
                               help=f"short for {flags[0]} {value}")


def markdown(config) -> str:
    """Return Markdown tables of all flags, one table per section. config: the Config class."""
    lines, section = [], None
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
