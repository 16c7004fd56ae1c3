"""safetensors files: headers, checked against the file, and single tensors read from them.

Data are read with ordinary reads at the tensor's own place, not through a mapping of the file: mapped pages would count
as this process's memory for as long as a file stays open.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
import math
import os
import pathlib
import stat
from collections.abc import Callable
from typing import Any

import torch

from mla_convert.errors import CheckpointError, FormatError
from mla_convert.hub import HubPath

#: Codes of the format for every dtype that is read.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER = 100_000_000  # the format's own limit
_LARGEST_SIZE = 2**63  # of a tensor in bytes, its empty dimensions not counted: beyond it PyTorch has no shape
_AGAIN = "fetch the file again"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor as it stands in one file: ``start`` counts bytes from the beginning of the file."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    nbytes: int


def read_header(file: pathlib.Path) -> dict[str, Piece]:
    """Every tensor of a safetensors file, from its header alone.

    CheckpointError for a file that is missing, cut short, too long, or whose header is damaged or names a tensor twice.
    """
    text, size = _read_header(file)
    header = parse_json(text, what=f"the header of {file}", hint=_AGAIN)
    header.pop("__metadata__", None)
    base = 8 + len(text)
    pieces = {name: _piece(file, name, entry, base) for name, entry in header.items()}
    _check_extent(file, pieces, base, size)
    return pieces


def read_metadata(file: pathlib.Path) -> dict[str, str]:
    """What a safetensors file says of itself (``__metadata__``); errors as of :func:`read_header`."""
    text, _ = _read_header(file)
    said = parse_json(text, what=f"the header of {file}", hint=_AGAIN).get("__metadata__") or {}
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise CheckpointError(f"the header of {file} has metadata that are not texts by name; {_AGAIN}")
    return said


def _read_header(file: pathlib.Path) -> tuple[bytes, int]:
    """The header's JSON, and the size of the file."""
    try:
        status = file.stat()
        _check_kind(file, status)
        size = status.st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            _check_beginning(file, start, length, size)
            return stream.read(length), size
    except OSError as error:
        raise _unreadable(file, error) from error


def _check_kind(file: pathlib.Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for somebody who writes
        raise CheckpointError(f"{file} is not a file; {_AGAIN}")


def read_piece(piece: Piece, memory: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
    """The tensor in memory of its own (or that ``memory`` gives: uint8); nothing else of the file is read."""
    data = torch.empty(piece.nbytes, dtype=torch.uint8) if memory is None else memory(piece.nbytes)
    try:
        _check_kind(piece.file, piece.file.stat())  # it was a file once; what is there now may be something else
        with piece.file.open("rb", buffering=0) as stream:
            stream.seek(piece.start)
            done = _fill(stream, data.numpy().data)
    except OSError as error:
        raise _unreadable(piece.file, error) from error
    if done < piece.nbytes:
        raise CheckpointError(f"{piece.file} ends inside {piece.name}: it was cut short while open; {_AGAIN}")
    return data.view(piece.dtype).reshape(piece.shape)


def _fill(stream: io.RawIOBase, view: memoryview) -> int:
    """Read until ``view`` is full or the file ends (one read returns at most 2 GiB); the bytes read."""
    done = 0
    while done < len(view) and (count := stream.readinto(view[done:])):
        done += count
    return done


def _unreadable(file: pathlib.Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read ({error.strerror}); {_AGAIN} or check its rights")


def parse_json(text: bytes, *, what: str, hint: str) -> dict[str, Any]:
    """A JSON object, refusing other JSON, broken JSON and keys that come twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            twice = sorted(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{what} names {', '.join(twice)} twice; {hint}")
        return keys

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({error}); {hint}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, not an object; {hint}")
    return value


def _check_beginning(file: pathlib.Path, start: bytes, length: int, size: int) -> None:
    if start == b"version ":
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    if len(start) < 8 or (length <= _LARGEST_HEADER and 8 + length > size):
        raise CheckpointError(f"{file} is cut short: {size} bytes, less than its header needs; {_AGAIN}")
    if length > _LARGEST_HEADER:
        raise CheckpointError(f"{file} is not a safetensors file (its header would have {length} bytes); {_AGAIN}")


def _piece(file: pathlib.Path, name: str, entry: Any, base: int) -> Piece:
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(code, str) and all(type(number) is int and number >= 0 for number in (*shape, start, end))
        name.encode()  # half a character, which JSON can spell, is in no text
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"the header of {file} describes {name} in a damaged way ({entry!r:.100}); {_AGAIN}")
    if code not in DTYPES:
        raise FormatError(f"{name} in {file} has dtype {code!r}; supported are {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * DTYPES[code].itemsize
    if nbytes != end - start:
        raise CheckpointError(
            f"{name} in {file} has {end - start} bytes, but shape {list(shape)} in {code} needs {nbytes}; {_AGAIN}"
        )
    if math.prod(size or 1 for size in shape) * DTYPES[code].itemsize >= _LARGEST_SIZE:
        raise CheckpointError(f"{name} in {file} has shape {list(shape)!r:.100}, larger than any tensor; {_AGAIN}")
    return Piece(file, name, shape, DTYPES[code], base + start, nbytes)


def _check_extent(file: pathlib.Path, pieces: dict[str, Piece], base: int, size: int) -> None:
    place = base
    for piece in sorted(pieces.values(), key=lambda piece: (piece.start, piece.nbytes)):
        if piece.start != place:
            raise CheckpointError(f"the header of {file} leaves a gap or an overlap before {piece.name}; {_AGAIN}")
        place += piece.nbytes
    if size < place:
        raise CheckpointError(f"{file} is cut short: {size} bytes of the {place} that its header describes; {_AGAIN}")
    if size > place:
        raise CheckpointError(f"{file} is longer ({size} bytes) than its header describes ({place}); {_AGAIN}")


def is_readable(file: pathlib.Path) -> bool:
    """Whether there is a regular file, links followed (a hub cache keeps files as links to its blobs)."""
    return file.is_file() and (isinstance(file, HubPath) or os.access(file, os.R_OK))
