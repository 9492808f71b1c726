"""Verify or export checkpoints of any layout, in one process without a GPU.

    python -m nanodomino.checkpoint verify DIR        check every byte of a checkpoint, or of all checkpoints of a run
    python -m nanodomino.checkpoint export DIR OUT    write one plain torch file of full tensors, {name: tensor}
"""

import os
import sys
from pathlib import Path

import torch

from nanodomino.checkpoint.find_checkpoints import checkpoints_of, with_checkpoint
from nanodomino.checkpoint.load import full_weights
from nanodomino.checkpoint.manifest import verify
from nanodomino.config.flags import Parser
from nanodomino.errors import UserError, require, run_command, sentence_and_code
from nanodomino.files import check_outside_ours, new_file


def command_line() -> Parser:
    parser = Parser("python -m nanodomino.checkpoint", allow_abbrev=False,
                    description="Verify or export checkpoints of any layout, in one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify | export")
    for name, action, folder in [
            ("verify", "check every byte", "a checkpoint, or the folder of a run to verify all its checkpoints"),
            ("export", "write one plain torch file of full tensors, {name: tensor}",
             "a checkpoint, or the folder of a run to export its newest intact checkpoint")]:
        command = commands.add_parser(name, help=action, description=f"{action.capitalize()}.", allow_abbrev=False)
        command.add_argument("folder", metavar="DIR", type=Path, help=folder)
        if name == "export":
            command.add_argument("out", metavar="OUT", type=Path, help="the file to write; torch.load(OUT) reads it")
    return parser


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code. Raises UserError."""
    flags = command_line().parse_args(arguments)
    if flags.command == "verify":
        is_run = (flags.folder / "checkpoints").is_dir()
        return verify_all(checkpoints_of(flags.folder) if is_run else [flags.folder])
    folder, tensors = with_checkpoint(flags.folder, lambda checkpoint: export(checkpoint, flags.out))
    print(f"{flags.out}: {len(tensors)} tensors with {sum(tensor.numel() for tensor in tensors.values()):,} elements "
          f"from {folder}")
    return 0


def verify_all(folders: list[Path]) -> int:
    """Print a line per checkpoint. Return exit code 2 if one is damaged, else 0. Raises UserError if none exist."""
    require(folders, "this run has no checkpoint yet; give the folder of another run")
    code = 0
    for folder in folders:
        try:
            manifest = verify(folder)
            print(f"{folder} is intact: step {manifest['step']}, {len(manifest['files'])} files, "
                  f"{sum(file['size'] for file in manifest['files'].values()):,} bytes", flush=True)
        except (UserError, OSError) as error:
            print(f"error: {sentence_and_code(error)[0]}", file=sys.stderr)
            code = 2
    return code


def export(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Write the weights of a checkpoint to a file that torch.load(out, weights_only=True) reads, with the names of the
    unsharded model, and return them. Raises UserError if the file exists or can't be written."""
    check_outside_ours(out)
    require(not os.path.isfile(out), f"{out} already exists, and nothing is overwritten; choose another name, or move "
            "it away")
    tensors = full_weights(folder)
    try:
        with new_file(out) as file:                            # torch.save(tensors, path) would hide the system's error
            torch.save(tensors, file)
    except (OSError, RuntimeError) as error:                   # on a full disk torch's own error hides the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        raise UserError(f"{out} can't be written ({getattr(cause, 'strerror', error)}); choose another file") from None
    return tensors


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
