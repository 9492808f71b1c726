"""From the command line to a Config: what somebody asks for now, and what a run or a checkpoint remembers.

    flags  >  --config FILE  >  the run's own config.json  >  the model of --load  >  Config's defaults

So `train.py --run-dir runs/mine` alone goes on as before. What is asked for must agree with what the run was made with,
or be a change that it can honour (EFFECTS in settings.py): launch.py sees to that, once the checkpoint is found.

Some settings follow from others (tp from the number of processes, min_lr from lr). Unless somebody once gave them they
are not remembered but filled in anew, so that a run may go on with other processes, or at another rate.
"""

import argparse
import json
import os
import re
from pathlib import Path

from nanodomino.checkpoint.folders import recorded_settings
from nanodomino.config.config import Config
from nanodomino.config.flags import Parser, add_flags
from nanodomino.config.presets import SHORT_DTYPES
from nanodomino.config.records import check_record, with_legacy_defaults
from nanodomino.config.setting import flag_name, flag_settings, names_affecting
from nanodomino.errors import UserError, require


def command_line_parser() -> Parser:
    """The flags, made from Config's fields. What is not given stays away from what it parses."""
    parser = Parser("python train.py", description="Pre-train a GPT over tensor x pipeline x data parallel processes.",
                    usage="train.py [flags], alone or under torchrun", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    add_flags(parser, flag_settings(Config))
    return parser


def from_command_line(arguments: list[str], world_size: int) -> Config:
    """Flags -> Config, resolved. Raises UserError for a flag, value or file that is none, and for sizes that don't go
    together, which names those that nobody gave now."""
    asked = vars(command_line_parser().parse_args(arguments))
    if asked.get("tensorboard_dir"):                           # a start from elsewhere will mean the same one
        asked["tensorboard_dir"] = os.path.abspath(asked["tensorboard_dir"])
    if asked.get("config"):
        record = read_settings(Path(asked["config"]))
        unset = {name: None for name, value in record.items() if value is None and name not in names_affecting(Config, "launch")}
        asked = unset | remembered(record) | asked             # null: the default, whatever a run remembers
    run = recorded_settings(Path(asked["run_dir"])) if asked.get("run_dir") else None
    before = remembered(with_legacy_defaults(run, asked["run_dir"])) if run else {}
    given = {*asked, *(run or {}).get("given", ())}
    if "dtype" not in asked and any(asked.get(name) for name in SHORT_DTYPES):     # another word for it has been given
        before.pop("dtype", None)
        given.discard("dtype")
    if not run and asked.get("load") and (loaded := recorded_settings(Path(asked["load"]))):
        brought = names_affecting(Config, *(("model",) if asked.get("finetune") else ("model", "optimizer"))) + ("seq_length",)
        before = {name: value for name, value in with_legacy_defaults(loaded, asked["load"]).items() if name in brought}
        given |= before.keys()
    config = Config(**before | asked, given=tuple(sorted(given - set(names_affecting(Config, "launch")))))
    try:
        return config.resolve(world_size)
    except UserError as error:
        rule = re.findall(r"\w[\w-]*", str(error).partition(";")[0])
        not_now = [f"{flag_name(name)}, which {flag_name(name).replace('--', '--no-', 1)} turns off"
                   if before[name] is True else f"{flag_name(name)} {before[name]}"
                   for name in sorted(before.keys() - asked) if flag_name(name)[2:] in rule]
        note = f" (as remembered from before: {', '.join(not_now)})" if not_now else ""
        raise UserError(f"{error}{note}") from None


def read_settings(path: Path) -> dict:
    """The settings of a JSON file. Raises UserError."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} can't be read ({error}); give a run's config.json, or a file like it"
                        ) from None
    require(isinstance(record, dict), f"--config {path} must hold one JSON object {{setting: value}}; give a run's "
            "config.json, or a file like it")
    return check_record(record, f"--config {path}")


def remembered(record: dict) -> dict:
    """Of a record what still holds when a run goes on: neither what was of one start alone, nor what followed."""
    return {one.name: record[one.name] for one in flag_settings(Config)
            if record.get(one.name) is not None and one.metadata["affects"] != "launch"
            and (not one.metadata["derived"] or one.name in record.get("given", ()))}
