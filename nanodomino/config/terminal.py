"""How a command ends that a person has typed: done, by a mistake, by Ctrl-C, or with nobody there to read it.

    done           the exit code of its main
    a mistake      error: one sentence; 2
    Ctrl-C         silence; 130, as a shell expects of what a signal has ended
    | head -1      the reader has gone: the work goes on to its end without a word, and the exit code tells of the work

Python meets a closed pipe where it writes, which may be any print, and again when it empties its buffers at exit. So
the streams themselves know about it, at the one place where bytes leave the process, and nobody else has to.
"""

import io
import os
import signal
import sys

from nanodomino.errors import UserError


def run(main, *arguments):
    """End this process as `main(*arguments)` says, which returns the exit code or None, or raises UserError."""
    outlive_readers()
    try:
        code = main(*arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


class Screen(io.FileIO):
    """Where the bytes of a stream leave the process; after the first error of a `harmless` kind they go nowhere.

    farewell: what to say about that on stderr; nothing if empty.
    """

    def __init__(self, descriptor: int, harmless: type[OSError], farewell: str):
        super().__init__(descriptor, "w", closefd=False)
        self.harmless, self.farewell, self.gone = harmless, farewell, False

    def write(self, data) -> int:
        try:
            return len(data) if self.gone else super().write(data)
        except self.harmless as error:
            self.gone = True
            if self.farewell:
                print(f"warning: standard output is gone ({error.strerror}); {self.farewell}", file=sys.stderr)
            return len(data)


def leads_to(stream):
    """Where the bytes of a stream go: a Screen, if it has one."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def somebody_reads() -> bool:
    """Whether standard output still leads somewhere, as far as writing has shown."""
    return not getattr(leads_to(sys.stdout), "gone", False)


def outlive_readers(harmless: type[OSError] = BrokenPipeError, farewell=""):
    """From here on, errors of that kind in writing to stdout, and any in writing to stderr, are nobody's; see Screen
    for `farewell`. Letters that the screen does not know are spelled out. A later call takes an earlier one's place."""
    for name, errors, words in (("stderr", OSError, ""), ("stdout", harmless, farewell)):
        stream = getattr(sys, name)
        if stream is None:                                     # the shell has closed it: >&-
            setattr(sys, name, open(os.devnull, "w"))
            continue
        if isinstance(screen := leads_to(stream), Screen):
            screen.harmless, screen.farewell, screen.gone = errors, words, False
            continue
        try:
            stream.flush()
            screen = Screen(stream.fileno(), errors, words)
        except io.UnsupportedOperation:                        # a notebook's, which is no file
            continue
        setattr(sys, name, io.TextIOWrapper(screen if stream.write_through else io.BufferedWriter(screen),
                                            stream.encoding,
                                            stream.errors if stream.errors != "strict" else "backslashreplace",
                                            line_buffering=stream.line_buffering, write_through=stream.write_through))
