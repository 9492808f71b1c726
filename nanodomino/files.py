"""Reads files that may turn out not to be regular files: a user's --config, or a file in a run's folder.

Opening a named pipe waits until another program writes to it, and reading /dev/zero never ends. So only regular files
of a limited size are read. Each problem is an OSError, whose `strerror` is a phrase for an error message.
"""

import errno
import os
import stat

LIMIT = 1 << 28          # bytes


def open_regular_file(path):
    """Open a file to read bytes. Raises OSError if it can't be opened or is not a regular file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))   # never wait for a writer
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_file(path, limit=LIMIT) -> bytes:
    """Return the bytes of a regular file. Raises OSError if there is none or it has more than `limit` bytes."""
    with open_regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {limit:,}", str(path))
        return file.read()
