"""Print each message and collective when it is launched (train.py --verbose), indented by the rank:

       0.9 ms  0 F0 <-> all-reduce tp, layers.0.mlp a, 49.2 kB
       1.0 ms          1 F0 <-> all-reduce tp, layers.0.mlp a, 49.2 kB
      31.4 ms  0 F0 --> rank 2, 98.3 kB

A line shows: milliseconds since this rank began the step; the rank; F or B (forward or backward) and the microbatch;
what is sent; the sublayer and slice; the size of the whole tensor. Each rank prints for itself, to stderr, so lines
that are close in time may change places.
"""

import sys
import time

import torch.distributed as dist

from nanodomino.comm.trace import Trace

INDENT = 8                                                     # characters for each rank
LETTERS = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}


class VerboseTrace(Trace):
    """A Trace that prints what is sent in each step, whether or not it records."""
    start, action = None, ""

    def span(self, kind, **args):
        if kind == "step":
            self.start = time.perf_counter()
        elif kind in LETTERS:
            self.action = f"{LETTERS[kind]}{args['microbatch']}" + "'" * args["chunk"] + " "
        elif kind == "optimizer":
            self.action = ""
        return super().span(kind, **args)

    def moment(self, kind, **args):
        if kind == "send":                                     # the message is named after the action that sends it
            self.print(f"{args['message']} --> rank {args['peer']}", args["bytes"])
        super().moment(kind, **args)

    def watch(self, kind, work, **args):
        place = f", {args['site']} {chr(ord('a') + args['slice'])}" if "site" in args else ""
        self.print(f"{self.action}<-> {kind.replace('_', '-')} {args['group']}{place}", args["bytes"])
        super().watch(kind, work, **args)

    def print(self, text: str, size: int):
        if self.start is not None:                             # not while the run warms up
            milliseconds, rank = 1e3 * (time.perf_counter() - self.start), dist.get_rank()
            size = f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
            # a single write: the lines of two ranks must not mix
            sys.stderr.write(f"{milliseconds:8.1f} ms  {' ' * INDENT * rank}{rank} {text}, {size}\n")
