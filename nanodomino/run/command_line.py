"""Turns the command line into a Config. A setting that is not given may be remembered from a run or a checkpoint.

Each setting comes from the first of these sources that has it:

    flags  >  --config FILE  >  config.json of the resumed run  >  the model settings of --load  >  defaults

So `train.py --run-dir runs/mine` alone resumes a run as it was. Some settings must not change when a run is resumed
(EFFECTS in config/setting.py). run_folder.py checks them, once it has found the checkpoint.
"""

import argparse
import json
import re
from pathlib import Path

from nanodomino.checkpoint.find_checkpoints import recorded_settings
from nanodomino.config.config import Config
from nanodomino.config.flags import Parser, add_flags
from nanodomino.config.presets import SHORT_DTYPES
from nanodomino.config.rules import REFUSED_FLAGS, check_needs
from nanodomino.config.saved_settings import check_record, with_legacy_defaults
from nanodomino.config.setting import flag_name, flag_settings, names_affecting
from nanodomino.errors import UserError, require
from nanodomino.files import read_file
from nanodomino.run.run_folder import check_not_in_use


def command_line_parser() -> Parser:
    """Return the parser of train.py. Flags that are not given are absent from its result."""
    parser = Parser("python train.py", description="Pre-train a GPT over tensor x pipeline x data parallel processes.",
                    usage="train.py [flags], alone or under torchrun", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    add_flags(parser, flag_settings(Config))
    return parser


def from_command_line(arguments: list[str], world_size: int) -> Config:
    """Return the resolved Config of a command line.

    Raises UserError for an unknown flag, for a bad value or file, and for settings that contradict each other. If one
    of these settings was not given now but is remembered, the message says so.
    """
    for flag in (argument.partition("=")[0] for argument in arguments):
        require(flag not in REFUSED_FLAGS, f"{flag} is refused, because {REFUSED_FLAGS.get(flag)}")
    requested = vars(command_line_parser().parse_args(arguments))
    typed, unset = tuple(requested), {}
    if requested.get("config"):
        record = read_settings(Path(requested["config"]))
        # null in the file restores a default, even if the run remembers another value.
        unset = {setting.name: setting.default for setting in flag_settings(Config)
                 if setting.name in record and record[setting.name] is None and setting.metadata["affects"] != "launch"}
        # Only the program writes "given". In a file without it, a user has given all the settings.
        file = remembered_settings(record) if "given" in record else {
            name: value for name, value in record.items() if value is not None}
        if any(requested.get(flag) for flag in SHORT_DTYPES):      # a flag overrides the file's dtype
            file.pop("dtype", None)
        requested = unset | file | requested
    run = recorded_settings(Path(requested["run_dir"])) if requested.get("run_dir") else None
    remembered = remembered_settings(with_legacy_defaults(run, requested["run_dir"])) if run else {}
    given = {*requested, *(run or {}).get("given", ())} - unset.keys() | {*typed}
    if "dtype" not in requested and any(requested.get(flag) for flag in SHORT_DTYPES):
        remembered.pop("dtype", None)
        given.discard("dtype")
    if not run and requested.get("load") and (loaded := recorded_settings(Path(requested["load"]))):
        effects = ("model",) if requested.get("finetune") else ("model", "optimizer")
        names = names_affecting(Config, *effects) + ("seq_length",)
        remembered = {name: value for name, value in with_legacy_defaults(loaded, requested["load"]).items()
                      if name in names}
        given |= remembered.keys()
    given -= set(names_affecting(Config, "launch"))
    try:
        config = Config(**remembered | requested, given=tuple(sorted(given))).resolve(world_size)
        check_needs(config, typed)
        for flag, dtype in SHORT_DTYPES.items():
            require(requested.get(flag) is not False or flag not in typed or config.dtype != dtype,
                    f"--no-{flag} and --dtype {dtype} contradict each other; give another --dtype, such as float32")
        return config
    except UserError as error:
        rule = re.findall(r"\w[\w-]*", str(error).partition(";")[0])
        flags = [f"{flag_name(name)}, which {flag_name(name).replace('--', '--no-', 1)} turns off"
                 if remembered[name] is True else f"{flag_name(name)} {remembered[name]}"
                 for name in sorted(remembered.keys() - requested) if flag_name(name)[2:] in rule]
        note = f" (remembered, not given now: {', '.join(flags)})" if flags else ""
        if run:                                                # ending the live run is the first thing to do
            check_not_in_use(Path(requested["run_dir"]), f"another mistake: {error}{note}")
        raise UserError(f"{error}{note}") from None


def read_settings(path: Path) -> dict:
    """Return the settings in a JSON file. Raises UserError."""
    try:
        record = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} can't be read ({getattr(error, 'strerror', None) or error}); give a JSON "
                        "file such as a run's config.json") from None
    require(isinstance(record, dict), f"--config {path} must hold one JSON object {{setting: value}}; give a file such "
            "as a run's config.json")
    return check_record(record, f"--config {path}")


def remembered_settings(record: dict) -> dict:
    """Return the settings of a record that later launches reuse: all except launch-only and computed settings."""
    return {setting.name: record[setting.name] for setting in flag_settings(Config)
            if record.get(setting.name) is not None and setting.metadata["affects"] != "launch"
            and (not setting.metadata["derived"] or setting.name in record.get("given", ()))}
