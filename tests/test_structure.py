"""The shape of the code: imports point one way, the files of the story load little, and the maps name every file."""

import ast
import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.table
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanodomino"

# A module or package of nanodomino may import itself and whatever stands to its left. Scripts come last.
ORDER = [
    "minimal", "errors", "files", "comm", "mesh", "optim", "parallel", "layers", "schedules", "corpus", "data",
    "model", "overlap", "domino", "pipeline", "zero", "generate", "options", "settings", "checkpoint",
    "huggingface", "pictures", "estimate", "run", "scripts"]


def place_of(module: str) -> int:
    """The place in ORDER of a dotted module name: nanodomino.layers.sublayers stands where layers does."""
    head, *names = module.split(".")
    return ORDER.index(names[0] if head == "nanodomino" and names[-1] != "__main__" else "scripts")


def imported_modules(path, at_its_top=False):
    """The names of the nanodomino modules that a file imports, at its top or also inside a function."""
    module = ast.parse(path.read_text())
    for node in module.body if at_its_top else ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("nanodomino."))
        elif isinstance(node, ast.ImportFrom) and node.module == "nanodomino":
            yield from (f"nanodomino.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanodomino."):
            yield node.module


def test_imports_point_only_to_the_left():
    backward = []
    for path in sorted(PACKAGE.glob("**/*.py")):
        importer = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        backward += [f"{importer} imports {module}" for module in imported_modules(path)
                     if place_of(module) > place_of(importer)]
    assert not backward


def loaded_with(module: str, found: set) -> set:
    """Add to `found` a module and the files of nanodomino that importing the module loads, and return it."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if module not in found and path.exists():
        found.add(module)
        for name in imported_modules(path, at_its_top=True):
            loaded_with(name, found)
    return found


@pytest.mark.parametrize("module, most", [("parallel", 4), ("domino", 10)])
def test_importing_a_file_of_the_story_loads_few_others(module, most):
    loaded = loaded_with(f"nanodomino.{module}", set())
    assert 1 < len(loaded) <= most, loaded


def test_the_core_names_no_option():
    """Only the place of choices imports from options/, and an option may import another."""
    importers = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
                 if any(module.startswith("nanodomino.options") for module in imported_modules(path))}
    assert {path for path in importers if not path.startswith("options/")} == {"settings/choices.py"}


def test_at_most_ten_files_lie_directly_in_nanodomino():
    """Not counting __init__.py, which holds the map."""
    assert len([path for path in PACKAGE.glob("*.py") if path.stem != "__init__"]) <= 10


def test_the_map_names_every_folder_and_file():
    """It names no file that is gone, either. Besides it, the only __init__.py checks Python's version, and no more."""
    assert [*PACKAGE.rglob("__init__.py")] == [PACKAGE / "__init__.py"]
    node, *others = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert [type(other) for other in others] == [ast.Import, ast.If]
    words = set(re.findall(r"\w+", node.value.value))
    present = {path.stem for path in PACKAGE.rglob("*.py")} | {f.name for f in PACKAGE.iterdir() if f.is_dir()}
    assert not present - words - {"__init__", "__main__", "__pycache__"}
    named = re.findall(r"^    (?:(\w+)/|(\w+)\.py) ", node.value.value, re.MULTILINE)
    assert {name for pair in named for name in pair if name} <= present


def test_files_are_opened_to_write_in_files_py_alone():
    """It refuses links and pipes. Two exceptions: the null device, and the file that torchrun names."""
    writes = re.compile(r"""\.write_(text|bytes)\(|copyfile\(|touch\(|os\.open\(|open\([^)]*["'](r\+|[wax])""")
    paths = {*PACKAGE.rglob("*.py"), *ROOT.glob("*.py"), *ROOT.glob("[bd]*/*.py")} - {PACKAGE / "files.py"}
    found = [f"{path}: {line}" for path in paths for line in path.read_text().splitlines() if writes.search(line)]
    assert not [line for line in found if not re.search("devnull|TORCHELASTIC|O_RDONLY|open_regular_file", line)]


def test_a_training_step_asks_in_one_place_for_which_device_it_runs():
    """comm/device.py, so that a dry run takes the paths of a GPU. What starts, saves or observes a run asks itself."""
    asks = re.compile(r"""is_cuda|\.type [!=]= ["']cuda|torch\.cuda\.(is_available|get_device_capability)""")
    elsewhere = {"comm/device.py", "comm/world.py", "comm/trace.py", "mesh.py",
                 "settings/config.py", "settings/rules.py"}
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if asks.search(path.read_text())}
    assert not [one for one in found - elsewhere if not one.startswith(("run/", "checkpoint/", "estimate/"))]
