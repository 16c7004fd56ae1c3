"""What a run has done so far, so that another can go on from there.

Each process keeps one file of lines. The first names the plan; each further one says that a unit (a layer) is whole in
the parts, with a checksum of every block that was written for it and whatever is to be remembered of it, or that a file
has reached the disk. A line is written when what it tells of has been: whatever a killed process leaves,
a line that is there holds, and the checksums catch a disk that lost what it had taken.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mla_convert import disk
from mla_convert.gathering import PAGE
from mla_convert.remains import PROGRESS
from mla_convert.version import __version__

_PIECE = 1 << 24


@dataclasses.dataclass(frozen=True)
class WrittenBlock:
    """Bytes [start, start + nbytes) of the file of that number in the plan, and their checksum."""

    file: int
    start: int
    nbytes: int
    checksum: int


@dataclasses.dataclass(frozen=True)
class Record:
    """One unit that is done: its blocks, and what its maker wants to know of it again (plain values for JSON)."""

    unit: str
    blocks: tuple[WrittenBlock, ...]
    data: dict[str, Any]


@dataclasses.dataclass
class Progress:
    """What the journals of a run tell: records by unit, and the numbers of the files that reached the disk."""

    records: dict[str, Record] = dataclasses.field(default_factory=dict)
    synced: set[int] = dataclasses.field(default_factory=set)


class Journal:
    """The journal that one process writes; made with its first line."""

    def __init__(self, folder: pathlib.Path, rank: int, plan: str) -> None:
        self._file = folder / PROGRESS.format(rank)
        if not self._file.exists():
            disk.append_line(self._file, _line(plan=plan))

    def add(self, record: Record) -> None:
        """Note that a unit is done."""
        disk.append_line(self._file, _unit_line(record))

    def synced(self, file: int) -> None:
        """Note that a file is complete and on the disk."""
        disk.append_line(self._file, _line(synced=file))


def rewrite(folder: pathlib.Path, plan: str, progress: Progress) -> None:
    """Put what is known to hold into the lead's journal, and remove all others."""
    lines = [_line(plan=plan)]
    lines += [_unit_line(record) for record in progress.records.values()]
    lines += [_line(synced=file) for file in sorted(progress.synced)]
    own = folder / PROGRESS.format(0)
    fresh = own.with_name(own.name + ".new")
    disk.write_text(fresh, "".join(f"{line}\n" for line in lines))
    fresh.replace(own)
    for file in folder.glob(PROGRESS.format("*")):
        if file != own:
            file.unlink(missing_ok=True)


def _unit_line(record: Record) -> str:
    return _line(unit=record.unit, blocks=[dataclasses.astuple(block) for block in record.blocks], data=record.data)


def _line(**entry: Any) -> str:
    return json.dumps(entry)


def read_journals(folder: pathlib.Path, plan: str) -> Progress | None:
    """What all processes have noted; None where there is no journal, or one of another plan."""
    files = sorted(folder.glob(PROGRESS.format("*")))
    progress = Progress()
    for file in files:
        lines = list(_lines(file))
        if not lines or lines[0].get("plan") != plan:
            return None
        for line in lines[1:]:
            if "synced" in line:
                progress.synced.add(line["synced"])
            else:
                blocks = tuple(WrittenBlock(*block) for block in line["blocks"])
                progress.records[line["unit"]] = Record(line["unit"], blocks, line["data"])
    return progress if files else None


def _lines(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal up to the first that was not written whole."""
    for line in file.read_bytes().splitlines(keepends=True):
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict) or not line.endswith(b"\n"):
            return
        yield found


def checksum(data: bytes | memoryview, start: int, before: int = 0) -> int:
    """A checksum of ``data``, which stand in a file from byte ``start`` on, going on from that of what came before.

    Of each whole page of the file its words are summed, and the CRC-32 of the sums is taken; at the edges of a block,
    of bytes as they are. It is the same however a block is cut, as long as the cuts lie between pages. It has to catch
    a disk that lost pages it had taken, not somebody who means harm, and CRC-32 of all bytes would cost as much as
    making them.
    """
    first = min(-start % PAGE, len(data))
    last = first + (len(data) - first) // PAGE * PAGE
    pages = np.frombuffer(data[first:last], np.int64).reshape(-1, PAGE // 8)
    for part in (data[:first], pages.sum(axis=1).tobytes(), data[last:]):
        before = zlib.crc32(part, before)
    return before


def holds(record: Record, parts: Sequence[pathlib.Path]) -> bool:
    """Whether all blocks of ``record`` stand in the parts as they were written; reads them."""
    return all(_block_holds(block, parts[block.file]) for block in record.blocks)


def _block_holds(block: WrittenBlock, part: pathlib.Path) -> bool:
    found, at, end = 0, block.start, block.start + block.nbytes
    try:
        with part.open("rb") as stream:
            stream.seek(at)
            while at < end and (data := stream.read(min(_PIECE - at % PAGE, end - at))):
                found = checksum(data, at, found)
                at += len(data)
    except FileNotFoundError:
        return False
    return at == end and found == block.checksum


def fingerprint(**what: Any) -> str:
    """One text for everything that decides which bytes are written; ``what`` are plain values for JSON.

    The version of this package is one of these: what one release has begun, another does not go on with.
    """
    text = json.dumps(what | {"version": __version__}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
