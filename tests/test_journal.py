"""Checksums of blocks: the same however a block is cut, and another when anything in it changes."""

from __future__ import annotations

import pathlib
import random

import pytest

from mla_convert import journal
from mla_convert.gathering import PAGE
from mla_convert.journal import Record, WrittenBlock, checksum, holds

EDGES = [(0, 0), (0, 1), (0, 3 * PAGE), (5, PAGE - 9), (5, 3 * PAGE), (PAGE - 1, 2), (PAGE - 1, 4 * PAGE + 5)]


@pytest.mark.parametrize(("start", "size"), EDGES)
def test_cuts_between_pages_change_nothing(start: int, size: int) -> None:
    data = random.Random(0).randbytes(size)
    cuts = [0, *(at for at in range(-start % PAGE, size, PAGE) if at), size]
    found = 0
    for first, last in zip(cuts, cuts[1:], strict=False):
        found = checksum(data[first:last], start + first, found)
    assert found == checksum(data, start)


@pytest.mark.parametrize(("start", "size"), [edges for edges in EDGES if edges[1]])
def test_whatever_changes_is_noticed(start: int, size: int) -> None:
    data = bytearray(random.Random(0).randbytes(size))
    whole = checksum(data, start)
    for at in {0, size // 2, size - 1}:
        data[at] ^= 1
        assert checksum(data, start) != whole
        data[at] ^= 1
    first = -start % PAGE
    if size >= first + 2 * PAGE:  # a page that was lost, and two that came to each other's place
        page, other = data[first : first + PAGE], data[first + PAGE : first + 2 * PAGE]
        assert checksum(data[:first] + bytes(PAGE) + data[first + PAGE :], start) != whole
        assert checksum(data[:first] + other + page + data[first + 2 * PAGE :], start) != whole


@pytest.mark.parametrize("piece", [PAGE, 1 << 24])
@pytest.mark.parametrize(("start", "size"), EDGES)
def test_blocks_are_found_in_their_parts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, start: int, size: int, piece: int
) -> None:
    monkeypatch.setattr(journal, "_PIECE", piece)
    data = random.Random(0).randbytes(size)
    part = tmp_path / "part"
    part.write_bytes(bytes(start) + data + b"9" * 7)
    block = WrittenBlock(0, start, size, checksum(data, start))
    assert holds(Record("layer 0", (block,), {}), [part])
    if size:
        part.write_bytes(bytes(start) + data[:-1])
        assert not holds(Record("layer 0", (block,), {}), [part])
        part.write_bytes(bytes(start) + data[:-1] + bytes([data[-1] ^ 255]))
        assert not holds(Record("layer 0", (block,), {}), [part])
    assert not holds(Record("layer 0", (block,), {}), [tmp_path / "nothing"])
