"""A model from Hugging Face becomes a checkpoint, and a checkpoint becomes a folder that Transformers loads.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json                    sizes and choices       families.py says how they are called
    DIR/model.safetensors              {name: tensor}, or several such files and an index, {name: file}
    DIR/tokenizer.json ...             the tokenizer's: they come along, there and back

**In bounded memory.** No model is ever whole. To import, torch.distributed.checkpoint is told the shapes alone; when it
comes to write a tensor it asks for it, and only then are its parts read, joined and made fp32. To export, one of our
tensors at a time is read, cut and rounded, and kept until its file is written: at most --max-shard-size.

**The same bits.** A 16-bit number is an fp32 number, so import loses nothing, and export, in the type that the model
came in, rounds to what it was. The vocabulary's padding is zeros, which nobody reads; it is not exported.

**Whole or not there.** All that can be wrong with names, shapes and sizes is found in the headers, before a tensor is
read. Then everything is written to a hidden folder beside the wanted one, flushed, and renamed.

safetensors files hold numbers and no program. What torch.save wrote (pytorch_model.bin) is a program, and not read.
"""

import argparse
import re
import sys
from pathlib import Path

from nanodomino.config.presets import DTYPES
from nanodomino.config.terminal import run_command
from nanodomino.errors import UserError, require
from nanodomino.huggingface.export_model import export_model
from nanodomino.huggingface.import_model import import_model

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


# ---- the command line

USAGE = ("python -m nanodomino.huggingface import DIR --output CHECKPOINT, or: "
         "python -m nanodomino.huggingface export CHECKPOINT DIR")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; usage: {USAGE}")


def size_in_bytes(text: str) -> int:
    """5GB, 500 MB, 1000000. Raises UserError."""
    found = re.fullmatch(r"([1-9][0-9]{0,14}) *([KMG]?B)?", text.strip().upper())
    require(found, f"--max-shard-size must be a number of B, KB, MB or GB, but is {text[:80]}; try 5GB")
    return int(found[1]) * UNITS[found[2] or ""]


def command_line() -> Parser:
    parser = Parser("python -m nanodomino.huggingface", allow_abbrev=False,
                    description="Models from and to Hugging Face, on one process without a GPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import | export")
    bring = commands.add_parser("import", help="make a checkpoint of a folder of Hugging Face's", allow_abbrev=False)
    bring.add_argument("folder", metavar="DIR", type=Path, help="the folder with config.json and the weights")
    bring.add_argument("--output", metavar="CHECKPOINT", type=Path, required=True,
                       help="the checkpoint to write, for --load of train.py and of nanodomino.generate")
    give = commands.add_parser("export", help="make a folder that Transformers loads", allow_abbrev=False)
    give.add_argument("folder", metavar="CHECKPOINT", type=Path,
                      help="a checkpoint, or the folder of a run (its newest intact one)")
    give.add_argument("out", metavar="DIR", type=Path, help="the folder to write, for from_pretrained")
    give.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the run's, or what was imported)")
    give.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of a file (default 5GB)")
    return parser


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    flags = command_line().parse_args(arguments)
    if flags.command == "import":
        print(import_model(flags.folder, flags.output))
    else:
        print(export_model(flags.folder, flags.out, flags.dtype, size_in_bytes(flags.max_shard_size)))
    return 0


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
