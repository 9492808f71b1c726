"""Every function that a run compiles is assembled for three generations of GPUs, which needs none.

The table shows what the compiler makes of each function. A launch costs the host some microseconds, and each kernel
reads its inputs from the GPU's memory, so one launch is best. Some functions need more:

    the gradient of a weight   is a sum over all rows. One kernel computes the gradient of x, row by row, and partial
                               sums over rows; for each weight and bias another kernel adds these up
    a row-parallel bias        its gradient sums the complete gradient of x, over rows: two kernels more, because the
                               compiler fuses sums over rows and over columns only if neither needs the other
    fewer than 5 Mi elements   as in k's norm here: partial sums are then computed in a kernel of their own
    q, k and v                 have different sizes, so each has its own kernels
    a sort                     is torch's kernel, not the compiler's
    tensorwise fp8             finds the largest number first, in two kernels
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import needs
from support.triton_kernels import SHARED_MEMORY

# function: (launches of its graphs, limits of the registers of a thread and of the shared bytes of a thread block)
KERNELS = {
    "residual_norm": ({1}, 128, 0),
    "residual_norm_backward": ({2, 3, 5}, 128, 41_000),        # RMSNorm; LayerNorm; with a row-parallel bias, too
    "norm_and_rotate": ({2}, 128, 64),
    "norm_and_rotate_backward": ({7}, 128, 40_000),
    "swiglu": ({1}, 64, 0),
    "swiglu_backward": ({1}, 64, 0),
    "max_and_sum_exp_of_rows": ({1}, 64, 64),
    "scaled_exp_of_rows": ({1}, 64, 0),
    "choose": ({5}, 64, 0),
    "weights": ({2}, 64, 0),
    "weights_gradient": ({2}, 64, 2048),
    "loss": ({5}, 64, 512),
    "loss_gradient": ({2}, 64, 0),
    "to_8_bits": ({1, 3}, 64, 8192),
    "t": ({1}, 64, 1024),                                      # tensorwise fp8's transpose
}


@pytest.mark.exhaustive
def test_every_compiled_function_is_assembled_into_few_kernels_that_fit():
    """No register is spilled to memory, and every pointer is known to be divisible by 16, so loads take 16 bytes."""
    needs("triton")
    script = Path(__file__).parent.parent / "support/triton_kernels.py"
    ended = subprocess.run([sys.executable, script, *map(str, SHARED_MEMORY)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {}
    for graph in map(json.loads, ended.stdout.splitlines()):
        found.setdefault(graph["function"], set()).add(graph["launches"])
        _, registers, shared = KERNELS[graph["function"]]
        for kernel in graph["kernels"]:
            assert kernel["registers"] <= registers and not kernel["spilled"], graph
            assert kernel["shared"] <= min(shared, SHARED_MEMORY[graph["capability"]]), graph
            assert all(argument.endswith("numel") for argument in kernel["odd"]), graph
    assert found == {function: launches for function, (launches, *_) in KERNELS.items()}
