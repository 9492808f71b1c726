"""How long do Python and torch's dispatcher take to launch a layer's work?

A GPU computes a layer of a 13B model at tp 8 in about a millisecond. If the CPU needs longer than that to launch the
layer's kernels, the GPU idles. Here the tensors are tiny and torch's "fake" process group does not communicate, so
nearly all of the measured time is spent in Python and in torch's dispatcher. Each line below is a way to run a
microbatch forward and backward in slices:

    autograd                the GPT of model.py, with autograd, one slice after the other
    nanodomino              Domino (domino.py): slices are generators, and backward walks a tape without autograd
    nanodomino, compiled    the same with torch.compile; only with --compile

The times are microseconds per layer and slice. The times of the embedding and the head are included, divided among the
layers.

    python bench.py host
    python bench.py host --tp 1 --slices 1 --compile
"""

from argparse import BooleanOptionalAction
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.common import Times, about, add_config_flags, compare, config_here, describe, ratio_text, ratios, table
from nanodomino.comm.world import find_device
from nanodomino.config.config import Config
from nanodomino.data import Batch
from nanodomino.domino import Domino, run_to_end
from nanodomino.errors import require
from nanodomino.mesh import make_mesh
from nanodomino.model import GPT
from nanodomino.zero import ZeroOptimizer

MICROBATCHES = 10            # timed together in each round


def add_flags(parser):
    add_config_flags(parser, ("num_layers", "tensor_model_parallel_size", "slices", "columns", "normalization", "dtype",
                              "device"), num_layers=8, tensor_model_parallel_size=2, slices=2)
    parser.add_argument("--compile", action=BooleanOptionalAction, default=False, help="also measure compiled Domino")


def processes(flags) -> int:
    config_for(flags)
    return 1


def config_for(flags) -> Config:
    """Return the Config of a tiny model, with one sample per slice. Raises UserError."""
    require(1 <= flags.slices <= 64, f"--slices must be from 1 to 64, but is {flags.slices}; try 2")
    return config_here(flags, flags.tensor_model_parallel_size, pipeline_model_parallel_size=1, hidden_size=16,
                     num_attention_heads=8, seq_length=8, vocab_size=256, micro_batch_size=flags.slices,
                     global_batch_size=flags.slices)


def answer(flags, launch):
    from torch.testing._internal.distributed.fake_pg import FakeStore
    config = config_for(flags)
    device = find_device(config, launch)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=config.tp, store=FakeStore())
    mesh = replace(make_mesh(1, 1, config.tp, torch.device("cpu")), device=device)     # a CUDA mesh would need NCCL
    model = GPT(config, mesh)
    ZeroOptimizer(model, config, mesh)                   # gives each parameter its main_grad, where gradients are added
    rows = torch.zeros(config.micro_batch_size, config.seq_length + 1, dtype=torch.int64)
    batch = Batch.from_rows(rows, list(range(len(rows))), device=device)

    compilers = {"nanodomino": None}
    if flags.compile:
        compilers["nanodomino, compiled"] = partial(torch.compile, backend=config.compile_backend)
    sides = {"autograd": AutogradSide(model, batch, config.slices),
             **{name: DominoSide(Domino(model, config.slices, config.columns, compiler), batch)
                for name, compiler in compilers.items()}}
    alternatives = {(name, passes): repeated(getattr(side, passes)) for name, side in sides.items()
                    for passes in ("forward", "both")}
    return report(replace(config, device=device.type), compare(alternatives, flags.repeats, device))


def repeated(run_microbatch):
    """Return a function that calls run_microbatch() MICROBATCHES times."""
    def run_microbatches():
        for _ in range(MICROBATCHES):
            run_microbatch()
    return run_microbatches


class AutogradSide:
    """Runs a microbatch with autograd. forward() runs only the forward; both() runs forward and backward."""

    def __init__(self, model: GPT, batch: Batch, slices: int):
        self.model, self.slices = model, batch.split(slices)

    def forward(self):
        return [self.model(samples.tokens, samples.positions, samples.labels, sample_ids=samples.sample_ids)
                for samples in self.slices]

    def both(self):
        for losses in self.forward():
            losses.backward(torch.ones_like(losses))


class DominoSide:
    """Runs a microbatch with Domino. forward() returns the tape; both() runs forward and backward."""

    def __init__(self, stage: Domino, batch: Batch):
        self.stage, self.batch = stage, batch

    def forward(self):
        return run_to_end(self.stage.forward(self.batch))[1]

    def both(self):
        run_to_end(self.stage.backward(self.forward(), self.batch.loss_mask))


def report(config: Config, times: dict[tuple[str, str], Times]):
    """Return (text, record). times[name, "forward" or "both"]: seconds of MICROBATCHES microbatches."""
    microseconds = 1e6 / (MICROBATCHES * config.num_layers * config.slices)
    names = list(dict.fromkeys(name for name, _ in times))
    rows, record = [], about(config)
    for name in names:
        forward, both = times[name, "forward"], times[name, "both"]
        gain = ratios(times["autograd", "both"], both)
        key = name.replace(", ", "_")
        rows.append([name, f"{forward.median * microseconds:.0f} us", f"{both.median * microseconds:.0f} us",
                     ratio_text(gain) if name != "autograd" else ""])
        record |= {f"{key}_forward_us": forward.median * microseconds, f"{key}_us": both.median * microseconds,
                   **(gain.record(f"{key}_gain") if name != "autograd" else {})}
    text = (f"host time per layer and slice; {describe(config)}\n"
            + table(["", "forward", "forward and backward", "speed / autograd's"], rows))
    return text, record
