"""safetensors files planned ahead: which tensors stand in which file, and where in it.

The plan follows from names, shapes and dtypes alone, so that every worker and every process knows the place of what it
makes, and the files come out the same however the work was shared.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

import torch

from mla_convert.gathering import PAGE
from mla_convert.shards import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor in a file to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PlannedFile:
    """A safetensors file to be written: its name, its tensors in order, its header, and each tensor's place."""

    def __init__(self, name: str, tensors: Sequence[FileTensor]) -> None:
        self.name = name
        self.tensors = tuple(tensors)
        self.header = _header(tensors)
        #: Where each tensor's data start, in bytes from the beginning of the file.
        self.starts: dict[str, int] = {}
        #: Bytes of the whole file.
        self.nbytes = len(self.header)
        for tensor in tensors:
            self.starts[tensor.name] = self.nbytes
            self.nbytes += tensor.nbytes


def plan_shards(units: Iterable[Sequence[FileTensor]], max_bytes: int) -> list[list[FileTensor]]:
    """Split tensors, in order, into shards of at most ``max_bytes`` of data.

    The tensors of a unit, which are made together, share a shard where they fit into one; a unit that does not gets
    shards of its own, and a tensor that is larger than ``max_bytes`` one for itself.
    """
    shards: list[list[FileTensor]] = []
    room = 0
    for unit in units:
        size = sum(tensor.nbytes for tensor in unit)
        if size > max_bytes:
            shards += _split(unit, max_bytes)
            room = 0
            continue
        if size > room or not shards:
            shards.append([])
            room = max_bytes
        shards[-1] += unit
        room -= size
    return [shard for shard in shards if shard]


def _split(tensors: Sequence[FileTensor], max_bytes: int) -> Iterator[list[FileTensor]]:
    shard: list[FileTensor] = []
    for tensor in tensors:
        if shard and sum(other.nbytes for other in shard) + tensor.nbytes > max_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def index_text(files: Sequence[PlannedFile]) -> str:
    """The index that stands beside shards, in safetensors' form: which tensor stands in which file."""
    weight_map = {tensor.name: file.name.rpartition("/")[2] for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def _header(tensors: Iterable[FileTensor]) -> bytes:
    """The beginning of a safetensors file of these tensors: length, JSON, and spaces up to the end of a page.

    The format asks for a multiple of 8. Data that begin with a page are written, and mapped into memory, by pages.
    """
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
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text
