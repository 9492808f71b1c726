"""Opens, writes and deletes files that may turn out not to be what their names say.

Opening a named pipe waits for another program, and reading /dev/zero never ends. A run may also come from someone else,
and a symbolic link such as metrics.jsonl -> ~/.bashrc in its folder would lead what is written elsewhere. So all files
are opened by open_regular_file(), and whole files are written by write_file(). Each problem is an OSError, whose
`strerror` is a phrase for an error message.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

from nanodomino.errors import attempt, require

LIMIT = 1 << 28          # bytes


def open_regular_file(path, mode="rb", buffering=-1):
    """Open a regular file of bytes, or raise OSError. Reading follows a symbolic link; writing refuses one."""
    def descriptor(path, flags: int) -> int:
        opened = os.open(path, flags | os.O_NONBLOCK | (0 if mode == "rb" else os.O_NOFOLLOW), 0o666)
        if stat.S_ISREG(os.fstat(opened).st_mode):
            return opened
        os.close(opened)
        raise OSError(errno.EINVAL, "not a regular file", str(path))

    return open(path, mode, buffering, opener=descriptor)


def read_file(path) -> bytes:
    """Return the bytes of a regular file. Raises OSError if there is none or it has more than LIMIT bytes."""
    with open_regular_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > LIMIT:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {LIMIT:,}", str(path))
        return file.read()


def sha256(path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal. Raises OSError. (hashlib.file_digest needs Python 3.11.)"""
    digest = hashlib.sha256()
    with naming(path), open_regular_file(path) as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def naming(path):
    """Name `path` in an OSError that names no file, as those of read() and write() do."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_json(path) -> dict:
    """Return the JSON object in a file. Raises UserError."""
    values = attempt(f"{path} can't be read", lambda: json.loads(read_file(path)), advice="give another file or folder")
    require(isinstance(values, dict), f"{path} must hold one JSON object {{name: value}}; correct it")
    return values


def write_file(path: Path, data: bytes, flush=False):
    """Write a whole file in the place of whatever is at `path`, so that a reader never sees half of it. flush: wait
    until the data is on the disk."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")  # two processes may write the same file
    try:
        with naming(path), open_regular_file(temporary, "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path):
    """Make a folder unless it exists. Raises OSError if it can't be made or is a symbolic link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():                                      # the files to delete in it would be another folder's
        raise OSError(errno.ENOTDIR, f"{path.name} is a symbolic link", str(path))


def delete(path: Path):
    """Delete a folder, a file or a symbolic link, but not what the link points to. Ignores errors."""
    with suppress(OSError):
        path.unlink()                                          # first, because rmtree() would wait for a named pipe
    shutil.rmtree(path, ignore_errors=True)
