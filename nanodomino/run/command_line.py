"""Turns the command line into a Config. A setting that is not given may be remembered from a run or a checkpoint.

Each setting comes from the first of these sources that has it:

    flags  >  --config FILE  >  config.json of the resumed run  >  what --load takes over  >  defaults

So `train.py --run-dir runs/mine` alone resumes a run as it was. Some settings must not change when a run is resumed
(EFFECTS in settings/flags.py). run_folder.py checks them, once it has found the checkpoint.
"""

import argparse
from pathlib import Path

from nanodomino.checkpoint.load import recorded_settings
from nanodomino.files import read_json
from nanodomino.settings.config import Config
from nanodomino.settings.flags import Parser, add_flags, expand_home, flag_settings, names_affecting
from nanodomino.settings.records import check_record, remembered_settings, taken_over
from nanodomino.settings.rules import check_needs


def command_line_parser() -> Parser:
    """Return the parser of train.py. Flags that are not given are absent from its result."""
    parser = Parser("python train.py", description="Pre-train a GPT over tensor x pipeline x data parallel processes.",
                    usage="train.py [flags], alone or under torchrun", allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    add_flags(parser, flag_settings(Config))
    return parser


def from_command_line(arguments: list[str], world_size: int) -> Config:
    """Return the resolved Config of a command line.

    Raises UserError for an unknown flag, for a bad value or file, and for settings that contradict each other.
    """
    flags = vars(command_line_parser().parse_args(arguments))
    requested = read_settings(Path(flags["config"])) | flags if "config" in flags else flags
    run = recorded_settings(Path(requested["run_dir"])) if requested.get("run_dir") else None
    remembered, loaded, given = {}, None, {name for name, value in requested.items() if value is not None}
    if run:
        remembered = remembered_settings(check_record(run, requested["run_dir"]))
        given |= {*(run.get("given") or ())} - requested.keys()
    elif requested.get("load") and (loaded := recorded_settings(Path(requested["load"]))):
        remembered = taken_over(check_record(loaded, requested["load"]), requested.get("finetune"))
        given |= remembered.keys()
        longer = (requested.get("seq_length") or 0) > remembered.get("max_position_embeddings", 0)
        if longer and requested.get("finetune") and remembered.get("position_embedding_type") != "learned_absolute":
            remembered.pop("max_position_embeddings", None)    # no weight depends on it
    remembered["trained_positions"] = (run or loaded or {}).get("trained_positions")
    given -= set(names_affecting(Config, "launch"))
    config = Config(**remembered | requested, given=tuple(sorted(given))).resolve(world_size)
    check_needs(config, flags)
    return config


def read_settings(path: Path) -> dict:
    """Return the settings in a JSON file. null restores a default, even if the run remembers another value.

    The program writes `given` into a run's config.json. In a file without it, a user has given all the settings. Raises
    UserError.
    """
    record = {name: expand_home(value) for name, value in check_record(read_json(path), f"--config {path}").items()}
    unset = {setting.name: setting.default for setting in flag_settings(Config)
             if setting.name in record and record[setting.name] is None}
    return unset | (remembered_settings(record) if "given" in record else
                    {name: value for name, value in record.items() if value is not None})
