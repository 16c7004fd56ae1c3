"""Write absorbed weights so that they are either complete or not there.

Everything is written into the folder ``.mla_absorbed.incomplete`` inside the destination, under names that no loader
takes, and flushed to the disk. Then a journal of what is about to get which name is written, the files are renamed, and
the manifest, without which nothing is loaded, comes last. A run that ends early removes what it made; one that is
killed leaves the folder and the journal, from which the next run tells its own remains from other people's files.
Nothing that was there before is changed or overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from mla_convert.destination import (
    CARD,
    INCOMPLETE,
    INDEX,
    JOURNAL,
    MANIFEST,
    PART,
    SHARD,
    check_free_names,
    disk_errors,
    journal,
    locked,
    remove_remains,
    remove_temporary,
)
from mla_convert.errors import UsageError
from mla_convert.manifest import StoredPart

MAX_SHARD_BYTES = 5_000_000_000

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
}
_PIECE = 1 << 26


def plan_shards(tensors: Iterable[StoredPart], max_bytes: int) -> list[list[StoredPart]]:
    """Split tensors, in order, into shards of at most ``max_bytes`` of data; a larger tensor gets one of its own."""
    shards: list[list[StoredPart]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


class SidecarWriter:
    """Writes planned tensors, in their order, into shards under ``folder``; a context manager.

    ``folder`` is one that :func:`destination` gave. Call :meth:`write` for every tensor of ``tensors``, then
    :meth:`finish`; leaving the block without :meth:`finish` removes everything that was written. Errors of the disk
    come as SidecarError.
    """

    def __init__(
        self, folder: pathlib.Path, tensors: Sequence[StoredPart], *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.folder = folder
        self._shards = plan_shards(tensors, max_shard_bytes)
        self._names = [
            SHARD.format(number=number, total=len(self._shards)) for number in range(1, len(self._shards) + 1)
        ]
        self._pending = [(shard, tensor) for shard, group in enumerate(self._shards) for tensor in group]
        self._temporary = folder / INCOMPLETE
        self._stream: BinaryIO | None = None
        self._shard = -1
        self._made: list[pathlib.Path] = []
        self._lock = contextlib.ExitStack()
        self._finished = False

    def __enter__(self) -> SidecarWriter:
        try:
            with disk_errors(self.folder):
                self._made = _make_folders(self.folder)
                self._lock.enter_context(locked(self.folder))
                remove_remains(self.folder)
                check_free_names(self.folder)
                self._temporary.mkdir()
        except BaseException:
            self._lock.close()
            _remove_empty(self._made)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._finished:
            self._abandon()
        self._lock.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next planned tensor, any strides, on any device; its name, shape and dtype must be the plan's."""
        shard, planned = self._pending.pop(0)
        found = (name, tuple(tensor.shape), tensor.dtype)
        assert found == (planned.name, planned.shape, planned.dtype), f"{found} written, {planned} planned"
        with disk_errors(self.folder):
            if shard != self._shard:
                self._close_shard()
                self._shard = shard
                self._stream = self._part(self._names[shard]).open("xb")
                _write(self._stream, _header(self._shards[shard]))
            assert self._stream is not None
            for piece in _bytes(tensor):
                _write(self._stream, piece)

    def finish(self, manifest: str, card: str) -> list[str]:
        """Write index, card and manifest, and give all files their names; returns these, the manifest's last.

        An existing README.md is left as it is, and no card is written then.
        """
        assert not self._pending, f"{len(self._pending)} planned tensors were not written"
        texts = {INDEX: self._index(), CARD: card, MANIFEST: manifest}
        if (self.folder / CARD).exists():
            del texts[CARD]
        with disk_errors(self.folder):
            self._close_shard()
            for name, text in texts.items():
                self._write_text(self._part(name), text)
            names = [*self._names, *texts]
            self._write_text(self._temporary / JOURNAL, journal(self._temporary, names))
            _sync_folder(self._temporary)
            for name in names:
                if name == MANIFEST:
                    _sync_folder(self.folder)
                _move(self._part(name), self.folder / name)
            self._finished = True
            _sync_folder(self.folder)
            remove_temporary(self._temporary)
        return names

    def _part(self, name: str) -> pathlib.Path:
        return self._temporary / (name + PART)

    def _index(self) -> str:
        weight_map = {
            tensor.name: name for name, group in zip(self._names, self._shards, strict=True) for tensor in group
        }
        total = sum(tensor.nbytes for group in self._shards for tensor in group)
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"

    def _write_text(self, file: pathlib.Path, text: str) -> None:
        with file.open("xb") as stream:
            _write(stream, text.encode())
            _sync(stream)

    def _close_shard(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream:
                _sync(stream)

    def _abandon(self) -> None:
        """Remove everything this run made. What fails here is left to the next run, which finds the same remains."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
        with contextlib.suppress(OSError, UsageError):
            remove_remains(self.folder)
        _remove_empty(self._made)


def _make_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Make ``folder`` and those above it that are missing; returns the ones made, innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _remove_empty(folders: Iterable[pathlib.Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _header(tensors: Iterable[StoredPart]) -> bytes:
    """The beginning of a safetensors file of these tensors: length, JSON, spaces up to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's row-major bytes, in pieces."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))


# The operations that can fail or be interrupted, one function each, so that tests can stop before any of them.


def _write(stream: BinaryIO, data: bytes | memoryview) -> None:
    stream.write(data)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: pathlib.Path) -> None:
    if sys.platform == "win32":  # folders cannot be flushed there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Rename without replacing; the folder is locked, so that nobody of ours makes ``target`` in between."""
    if target.exists():
        raise UsageError(f"{target} appeared during the conversion, and nothing is overwritten; choose another OUT")
    source.rename(target)
