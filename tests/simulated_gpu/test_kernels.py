"""Every function that a run compiles is assembled for three generations of GPUs, which needs none.

The table says in how many kernels each function ends. A change that adds one reads and writes its tensors once more.
"""

import json
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.triton_kernels import FAMILIES, SHARED_MEMORY

# {function: kernels of its graphs}. A gradient of a norm's weight or of a bias is a sum over all rows. A sum takes two
# kernels, of which the second adds up the partial sums of the first.
ALL = {"residual_norm": {1}, "residual_norm_backward": {3, 4}, "max_and_sum_exp_of_rows": {1},
       "scaled_exp_of_rows": {1}}
WITHOUT_BIAS = ALL | {"residual_norm_backward": {3}}
KERNELS = {
    "gpt2": ALL, "dropout": ALL, "recomputed": ALL,
    "llama": WITHOUT_BIAS | {"norm_and_rotate": {2}, "norm_and_rotate_backward": {7, 8}, "swiglu": {1},
                             "swiglu_backward": {1}},
    "experts": WITHOUT_BIAS | {"choose": {5}, "weights": {2}, "loss": {5}},
    "tensorwise": ALL | {"to_8_bits": {3}, "t": {1}}, "rowwise": ALL | {"to_8_bits": {1, 3}}}
MOST_SPILLED = 16      # bytes of a thread: LayerNorm's backward in fp32


@pytest.fixture(scope="module", params=SHARED_MEMORY, ids="sm_{}".format)
def graphs(request):
    """What support/triton_kernels.py says of each graph of each family, for one compute capability."""
    if not find_spec("triton"):
        pytest.skip("needs triton: pip install triton")
    script = Path(__file__).parent.parent / "support/triton_kernels.py"
    ended = subprocess.run([sys.executable, script, str(request.param)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return request.param, [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.exhaustive
def test_every_compiled_function_is_assembled_into_few_kernels_that_fit(graphs):
    capability, graphs = graphs
    found = defaultdict(set)
    for graph in graphs:
        found[graph["family"], graph["function"]].add(len(graph["kernels"]))
        for kernel in graph["kernels"]:
            assert kernel["registers"] <= 255 and kernel["spilled"] <= MOST_SPILLED, graph
            assert kernel["shared"] <= SHARED_MEMORY[capability], graph
            assert not [one for one in kernel["odd"] if not one.endswith("numel")], graph       # pointers
    families = [family for family, settings in FAMILIES.items() if capability == 90 or "fp8_format" not in settings]
    assert found == {(family, name): count for family in families for name, count in KERNELS[family].items()}
