"""How a command ends, and what happens if its output cannot be written.

    done              the exit code that main returned
    UserError         "error: SENTENCE" on stderr; 2
    Ctrl-C            silence; 130, the shell's code for a process ended by SIGINT
    | head -1         the reader has gone: the work continues silently, and the exit code tells how it went

Python may notice a closed pipe in any print, and again when it flushes its buffers at exit. Therefore the error is
handled in the file objects themselves, at the only point where bytes leave the process.
"""

import io
import os
import signal
import sys

from nanodomino.errors import UserError


def run_command(main, *arguments):
    """Call main(*arguments), which returns an exit code or None or raises UserError, and end this process."""
    tolerate_closed_output()
    try:
        code = main(*arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


class TolerantFile(io.FileIO):
    """A raw output file that discards everything after the first OSError of type `ignored`.

    warning: the consequence for the user, printed on stderr after the first error; if empty, nothing is printed.
    """

    def __init__(self, descriptor: int, ignored: type[OSError], warning: str):
        super().__init__(descriptor, "w", closefd=False)
        self.ignored, self.warning, self.failed = ignored, warning, False

    def write(self, data) -> int:
        try:
            return len(data) if self.failed else super().write(data)
        except self.ignored as error:
            self.failed = True
            if self.warning:
                print(f"warning: standard output is gone ({error.strerror}); {self.warning}", file=sys.stderr)
            return len(data)


def raw_file(stream):
    """Return the raw file under a text stream: a TolerantFile after tolerate_closed_output()."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def stdout_is_open() -> bool:
    """Return False once a write to standard output has failed."""
    return not getattr(raw_file(sys.stdout), "failed", False)


def tolerate_closed_output(ignored: type[OSError] = BrokenPipeError, warning=""):
    """Ignore errors of type `ignored` in writes to stdout, and every OSError in writes to stderr.

    warning: see TolerantFile. Characters that the terminal cannot encode are printed as backslash escapes. A later call
    replaces the settings of an earlier one.
    """
    for name, errors, words in (("stderr", OSError, ""), ("stdout", ignored, warning)):
        stream = getattr(sys, name)
        if stream is None:                                     # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))
            continue
        if isinstance(file := raw_file(stream), TolerantFile):
            file.ignored, file.warning, file.failed = errors, words, False
            continue
        try:
            stream.flush()
            file = TolerantFile(stream.fileno(), errors, words)
        except io.UnsupportedOperation:                        # a notebook's stream, which is no file
            continue
        setattr(sys, name, io.TextIOWrapper(file if stream.write_through else io.BufferedWriter(file), stream.encoding,
                                            stream.errors if stream.errors != "strict" else "backslashreplace",
                                            line_buffering=stream.line_buffering, write_through=stream.write_through))
