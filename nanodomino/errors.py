"""The exception for a user's mistake, and how a command ends.

    main returns         its exit code
    UserError            prints "error: SENTENCE" on stderr; exit code 2, for a NotFinite 1
    OSError              prints "error: PATH: REASON; ..." on stderr; exit code 1. No command needs to catch it
    Ctrl-C               prints nothing; exit code 130, the shell's code for a process that SIGINT ended
    a lost terminal      is ignored, and so is `| head -1`: the work continues without output
"""

import io
import signal
import sys
from contextlib import suppress


class UserError(Exception):
    """A mistake that the user can correct. The message is one sentence with the rule, the numbers and the fix. For
    example: "num-attention-heads 6 must be divisible by tensor-model-parallel-size 4; try --tp 1, 2, 3, 6"."""
    exit_code = 2


class NotFinite(UserError):
    """Weights, a loss or logits that are infinite or NaN, as after training that has diverged."""
    exit_code = 1


def require(condition, message: str, error: type[UserError] = UserError):
    """Raise error(message) unless the condition holds."""
    if not condition:
        raise error(message)


def attempt(problem: str, function, *arguments, advice: str, **options):
    """Return function(...). If it raises any exception, as for a damaged file or in a package's own imports, raise a
    UserError with this problem, the exception's reason and this advice."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        named = str(getattr(error, "filename", "")) in problem          # then the reason need not name the file again
        reason = named and getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        raise UserError(f"{problem} ({reason}); {advice}") from None


def import_optional(name: str, user):
    """Import a module of requirements-extra.txt and return its package. user: what needs it. Raises UserError."""
    return attempt(f"{user} needs the package {name.split('.')[0]}, which can't be imported",
                   __import__, name, advice="pip install -r requirements-extra.txt")


def counted(number: int, noun: str, form="") -> str:
    """Return for example "1 replica", "2 processes" or, with the format ",", "1,000 tokens"."""
    return f"{number:{form}} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def sentence_and_code(error: UserError | OSError) -> tuple[str, int]:
    """Return the sentence to print for an error that is no bug of ours, and the exit code."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    path = f"{str(error.filename)[:200]}: " if error.filename is not None else ""
    return f"{path}{error.strerror or error}; fix that, or choose another file or folder", 1


def run_command(main, *arguments):
    """Call main(*arguments), and exit with the code that it returns (None: 0) or that the table above gives."""
    tolerate_lost_output()
    try:
        code = main(*arguments)
    except (UserError, OSError) as error:
        sentence, code = sentence_and_code(error)
        print(f"error: {sentence}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


class TolerantFile(io.FileIO):
    """A raw output file that discards what it can't write: a print may fail, and so may the last flush at exit."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data)
        return len(data)


def tolerate_lost_output():
    """Make stdout and stderr ignore errors, and print characters that the terminal can't encode as escapes."""
    for name in ("stdout", "stderr"):
        file = io.BufferedWriter(TolerantFile(getattr(sys, name).fileno(), "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(file, getattr(sys, name).encoding, "backslashreplace", line_buffering=True))
