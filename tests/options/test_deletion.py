"""Each option can be deleted, with its line in config/options.py: what is left trains, and is as exact as before."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.runs import TINY, make_corpus

from nanodomino.config.options import OPTIONS

NAMES = [option.__name__.split(".")[2] for option in OPTIONS]


def copy_without(gone: list[str], folder: Path) -> Path:
    """Copy the project, without some options and their lines in the list."""
    for part in ("nanodomino", "data", "tests", "benchmarks", "exercises"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "python-stdlib"))
    for file in ("train.py", "bench.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)
    listed = folder / "nanodomino/config/options.py"
    for name in gone:
        path = folder / "nanodomino/options" / name
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
        text, count = re.subn(rf'    "{name}\b.*\n', "", listed.read_text())
        assert count == 1
        listed.write_text(text)
    return folder


def run(folder, *command) -> tuple[int, str]:
    """Run Python in a folder; return (exit code, output)."""
    ended = subprocess.run([sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True,
                           timeout=600, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("gone", [NAMES, *(pytest.param([name], marks=pytest.mark.exhaustive) for name in NAMES)],
                         ids=lambda gone: gone[0] if len(gone) == 1 else "all")
def test_without_an_option_the_rest_trains_and_is_exact(tmp_path, gone):
    """Four ranks train with train.py. Two layouts are compared with one plain process."""
    folder = copy_without(gone, tmp_path / "copy")
    code, output = run(folder, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 4, "train.py", *TINY,
                       "--data-path", make_corpus(tmp_path), "--run-dir", "run", "--train-iters", 2)
    assert code == 0 and "2 of 2 steps done" in output, output
    code, output = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/exactness/test_dense.py")
    assert code == 0 and "FAILED" not in output and output.startswith(".."), output


def test_the_flags_of_a_missing_option_get_one_sentence(tmp_path):
    """Help shows only what is left. A plan needs none of the options; a search would try them."""
    folder = copy_without(NAMES, tmp_path)
    code, output = run(folder, "train.py", "--help")
    settings = {name for option in OPTIONS for name in option.Settings.__dict__.get("__annotations__", {})}
    flags = {"--" + name.replace("_", "-") for name in settings}
    assert code == 0 and len(flags) > 20 and not flags & set(re.findall(r"--[\w-]+", output))
    code, output = run(folder, "train.py", "--num-experts", 4)
    assert code == 2 and output.count("\n") == 1 and "unrecognized arguments: --num-experts 4" in output
    plan = ("bench.py", "plan", "--model", "gpt2", "--num-layers", 2, "--gpus", 8)
    assert '"fits": true' in run(folder, *plan)[1]
    code, output = run(folder, *plan, "--search")
    assert code == 2 and output.count("\n") == 1 and "copy lacks (checkpoint_in_cpu, context_parallel_size" in output
