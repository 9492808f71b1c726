"""The commands `python -m nanodomino.huggingface import|export`; convert.py explains them."""

import sys
from pathlib import Path

from nanodomino.errors import run_command
from nanodomino.huggingface.convert import export_model, import_model
from nanodomino.settings.flags import Parser
from nanodomino.settings.presets import DTYPES


def main(arguments: list[str]):
    """Run a command, and print a line about the result. Raises UserError."""
    parser = Parser("python -m nanodomino.huggingface", allow_abbrev=False,
                    description="Convert models from and to Hugging Face's format, in one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export")
    importing = commands.add_parser("import", help="write a checkpoint from a Hugging Face folder", allow_abbrev=False)
    importing.add_argument("folder", metavar="DIR", type=Path, help="the folder with config.json and the weights")
    importing.add_argument("--output", metavar="CHECKPOINT", type=Path, required=True,
                           help="the checkpoint to write, for --load of train.py and of nanodomino.generate")
    importing.add_argument("--no-check", action="store_true", help="skip the comparison of a few logits with those of "
                           "Transformers, for a model too large for the memory: it needs 8 bytes per weight")
    exporting = commands.add_parser("export", help="write a folder that Transformers loads", allow_abbrev=False)
    exporting.add_argument("folder", metavar="CHECKPOINT", type=Path,
                           help="a checkpoint, or the folder of a run, whose newest intact checkpoint is exported")
    exporting.add_argument("out", metavar="DIR", type=Path, help="the folder to write, for from_pretrained")
    exporting.add_argument("--dtype", choices=DTYPES,
                           help="dtype of the weights (default: the dtype of the run or of the imported model)")
    flags = parser.parse_args(arguments)
    print(import_model(flags.folder, flags.output, not flags.no_check) if flags.command == "import"
          else export_model(flags.folder, flags.out, flags.dtype))


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
