"""Checks that the files, functions, tests, flags and commands in documents exist, and that the README is one page."""

import ast
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from support import ROOT
from torch.torch_version import TorchVersion

from nanodomino.errors import UserError
from nanodomino.layers import gradients
from nanodomino.run.session import from_command_line


pytestmark = pytest.mark.table


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this copy is no git checkout")
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def text_of(path):
    return (ROOT / path).read_text(errors="replace")


def documents():
    return [path for path in tracked_files() if path.suffix == ".md"]


def anchors_of(path):
    """The anchors that GitHub makes of a document's headings, and those that it sets itself."""
    headings = re.findall(r"^#+ (.*)", text_of(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings} | {
        *re.findall(r'(?:name|id)="(.*?)"', text_of(path))}


def test_every_link_leads_to_a_file_and_a_heading():
    dead = []
    for path in documents():
        for link, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)#?([^)\s]*)\)", text_of(path)):
            target = path.parent / link if link else path
            if not (ROOT / target).exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
                dead.append(f"{path}: {link}#{anchor}")
    assert not dead


def test_every_python_file_that_is_named_exists():
    """A file is named by its path from the root or from nanodomino/, or by its name alone; tests are not searched."""
    files = tracked_files()
    known = {str(path) for path in files} | {path.name for path in files}
    known |= {"exercises/work/minimal.py", "exercises/work/beyond.py"}     # `python -m exercises start` writes them
    known |= {str(path.relative_to("nanodomino")) for path in files if path.parts[0] == "nanodomino"}
    sources = [path for path in files if path.suffix == ".py" and path.parts[0] not in ("tests", "data")]
    gone = [f"{path}: {name}" for path in documents() + sources
            for name in re.findall(r"(?<![\w/.])[\w-][\w/-]*\.py\b", text_of(path)) if name not in known]
    assert not gone


def test_every_name_that_a_document_places_in_a_file_is_defined_there():
    """Documents write `Mesh` in `mesh.py`, or `one_f_one_b`, `interleaved` in `schedules/definitions.py`. A class, a
    function, a method, a field or a variable has this name."""
    wrong = []
    for path in documents():
        for names, file in re.findall(r"((?:`[\w.]+`(?:\s\([fg]\))?(?:,\s|\sand\s)?)+)\s+in\s+`([\w/]+\.py)`",
                                      text_of(path)):
            sources = [source for source in (Path("nanodomino", file), Path(file)) if (ROOT / source).exists()]
            text = "".join(map(text_of, sources))
            wrong += [f"{path}: {name} in {file}" for name in re.findall(r"`([\w.]+)`", names)
                      if not all(re.search(rf"^ *(class|def) {part}\b|^(    )?{part}(: .*| = .*|, .* = .*)$", text,
                                           re.MULTILINE) for part in name.split("."))]
    assert not wrong


def test_every_test_that_a_document_names_exists():
    tests = " ".join(text_of(path) for path in tracked_files() if path.parts[0] == "tests" and path.suffix == ".py")
    gone = [f"{path}: {name}" for path in documents() for name in re.findall(r"`(test_\w+_\w+_\w+)`", text_of(path))
            if f"def {name}(" not in tests]
    assert not gone


def commands():
    """Yield (document, command) for each command in a document's shell blocks, without its comment."""
    for path in documents():
        for block in re.findall(r"```sh\n(.*?)```", text_of(path), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.partition("  #")[0].strip():
                    yield path, command


def test_every_module_and_flag_of_a_command_in_a_document_exists():
    sources = " ".join(text_of(path) for path in tracked_files() if path.suffix == ".py")
    settings = text_of("docs/settings.md")
    wrong = []
    for path, command in commands():
        own = re.split(r"(?=train\.py|-m nanodomino|data/prepare\.py|bench\.py|tests/)", command, maxsplit=1)[1:]
        wrong += [f"{path}: {flag}" for flag in re.findall(r"--[\w-]+", own[0] if own else "")
                  if f"`{flag}`" not in settings and f'"{flag}"' not in sources]
        wrong += [f"{path}: {module}" for module in re.findall(r"-m (nanodomino\.\w+)", command)
                  if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
                  and not (ROOT / module.replace(".", "/") / "__main__.py").exists()]
    assert not wrong


def test_every_training_command_in_a_document_is_accepted(tmp_path, monkeypatch):
    """The flags are valid together for that number of processes. Commands that load a checkpoint are skipped."""
    monkeypatch.chdir(tmp_path)
    for path, command in commands():
        found = re.search(r"(?:torchrun .*?--nproc_per_node (\d+) .*?|python )train\.py\b(.*)", command)
        if found and "--load" not in command:
            hosts = re.search(r"--nnodes (\d+)", command)
            arguments = shlex.split(found[2].replace("NAME", "1f1b").strip(" `'"))
            try:
                from_command_line(arguments, int(found[1] or 1) * int(hosts[1] if hosts else 1))
            except UserError as error:
                pytest.fail(f"{path}: {command}: {error}")


def test_the_tested_version_of_torch_is_the_one_that_runs_and_adds_16_bit_products_to_fp32(monkeypatch):
    (tested, first), = re.findall(r"tests run with torch ([\d.]+),.*?Before torch ([\d.]+),\s`addmm`",
                                  text_of("docs/running.md"), re.DOTALL)
    assert f"torch=={tested}\n" in text_of("requirements.txt") and torch.__version__.split("+")[0] == tested
    assert f"# From torch {first} on, CUDA can add" in text_of("nanodomino/layers/gradients.py")
    assert TorchVersion(tested) >= first and gradients.ADDS_TO_FP32
    for version in ("2.8.0", "2.9.1+cu128", f"{first}.0"):     # 2.8 and 2.9 have the operator and refuse fp32
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert runpy.run_path(gradients.__file__)["ADDS_TO_FP32"] == version.startswith(first)


@pytest.mark.parametrize("path", ["README.md", "docs/tour.md"])
def test_lines_and_minutes_of_a_file_or_folder_are_counted_with_500_lines_an_hour(path):
    rows = re.findall(r"^\| `([\w/]+(?:\.py|/))` \| (?:(\d+) \| )?(\d+) \|", text_of(path), re.MULTILINE)
    for name, lines, minutes in rows:
        files = (ROOT / name).glob("*.py") if name.endswith("/") else [ROOT / name]
        counted = sum(len(text_of(file).splitlines()) for file in files)
        assert counted * 60 / 500 == pytest.approx(int(minutes), abs=4), (name, counted)
        assert int(lines or counted) == counted, f"{path} must say that {name} has {counted} lines"
    assert rows


def test_the_readme_is_a_page_and_says_which_promises_the_default_tests_check():
    assert len(text_of("README.md").splitlines()) <= 120
    for names, says in re.findall(r"\| (`test_.*`) \| (.*) \|", text_of("README.md")):
        for name in re.findall(r"\w+", names):
            sources = [text for path in tracked_files() if f"def {name}(" in (text := text_of(path))]
            marks = [ast.unparse(mark) for source in sources for function in ast.parse(source).body
                     if getattr(function, "name", "") == name for mark in function.decorator_list]
            partly = "exhaustive" in " ".join(marks) or f"metafunc.function is {name}" in " ".join(sources)
            assert "pytest.mark.exhaustive" not in marks and ("`--exhaustive`" in says) == partly, name
