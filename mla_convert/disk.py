"""The operations on disk that can fail or be interrupted, one function each."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pathlib
import sys
from collections.abc import Iterable

from mla_convert.errors import UsageError
from mla_convert.gathering import PAGE, address

logger = logging.getLogger(__name__)

_DIRECT = getattr(os, "O_DIRECT", 0)
# What a file system says that knows no direct writes, or not with pages of this size.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
# Fewer bytes are not worth a direct write, which waits for the disk.
_LEAST_DIRECT = 1 << 18
# Bytes that go through the page cache at a time. With more, Linux puts them into the largest pages it has, and a
# virtual machine may have to ask its host for each of those: a seventh of the speed was measured.
_MOST_CACHED = 1 << 20


def make_file(file: pathlib.Path, nbytes: int) -> None:
    """Make a file of ``nbytes`` zeros, a hole where the file system has them; one of that length stays as it is."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(handle).st_size != nbytes:
            os.truncate(handle, nbytes)
    finally:
        os.close(handle)


def write_at(file: pathlib.Path, start: int, pieces: Iterable[bytes | memoryview], direct: bool = False) -> None:
    """Write ``pieces``, one after the other, into a file that is there, from byte ``start`` on.

    ``direct``: whole pages of a large piece that lie in memory as they will lie in the file
    (:mod:`mla_convert.gathering`) are written past the page cache where the file system can do that. It waits for the
    disk, and leaves the processor to others: for what takes longer to make than to write.
    """
    at = start
    with file.open("r+b", buffering=0) as stream, contextlib.closing(_Direct(file, direct)) as past_cache:
        for piece in pieces:
            first = -at % PAGE
            last = first + (len(piece) - first) // PAGE * PAGE
            if last - first < _LEAST_DIRECT or not past_cache.takes(piece[first:last], at + first):
                first = last = 0
            for begin, end in ((0, first), (last, len(piece))):
                stream.seek(at + begin)
                _write_all(stream, piece[begin:end])
            at += len(piece)
        if hasattr(os, "posix_fadvise"):
            # Whoever syncs the file waits for what has not begun to be written: on Linux this begins it.
            os.posix_fadvise(stream.fileno(), start, at - start, os.POSIX_FADV_DONTNEED)


class _Direct:
    """A file that is written past the page cache, where its file system can do that."""

    def __init__(self, file: pathlib.Path, wanted: bool) -> None:
        self._file = file
        self._handle: int | None = None
        self._able = wanted and bool(_DIRECT)

    def takes(self, data: bytes | memoryview, start: int) -> bool:
        """Write whole pages; False where they have to go another way."""
        if not self._able or address(data) % PAGE:
            return False
        try:
            if self._handle is None:
                self._handle = os.open(self._file, os.O_WRONLY | _DIRECT)
            # A write that came short (a signal, a disk about to be full) is done again, in whole, by the other way,
            # which says why where it cannot either.
            return os.pwrite(self._handle, data, start) == len(data)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            logger.info("%s is written through the page cache: %s", self._file, error.strerror)
            self._able = False
            return False

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a small file and flush it to the disk; one that is there is replaced whole."""
    with file.open("wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def append_line(file: pathlib.Path, line: str) -> None:
    """Add a line to a file, in one write where the disk takes it whole; the file is made where it is not there."""
    with file.open("ab", buffering=0) as stream:
        _write_all(stream, line.encode() + b"\n")


def _write_all(stream: io.FileIO, data: bytes | memoryview) -> None:
    """An unbuffered write may take less than it was given; only what it is asked for next says why."""
    done = 0
    while done < len(data):
        done += stream.write(data[done : done + _MOST_CACHED])


def sync(file: pathlib.Path) -> None:
    """Flush a file to the disk; one that may only be read, too, where the system allows that."""
    handle = os.open(file, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: pathlib.Path) -> None:
    """Flush a folder's entries to the disk."""
    if sys.platform == "win32":  # folders cannot be flushed there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Rename without replacing; the folder is locked, so that nobody of ours makes ``target`` in between."""
    if os.path.lexists(target):
        raise UsageError(f"{target} appeared during the conversion, and nothing is overwritten; choose another OUT")
    source.rename(target)
