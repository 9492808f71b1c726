"""The commands `python -m nanodomino.huggingface import|export`; the package's docstring shows them."""

import sys
from pathlib import Path

from nanodomino.errors import run_command
from nanodomino.huggingface.convert import export_model, import_model
from nanodomino.settings.flags import Parser
from nanodomino.settings.presets import DTYPES


def command_line() -> Parser:
    parser = Parser("python -m nanodomino.huggingface", allow_abbrev=False,
                    description="Convert models from and to Hugging Face's format, in one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export")
    importing = commands.add_parser("import", help="write a checkpoint from a Hugging Face folder", allow_abbrev=False)
    importing.add_argument("folder", metavar="DIR", type=Path, help="the folder with config.json and the weights")
    importing.add_argument("--output", metavar="CHECKPOINT", type=Path, required=True,
                           help="the checkpoint to write, for --load of train.py and of nanodomino.generate")
    exporting = commands.add_parser("export", help="write a folder that Transformers loads", allow_abbrev=False)
    exporting.add_argument("folder", metavar="CHECKPOINT", type=Path,
                           help="a checkpoint, or the folder of a run, whose newest intact checkpoint is exported")
    exporting.add_argument("out", metavar="DIR", type=Path, help="the folder to write, for from_pretrained")
    exporting.add_argument("--dtype", choices=DTYPES,
                           help="dtype of the weights (default: the dtype of the run or of the imported model)")
    return parser


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code. Raises UserError."""
    flags = command_line().parse_args(arguments)
    if flags.command == "import":
        print(import_model(flags.folder, flags.output))
    else:
        print(export_model(flags.folder, flags.out, flags.dtype))
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
