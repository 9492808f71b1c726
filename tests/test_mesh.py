"""What a process does to itself before it joins the others."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)       # no huge pages: a fault is one small page, whatever the system prefers
from nanodomino.mesh import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    tensors = [torch.ones(10_000_000) for _ in range(4)]
for _ in range(10):                  # until the heap has found its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 160e6)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc")
def test_freed_memory_serves_the_next_step():
    """Without it, the kernel takes back 160 MB after every step, and clears as many again."""
    share = {way: float(subprocess.run([sys.executable, "-c", FAULTS, way], cwd=Path(__file__).parent.parent,
                                       capture_output=True, text=True, check=True).stdout) for way in ("kept", "left")}
    assert share["kept"] < 0.01
    assert share["left"] > 0.5, "then there is no need for it any more"
