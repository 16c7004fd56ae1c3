"""The operations on disk that can fail or be interrupted, one function each."""

from __future__ import annotations

import io
import os
import pathlib
import sys
from collections.abc import Iterable

from mla_convert.errors import UsageError


def make_file(file: pathlib.Path, nbytes: int) -> None:
    """Make a file of ``nbytes`` zeros, a hole where the file system has them; one of that length stays as it is."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if os.fstat(handle).st_size != nbytes:
            os.truncate(handle, nbytes)
    finally:
        os.close(handle)


def write_at(file: pathlib.Path, start: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces``, one after the other, into a file that is there, from byte ``start`` on."""
    with file.open("r+b", buffering=0) as stream:
        stream.seek(start)
        for piece in pieces:
            _write_all(stream, piece)
        if hasattr(os, "posix_fadvise"):
            # Whoever syncs the file waits for what has not begun to be written: on Linux this begins it.
            os.posix_fadvise(stream.fileno(), start, stream.tell() - start, os.POSIX_FADV_DONTNEED)


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
        done += stream.write(data[done:])


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
