import argparse
import dataclasses

from nanodomino.config.setting import flag_name, flag_settings
from nanodomino.errors import UserError


# ---- the command line

class Parser(argparse.ArgumentParser):
    """argparse that raises UserError: every rank parses, one of them prints."""

    def error(self, message):
        raise UserError(f"{message}; {self.prog} --help lists every flag")


def add_flags(parser, flags: list[dataclasses.Field], **defaults):
    """These settings as flags; `defaults` take the place of their own."""
    groups = {}
    for one in flags:
        about, default, text = one.metadata, one.default, one.metadata["help"].replace("%", "%%")
        if one.name in defaults:
            default, text = defaults[one.name], text.partition(" (default")[0]
        if default is not None and default is not False:
            text += f" (default {default})"
        if parser.argument_default is not None:                # the parser's own word on what is not given
            default = parser.argument_default
        spellings = [flag_name(one.name)] + ([about["alias"]] if about["alias"] else [])
        if about["section"] not in groups:
            groups[about["section"]] = parser.add_argument_group(about["section"])
        group = groups[about["section"]]
        if about["type"] is bool:
            group.add_argument(*spellings, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            metavar = None if about["choices"] else about["type"].__name__.upper()
            group.add_argument(*spellings, type=about["type"], choices=about["choices"] or None, metavar=metavar,
                               default=default, help=text)


def markdown(config) -> str:
    """The table of all flags, a section each."""
    lines, section = [], None
    for one in flag_settings(config):
        about = one.metadata
        if about["section"] != section:
            section = about["section"]
            lines += ["", f"## {section}", "", "| flag | default | | when a run goes on |", "|---|---|---|---|"]
        spellings = ", ".join(f"`{name}`" for name in (about["alias"], flag_name(one.name)) if name)
        default = "" if one.default is None else f"`{one.default}`" if one.default is not False else "off"
        choices = f": {', '.join(f'`{choice}`' for choice in about['choices'])}" if about["choices"] else ""
        lines.append(f"| {spellings} | {default} | {about['help']}{choices} | {about['affects']} |")
    return "\n".join(lines)
