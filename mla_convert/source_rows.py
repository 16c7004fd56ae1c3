"""The rows of a source tensor: held in memory, or read a range at a time.

A fused product takes every row of a query projection, or of W_O, once. Such a tensor, 235 MB in DeepSeek-V3, need not
stand in memory whole: a range of its rows is read into memory that was used before, and is hashed, looked at and
multiplied while the processor's cache has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mla_convert.checkpoint import Checkpoint
from mla_convert.memory import Scratch
from mla_convert.shards import Piece, read_piece


class _Range(NamedTuple):
    """Rows [start, stop) in memory: ``data`` uint8, and the function that gives the memory back."""

    start: int
    stop: int
    data: Tensor
    give: Callable[[], None]


class SourceRows(Protocol):
    """A tensor [rows, columns], taken by ranges of its rows."""

    def take(self, start: int, stop: int) -> contextlib.AbstractContextManager[tuple[Tensor, float]]:
        """Rows [start, stop), on the device of the products, and their largest magnitude; until the context ends."""


@dataclasses.dataclass(frozen=True)
class HeldRows:
    """Rows of a tensor that is in memory, and whose values are known to be finite."""

    tensor: Tensor

    @contextlib.contextmanager
    def take(self, start: int, stop: int) -> Iterator[tuple[Tensor, float]]:
        """A view."""
        found = self.tensor[start:stop]
        yield found, largest_magnitude(found)


class ReadRows:
    """Rows of a plain tensor that stands whole in one file on disk: read when they are asked for, from any thread.

    ``name`` is the checkpoint's, which the file may call otherwise; ``scratch`` gives memory for what is read. The
    tensor's hash needs ranges in their order: one that comes before its turn waits, when its user is done with it, for
    whoever brings what is missing in front of it.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, piece: Piece, device: torch.device, scratch: Scratch) -> None:
        self._checkpoint, self._name, self._piece = checkpoint, name, piece
        self._device, self._scratch = device, scratch
        self._row_bytes = piece.nbytes // piece.shape[0]
        self._hash = hashlib.sha256()
        self._hashed = 0  # rows
        self._waiting: dict[int, _Range] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self, start: int, stop: int) -> Iterator[tuple[Tensor, float]]:
        """The rows, read. CheckpointError where the file is damaged, FormatError where a value is not finite."""
        data, give = self._scratch.take(((stop - start) * self._row_bytes,), torch.uint8)
        part = dataclasses.replace(
            self._piece,
            shape=(stop - start, *self._piece.shape[1:]),
            start=self._piece.start + start * self._row_bytes,
            nbytes=len(data),
        )
        found = read_piece(part, lambda _: data)
        read = _Range(start, stop, data, give)
        in_turn = self._add(read, wait=False)
        largest = largest_magnitude(found)
        if not math.isfinite(largest):
            self._checkpoint.weight(self._name)  # says how many of its values are not finite
        try:
            yield found.to(self._device), largest
        finally:
            if in_turn or self._add(read, wait=True):
                give()

    def sha256(self) -> str:
        """The hash of all rows, as :func:`mla_convert.digest.tensor_digest` gives it; reads those that nobody took."""
        rows, step = self._piece.shape[0], max(1, (1 << 22) // self._row_bytes)
        while self._hashed < rows:
            with self.take(self._hashed, min(rows, self._hashed + step)):
                pass
        return self._hash.hexdigest()

    def _add(self, read: _Range, *, wait: bool) -> bool:
        """Hash a range, and those that waited for it; False where it is not its turn, and it waits if it may."""
        with self._lock:
            if read.start > self._hashed:
                if wait:
                    self._waiting[read.start] = read
                return False
            self._update(read)
            while (waiting := self._waiting.pop(self._hashed, None)) is not None:
                self._update(waiting)
                waiting.give()
            return True

    def _update(self, read: _Range) -> None:
        if read.stop > self._hashed:  # what is read a second time is not hashed again
            self._hash.update(read.data[(self._hashed - read.start) * self._row_bytes :].numpy().data)
            self._hashed = read.stop


def largest_magnitude(tensor: Tensor) -> float:
    """The largest magnitude; NaN or infinite where a value is."""
    # In 16 bits a third of the time of two plain reductions, which are quicker for the pieces that are rounded.
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))
