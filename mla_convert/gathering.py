"""Pieces of bytes, as they come, gathered into larger ones that lie in memory as they will lie on the disk.

A disk that is written past the page cache (:mod:`mla_convert.disk`) takes whole pages from addresses that are multiples
of a page. What is gathered here begins at the same place within a page of memory as within a page of its file, and
ends, but for the last, with a page of the file.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator

import numpy as np

#: Bytes of a page, of files and of memory: what disks and file systems with larger blocks refuse goes another way.
PAGE = 4096
#: Bytes that are gathered: enough to keep a disk busy, few enough for a processor's cache.
CHUNK = 1 << 22


class _Memory(threading.local):
    """Memory of each thread, from the beginning of a page on."""

    def __init__(self) -> None:
        self.bytes = memoryview(mmap.mmap(-1, CHUNK))


_memory = _Memory()


def gathered(pieces: Iterable[memoryview], start: int) -> Iterator[memoryview]:
    """``pieces``, one after the other, which are to stand in a file from byte ``start`` on, in chunks.

    A chunk is a part of a piece that lies right as it is, or else lies in the calling thread's own memory and is good
    until the next is asked for.
    """
    memory = _memory.bytes
    begin = end = start % PAGE
    for piece in pieces:
        done = 0
        if begin == end == 0 and len(piece) >= PAGE and address(piece) % PAGE == 0:
            done = len(piece) - len(piece) % PAGE
            for first in range(0, done, CHUNK):
                yield piece[first : min(first + CHUNK, done)]
        while done < len(piece):
            count = min(len(piece) - done, CHUNK - end)
            # A copy of arrays leaves Python's lock to others, one of memoryviews does not.
            np.copyto(_numbers(memory[end : end + count]), _numbers(piece[done : done + count]))
            done, end = done + count, end + count
            if end == CHUNK:
                yield memory[begin:]
                begin = end = 0
    if end > begin:
        yield memory[begin:end]


def address(data: bytes | memoryview) -> int:
    """Where ``data`` lie in memory."""
    return int(_numbers(data).ctypes.data)


def _numbers(data: bytes | memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)
