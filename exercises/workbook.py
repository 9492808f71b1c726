"""The workbook: which functions of minimal.py and beyond.py are exercises, and what the student wrote in their place.

A def or class line that ends with `# exercise N` belongs to exercise N. A work file is a copy of minimal.py or of
beyond.py. There, `# exercise N` marks the reference, and `# exercise N, yours` a blank or an answer.
"""

import ast
import importlib
import re
import traceback
import types
from functools import cache
from pathlib import Path

from .fake_ranks import Endless, FakeDistributed, RankError

FOLDER = Path(__file__).resolve().parent
MINIMAL = FOLDER.parent / "nanodomino" / "minimal.py"
SOURCES = (MINIMAL, FOLDER / "beyond.py")
WORK = FOLDER / "work"
CHECKS = {1: "rank_grid", 2: "f_and_g", 3: "cross_entropy", 4: "sublayer", 5: "one_f_one_b", 6: "exchange",
          7: "interleave", 8: "backward", 9: "optimizer", 10: "norm", 11: "interleaved", 12: "rows", 13: "reports",
          14: "pair", 15: "embedding", 16: "balance"}
MARK = re.compile(r"\s*# exercise (\d+)(, yours)?$")


class Wrong(Exception):
    """What is wrong with an answer, in one sentence."""


def check_of(number):
    """Import the file with the exercise's FACTS, HINTS and check()."""
    return importlib.import_module(f"{__package__}.checks.{CHECKS[number]}")


# ---- the source text

parsed, compiled = cache(ast.parse), cache(lambda text, path: compile(text, str(path), "exec"))


def read(path):
    """Return the text of a student's file, without a byte-order mark. Raises Wrong if Python cannot read the file."""
    try:
        compiled(text := path.read_text("utf-8-sig"), path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:      # not UTF-8, a NUL: ValueError
        line = f", in line {error.lineno} or just above" if getattr(error, "lineno", None) else ""
        raise Wrong(f"Python cannot read {shown(path)}: {getattr(error, 'msg', error)}{line}") from None
    return text


def parts(text):
    """Return {name: (first line, last line)} of the functions and classes at the top of a file, counted from 0."""
    return {node.name: (node.lineno - 1, node.end_lineno - 1) for node in parsed(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@cache
def exercises_of(path):
    """Return {exercise: its functions' names}, from the marks in minimal.py or beyond.py."""
    lines, found = (text := path.read_text()).splitlines(), {}
    for name, (first, _) in parts(text).items():
        if mark := MARK.search(lines[first]):
            found.setdefault(int(mark[1]), []).append(name)
    return found


def source_of(number):
    """Return the path of the file that has the exercise's reference."""
    return next(path for path in SOURCES if number in exercises_of(path))


def names_in(number):
    """Return the names of an exercise's functions."""
    return exercises_of(source_of(number))[number]


def work_of(number):
    """Return the path of the student's copy of the exercise's file."""
    return WORK / source_of(number).name


def answer_in(text, number):
    """Return the source of an exercise's functions in a file, without marks, or None if one is missing."""
    places, lines, names = parts(text), text.splitlines(), names_in(number)
    if not all(name in places for name in names):
        return None
    sources = ["\n".join(lines[places[name][0]:places[name][1] + 1]) for name in names]
    return [re.sub(r"\s*# exercise .*", "", source, count=1) for source in sources]


def replace_answer(text, number, sources):
    """Return the text, in which `sources` replace the functions of an exercise, one each, and get a mark."""
    lines, places = text.splitlines(), [parts(text)[name] for name in names_in(number)]
    for (first, last), source in sorted(zip(places, sources), reverse=True):
        top, *body = source.split("\n")
        lines[first:last + 1] = [f"{top:<87} # exercise {number}, yours", *body]
    return "\n".join(lines) + "\n"


@cache
def blanks(number):
    """Return an exercise's functions without their bodies. Signatures and docstrings stay; the first gets FACTS."""
    facts = getattr(check_of(number), "FACTS", "") + f"If you are stuck: python -m exercises hint {number}"
    sources, comment = [], [f"    # {line}" for line in facts.strip().splitlines()]
    for source in answer_in(source_of(number).read_text(), number):
        lines, top = source.split("\n"), ast.parse(source).body[0]
        methods = [node for node in top.body if isinstance(node, ast.FunctionDef)]
        for function in reversed(methods or [top]):
            has_docstring = ast.get_docstring(function) is not None
            first = function.body[0].end_lineno if has_docstring else function.body[0].lineno - 1
            indent = " " * (function.col_offset + 4)
            lines[first:function.end_lineno] = [f'{indent}raise NotImplementedError("exercise {number}")']
        lines[top.body[0].end_lineno:top.body[0].end_lineno] = comment
        comment = []
        sources.append("\n".join(lines))
    return sources


def state_of(text, number):
    """Return "given", "blank", "missing" or "answered" for an exercise in a work file."""
    answer, right = answer_in(text, number), answer_in(source_of(number).read_text(), number)
    if answer is None:
        return "missing"
    if answer == blanks(number):
        return "blank"
    return "given" if answer == right and f"# exercise {number}, yours" not in text else "answered"


# ---- running an answer

def load(text=None, number=None, path=None, texts=None):
    """Return minimal.py and beyond.py, or other `texts` of both, as one module on fake ranks.

    The functions of exercise `number` come from `text`. So do functions, imports and constants that only `text` has."""
    module = types.ModuleType("minimal")
    for source, its_text in zip(SOURCES, texts or map(Path.read_text, SOURCES)):
        exec(compiled(its_text, source), vars(module))
    if text is not None:
        theirs = set(vars(module)) - set(names_in(number))
        nodes = [node for node in parsed(text).body if names_of(node) and not names_of(node) & theirs]
        exec(compile(ast.Module(nodes, []), str(path), "exec"), vars(module))
    module.dist = FakeDistributed()
    return module


def names_of(node):
    """The names that a statement at the top of a file defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def check(number, text, path):
    """Check an exercise's answer in a work file's text. Return None if it passes, or what is wrong."""
    names = " and ".join(names_in(number))
    try:
        state = state_of(text, number)
        if state in ("blank", "missing"):
            return f"still blank: {names}." if state == "blank" else f"missing from the file: {names}."
        from .judge import judge                                          # here, because it imports this file

        its, answer = check_of(number), load(text, number, path)
        its.check(answer, load()) if hasattr(its, "check") else judge(its.program, answer, its.MISTAKES)
    except Wrong as wrong:
        return str(wrong) + where(wrong.__cause__, path)
    except Endless as error:
        return "Your code does not end: it was stopped after two seconds of computation." + where(error, path)
    except RankError as error:
        return f"On fake ranks, {error}." + where(error, path)
    except NotImplementedError as error:
        return f"not finished: {names}: {error}." + where(error, path)
    except BaseException as error:                           # also exit()
        if isinstance(error, KeyboardInterrupt) and not hasattr(error, "rank"):
            raise                                            # Ctrl-C
        return f"{type(error).__name__}: {error}" + where(error, path)
    return None


def shown(path):
    return path.relative_to(FOLDER.parent) if path.is_relative_to(FOLDER.parent) else path


def where(error, path):
    """Return the lines of the student's file in an error's traceback, outermost first. If there are none, return the
    line of the reference that used the student's result."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    own = own or [frame for frame in frames if frame.filename in map(str, SOURCES)][-1:]
    rank = getattr(error, "rank", None)
    return "".join(f"\n    {shown(Path(frame.filename))}, line {frame.lineno}, in {frame.name}"
                   + f" (rank {rank})" * (rank is not None) + f"\n        {frame.line}" for frame in own)
