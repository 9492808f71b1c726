"""What a training step asks of a GPU, counted without one: support/fake_cuda.py's numbers against budgets.

A budget is some 3 % above what was counted when it was written. Beside it stands what it was when the softmax was kept
in fp32, and 16-bit gradients of weights were stored before they were added. Lower it with what you save.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import ROOT

SUPPORT = ROOT / "tests" / "support"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

GPT2 = dict(model="gpt2", dtype="bfloat16", micro_batch_size=16, global_batch_size=16, tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1, data_parallel_size=1)          # 16 x 1024 tokens, one microbatch
EIGHT = dict(model="nano", dtype="bfloat16", tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
             data_parallel_size=2, micro_batch_size=4, slices=2)           # 2 microbatches a replica
HOST = dict(model="nano", dtype="bfloat16", tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
            data_parallel_size=1, slices=2, micro_batch_size=4, global_batch_size=8, num_layers=4,
            recompute_granularity="full")
AGAIN = {"kept": (0, HOST), "on the host": (0, HOST | dict(checkpoint_in_cpu=True))}
CASES = {"gpt2": (0, GPT2), "first stage": (0, EIGHT), "last stage": (7, EIGHT),
         "uneven slices": (7, EIGHT | dict(slices=3, columns=2)),
         "sequence parallel": (7, EIGHT | dict(sequence_parallel=True, columns=2)),
         "fp16": (0, EIGHT | dict(pipeline_model_parallel_size=1, data_parallel_size=4, dtype="float16",
                                  fp16_lm_cross_entropy=True))}

GB = 1e9
TRAFFIC = {"forward": 15.3 * GB, "cross entropy": 33.9 * GB, "backward": 29.7 * GB, "update": 8.5 * GB,
           "rest": 0.52 * GB}                                              # 14.8, 46.1, 36.0, 8.2, 0.5
# 156, 31, 269, 140, 23
OPERATIONS = {"forward": 168, "cross entropy": 143, "backward": 300, "update": 144, "rest": 24}
PEAK = 8.63 * GB                                                           # 14.4
LOGITS = 16 * 1024 * 50264 * 2                                             # bytes
CROSS_ENTROPY_PEAK = 0.34 * LOGITS                                         # 4
COPIES = {"pageable": 0, "pinned": 1}                                      # from the host, of a microbatch; 4, 0


@pytest.fixture(scope="module")
def counted(request):
    """counted(case): what support/fake_cuda.py counted there. All cases run in one process, which has no other torch in
    it."""
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA devices of its own, and takes no other's; install a build for CPUs")
    if not COMPILER:
        pytest.skip("a device that is not there must be compiled, and there is no C++ compiler; install g++ or set CXX")
    library = request.config.cache.mkdir("fake_cuda") / f"torch-{torch.__version__}.so"
    source, root = SUPPORT / "fake_cuda.cpp", Path(torch.__file__).parent
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        made = library.with_suffix(f".{os.getpid()}")
        done = subprocess.run([COMPILER, "-std=c++20", "-shared", "-fPIC", source, "-o", made, f"-I{root / 'include'}",
                               f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"],
                              capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        made.replace(library)
    cases = [dict(rank=rank, settings=settings) for rank, settings in (CASES | AGAIN).values()]
    done = subprocess.run([sys.executable, SUPPORT / "fake_cuda.py", library, json.dumps(cases)],
                          capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return dict(zip(CASES | AGAIN, map(json.loads, done.stdout.splitlines()), strict=True)).get


@pytest.mark.parametrize("case", CASES)
def test_nothing_mixes_devices_and_the_host_waits_once_a_step(counted, case):
    """For the four numbers of the whole world, of which it must know whether to update."""
    counts = counted(case)
    assert not counts["mixed"] and not counts["skipped"]
    assert counts["waits"] == {"tolist": 1}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_from_the_host_comes_with_the_microbatch(counted, case):
    counts = counted(case)
    for memory, copies in counts["copies"].items():
        assert copies <= COPIES[memory] * counts["microbatches"]


@pytest.mark.parametrize("case", CASES)
def test_16_bit_gradients_of_weights_are_added_where_they_stay(counted, case):
    """One addmm into the fp32 gradient for each matrix and slice; no product of a matrix's shape lies in 16 bit."""
    counts = counted(case)
    slices = CASES[case][1].get("slices", 1)
    assert counts["names"]["aten.addmm.dtype_out"] == counts["matrices"] * slices * counts["microbatches"]
    assert counts["narrow_weight_gradients"] == 0


@pytest.mark.parametrize("case", ["gpt2", "first stage", "last stage"])
def test_copies_of_a_parameter_are_added_to_in_one_order_on_every_rank(counted, case):
    """index_add_ adds in whatever order threads come; so it is for the words alone, of which each rank has its own."""
    counts = counted(case)
    slices = CASES[case][1].get("slices", 1) if case != "last stage" else 0
    assert counts["names"].get("aten.index_add_.default", 0) == slices * counts["microbatches"]


def test_what_leaves_for_the_host_leaves_room_and_nobody_waits_for_it(counted):
    """Each x of 8 sublayers and two slices, of each microbatch; back come all but the last sublayer's, which are needed
    before they have gone. Where most is on the GPU these are left, and the residual stream."""
    kept, away = counted("kept"), counted("on the host")
    assert away["waits"] == kept["waits"] == {"tolist": 1} and not away["mixed"]
    assert away["copies"]["copy to the host"] == 8 * 2 * away["microbatches"]
    assert away["copies"]["pinned"] - kept["copies"]["pinned"] == 7 * 2 * away["microbatches"]
    assert kept["peak"] - away["peak"] >= 6 * 4 * 128 * 96 * 2


def test_a_stream_that_is_cut_travels_by_nccls_own_scatters_and_gathers(counted):
    """Of the last stage: for each of its sublayers, slices and columns two scatters and three gathers, one of each for
    the head, and ZeRO's own; no message between ranks of a host, as gloo has."""
    found = counted("sequence parallel")
    pieces, sublayers = 2 * 2 * found["microbatches"], found["sublayers"]
    assert found["names"]["c10d._reduce_scatter_base_.default"] == pieces * (2 * sublayers + 1) + found["buckets"]
    assert found["names"]["c10d._allgather_base_.default"] == pieces * (3 * sublayers + 1) + found["buckets"]
    assert not {name for name in found["names"] if name.startswith(("c10d.alltoall", "c10d.broadcast"))}


@pytest.mark.parametrize("part", TRAFFIC)
def test_memory_traffic_of_gpt2(counted, part):
    assert counted("gpt2")["traffic"][part] <= TRAFFIC[part]


@pytest.mark.parametrize("part", OPERATIONS)
def test_operations_of_gpt2(counted, part):
    """Each is a launch, which the host pays."""
    assert counted("gpt2")["operations"][part] <= OPERATIONS[part]


def test_memory_of_gpt2(counted):
    """Cross entropy takes less beside the logits than they take themselves."""
    assert counted("gpt2")["peak"] <= PEAK
    assert counted("gpt2")["cross_entropy_peak"] <= CROSS_ENTROPY_PEAK

