"""Runs a command and exits with a code. The command continues even if its output can no longer be written.

    main returns         its exit code
    UserError            prints "error: SENTENCE" on stderr; exit code 2
    Ctrl-C               prints nothing; exit code 130, the shell's code for a process that SIGINT ended
    stdout is closed     (for example by `| head -1`) the work continues without output; the exit code is as above

Python may raise BrokenPipeError in any print, and again when it flushes its buffers at exit. TolerantFile catches both,
because it replaces the raw file, to which the buffers write all output.
"""

import io
import os
import signal
import sys

from nanodomino.errors import UserError


def run_command(main, *arguments):
    """Call main(*arguments), and exit with the code that it returns (None: 0) or that the table above gives."""
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
    """A raw output file. After the first OSError of type `ignored`, it discards everything that is written to it.

    warning: what the error means for the user, such as "training continues". It is printed on stderr at the first
    error, unless it is empty.
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
                print(f"warning: standard output can't be written ({error.strerror}); {self.warning}", file=sys.stderr)
            return len(data)


def raw_file(stream):
    """Return the raw file under a text stream. After tolerate_closed_output() it is a TolerantFile."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def stdout_is_open() -> bool:
    """Return False once a write to standard output has failed."""
    return not getattr(raw_file(sys.stdout), "failed", False)


def tolerate_closed_output(ignored: type[OSError] = BrokenPipeError, warning=""):
    """Ignore errors of type `ignored` in writes to stdout, and every OSError in writes to stderr.

    warning: see TolerantFile. A later call replaces `ignored` and `warning` of an earlier call. Characters that the
    terminal cannot encode are printed as backslash escapes.
    """
    for name, errors, message in (("stderr", OSError, ""), ("stdout", ignored, warning)):
        stream = getattr(sys, name)
        if stream is None:                                     # the shell closed it: >&-
            setattr(sys, name, open(os.devnull, "w"))
            continue
        if isinstance(file := raw_file(stream), TolerantFile):
            file.ignored, file.warning, file.failed = errors, message, False
            continue
        try:
            stream.flush()
            file = TolerantFile(stream.fileno(), errors, message)
        except io.UnsupportedOperation:                        # in a notebook the stream is not a file
            continue
        setattr(sys, name, io.TextIOWrapper(file if stream.write_through else io.BufferedWriter(file), stream.encoding,
                                            stream.errors if stream.errors != "strict" else "backslashreplace",
                                            line_buffering=stream.line_buffering, write_through=stream.write_through))
