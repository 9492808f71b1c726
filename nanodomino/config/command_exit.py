"""Runs a command and exits with a code. The command continues even if its output can no longer be written.

    main returns              its exit code
    UserError                 prints "error: SENTENCE" on stderr; exit code 2
    OSError                   prints "error: PATH: REASON; ..." on stderr; exit code 1. No command needs to catch it
    Ctrl-C                    prints nothing; exit code 130, the shell's code for a process that SIGINT ended
    stdout is closed          (for example by `| head -1`) the work continues without output; the exit code is as above
    stdout can't be written   (for example on a full disk) the same, but prints an error at the end; the exit code is 1
                              instead of 0

Python may raise an OSError in any print, and again when it flushes its buffers at exit. TolerantFile catches both,
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
    except SystemExit as end:                                  # --help
        code = end.code
    except (UserError, OSError) as error:
        sentence, code = sentence_and_code(error)
        print(f"error: {sentence}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    exit_with(code)


def sentence_and_code(error: UserError | OSError) -> tuple[str, int]:
    """Return the sentence to print for an error that is no bug of ours, and the exit code."""
    if isinstance(error, UserError):
        return str(error), 2
    path = f"{str(error.filename)[:200]}: " if error.filename is not None else ""
    return f"{path}{error.strerror or error}; fix that, or choose another file or folder", 1


def exit_with(code: int | None):
    """Exit with this code, or with 1 instead of 0 if a command's output could not be written."""
    sys.stdout.flush()
    file = raw_file(sys.stdout)
    failure = getattr(file, "failure", None)
    if not code and failure and not file.warning and not isinstance(failure, BrokenPipeError):
        print(f"error: standard output can't be written ({failure.strerror}); choose another file, or free some disk "
              "space", file=sys.stderr)
        code = 1
    sys.exit(code)


class TolerantFile(io.FileIO):
    """A raw output file. After the first OSError it discards everything that is written to it.

    failure: this OSError, or None. warning: what it means for the user, such as "training continues". It is printed on
    stderr at the first error, unless it is empty.
    """

    def __init__(self, descriptor: int, warning: str):
        super().__init__(descriptor, "w", closefd=False)
        self.warning, self.failure = warning, None

    def write(self, data) -> int:
        try:
            return len(data) if self.failure else super().write(data)
        except OSError as error:
            self.failure = error
            if self.warning:
                print(f"warning: standard output can't be written ({error.strerror}); {self.warning}", file=sys.stderr)
            return len(data)


def raw_file(stream):
    """Return the raw file under a text stream. After tolerate_closed_output() it is a TolerantFile."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def stdout_is_open() -> bool:
    """Return False once a write to standard output has failed."""
    return not getattr(raw_file(sys.stdout), "failure", None)


def tolerate_closed_output(warning=""):
    """Ignore every OSError in writes to stdout and stderr.

    warning: see TolerantFile. A later call replaces the `warning` of an earlier call. Characters that the terminal
    cannot encode are printed as backslash escapes.
    """
    for name, message in (("stderr", ""), ("stdout", warning)):
        stream = getattr(sys, name)
        if stream is None:                                     # the shell closed it: >&-
            setattr(sys, name, open(os.devnull, "w"))
            continue
        if isinstance(file := raw_file(stream), TolerantFile):
            file.warning, file.failure = message, None
            continue
        try:
            stream.flush()
            file = TolerantFile(stream.fileno(), message)
        except io.UnsupportedOperation:                        # in a notebook the stream is not a file
            continue
        setattr(sys, name, io.TextIOWrapper(file if stream.write_through else io.BufferedWriter(file), stream.encoding,
                                            stream.errors if stream.errors != "strict" else "backslashreplace",
                                            line_buffering=stream.line_buffering, write_through=stream.write_through))
