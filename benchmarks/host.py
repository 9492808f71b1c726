"""How long do Python and torch's dispatcher take to launch a layer's work?

A GPU idles if its work is launched too late: a layer of a 13B model at tp 8 takes about a millisecond. The sizes here
are so small that almost only the host's time remains, and torch's "fake" process group makes communication free. A
microbatch runs forward and backward in slices:

    autograd                the definition in model.py, with autograd, slice after slice
    nanodomino              Domino: generators, a tape, gradients by hand (domino.py)
    nanodomino, compiled    the same with torch.compile; with --compile

    python bench.py host
    python bench.py host --tp 1 --slices 1 --compile
"""

from argparse import BooleanOptionalAction
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.common import Times, add_config_flags, compare, config_of, ratio_text, ratios, table
from nanodomino.comm.world import find_device
from nanodomino.config.config import Config
from nanodomino.data import Batch
from nanodomino.domino import Domino, run_to_end
from nanodomino.errors import require
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer

MICROBATCHES = 10            # per round


def add_flags(parser):
    add_config_flags(parser, ("num_layers", "tensor_model_parallel_size", "slices", "columns", "normalization", "dtype",
                              "device"), num_layers=8, tensor_model_parallel_size=2, slices=2)
    parser.add_argument("--compile", action=BooleanOptionalAction, default=False, help="also measure compiled Domino")


def processes(flags) -> int:
    settle(flags)
    return 1


def settle(flags) -> Config:
    """Raises UserError."""
    require(1 <= flags.slices <= 64, f"--slices must be from 1 to 64, but is {flags.slices}")
    return config_of(flags, flags.tensor_model_parallel_size, pipeline_model_parallel_size=1, hidden_size=16,
                     num_attention_heads=8, seq_length=8, vocab_size=256, micro_batch_size=flags.slices,
                     global_batch_size=flags.slices)


def answer(flags, launch):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    config = settle(flags)
    device = find_device(config, launch)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=config.tp, store=FakeStore())
    mesh = replace(make_mesh(1, 1, config.tp, torch.device("cpu")), device=device)     # fake groups, no NCCL
    model = GPT(config, mesh)
    ZeroOptimizer(model, config, mesh)                   # gives each parameter its main_grad
    rows = torch.zeros(config.micro_batch_size, config.seq_length + 1, dtype=torch.int64, device=device)
    batch = Batch.from_rows(rows, list(range(len(rows))))

    backends = {"nanodomino": None, **({"nanodomino, compiled": config.compile_backend} if flags.compile else {})}
    sides = {"autograd": Autograd(model, batch, config.slices),
             **{name: Tape(Domino(model, config.slices, config.columns, backend), batch)
                for name, backend in backends.items()}}
    ways = {(name, way): repeated(getattr(side, way)) for name, side in sides.items() for way in ("forward", "both")}
    return report(config, device, compare(ways, flags.repeats, device))


def repeated(act):
    def several():
        for _ in range(MICROBATCHES):
            act()
    return several


class Autograd:
    def __init__(self, model: GPT, batch: Batch, slices: int):
        self.model, self.parts = model, batch.split(slices)

    def forward(self):
        return [self.model(part.tokens, part.positions, part.labels, sample_ids=part.sample_ids) for part in self.parts]

    def both(self):
        for losses in self.forward():
            losses.backward(torch.ones_like(losses))


class Tape:
    def __init__(self, stage: Domino, batch: Batch):
        self.stage, self.batch = stage, batch

    def forward(self):
        return run_to_end(self.stage.forward(self.batch))[1]

    def both(self):
        run_to_end(self.stage.backward(self.forward(), self.batch.loss_mask))


def report(config: Config, device, times: dict[tuple[str, str], Times]):
    """Return (text, record): microseconds per layer and slice, with embedding and head spread over the layers."""
    each = 1e6 / (MICROBATCHES * config.num_layers * config.slices)
    names = list(dict.fromkeys(name for name, _ in times))
    rows, record = [], {"question": "host", "tp": config.tp, "slices": config.slices, "columns": config.columns,
                        "num_layers": config.num_layers, "dtype": config.dtype, "device": device.type}
    for name in names:
        forward, both = (times[name, way] for way in ("forward", "both"))
        gain = ratios(times["autograd", "both"], both)
        key = name.replace(", ", "_")
        rows.append([name, f"{forward.median * each:.0f} us", f"{both.median * each:.0f} us",
                     ratio_text(gain) if name != "autograd" else ""])
        record |= {f"{key}_forward_us": forward.median * each, f"{key}_us": both.median * each,
                   **(gain.record(f"{key}_gain") if name != "autograd" else {})}
    text = (f"host time per layer and slice at tp {config.tp}, {config.slices} slices, {config.columns} columns, "
            f"{config.dtype} on {device.type}\n"
            + table(["", "forward", "forward and backward", "speed / autograd's"], rows))
    return text, record
