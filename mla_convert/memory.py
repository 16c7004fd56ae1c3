"""Memory that is used again: pages that are new to a process cost more than the values that are written to them."""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_POPULATES = hasattr(mmap, "MAP_POPULATE")  # Linux


def new_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] from the beginning of a page on, whose pages are there already where the system can do that.

    One call for all of them is cheaper than one interruption for each, when it is first written to. MemoryError where
    there is not enough.
    """
    populated = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE} if _POPULATES else {}
    try:
        memory = mmap.mmap(-1, max(1, nbytes), **populated)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


class Scratch:
    """Memory for blocks of about one size; a few exist at a time, and each is used again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Callable[[], None]]:
        """Memory on the host, holding anything, from a page's beginning on, and the function that gives it back."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None or len(buffer) < nbytes:
            buffer = new_pages(nbytes)
        return buffer[:nbytes].view(dtype).view(shape), functools.partial(self._give, buffer)

    def _give(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    def release(self) -> None:
        """Let go of what is free."""
        with self._lock:
            self._free.clear()


class Buffers:
    """Memory for what is read for one unit of work, and then for another of the same sizes."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()

    def lease(self) -> Lease:
        """Memory for one unit."""
        return Lease(self)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], holding anything; on the host.

        Where none of that size is free, those of other sizes are let go: what is free and what is in use are together
        never more than what was in use at one time.
        """
        with self._lock:
            found = self._free.get(nbytes)
            if found:
                return found.pop()
            self._free.clear()
        return new_pages(nbytes)

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Give back what :meth:`take` gave out, and nobody reads any longer."""
        with self._lock:
            for buffer in buffers:
                self._free.setdefault(len(buffer), []).append(buffer)

    def release(self) -> None:
        """Let go of what is free."""
        with self._lock:
            self._free.clear()


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one job.

    ``buffers`` is for what a unit reads whole, ``rows`` for what is read of a source for one block, and ``scratch`` for
    the blocks that are made.
    """

    buffers: Buffers = dataclasses.field(default_factory=Buffers)
    rows: Scratch = dataclasses.field(default_factory=Scratch)
    scratch: Scratch = dataclasses.field(default_factory=Scratch)

    def release(self) -> None:
        """Let go of what is free; for when the work has ended and the job that did it lives on."""
        self.buffers.release()
        self.rows.release()
        self.scratch.release()


class Lease:
    """What one unit has taken of ``buffers``; a function that gives memory, as ``Checkpoint.read`` takes it."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._taken: list[Tensor] = []

    def __call__(self, nbytes: int) -> Tensor:
        """Take ``nbytes`` of the buffers (:meth:`Buffers.take`)."""
        buffer = self._buffers.take(nbytes)
        self._taken.append(buffer)
        return buffer

    def release(self) -> None:
        """Give all of it back."""
        taken, self._taken = self._taken, []
        self._buffers.give(taken)
