"""Pieces gathered into chunks that lie in memory as they will lie in a file."""

from __future__ import annotations

import mmap
import random

import pytest

from mla_convert import gathering
from mla_convert.gathering import CHUNK, PAGE, address, gathered


@pytest.mark.parametrize("start", [0, 1, PAGE - 1, PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("sizes", [(), (1,), (PAGE,), (0, 3, 0), (7, 2 * CHUNK, 1), (CHUNK - 17,), (999,) * 9000])
def test_chunks_are_the_pieces_and_end_with_pages(sizes: tuple[int, ...], start: int) -> None:
    data = random.Random(0).randbytes(sum(sizes))
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)] if len(sizes) < 100 else range(0, len(data) + 1, 999)
    pieces = [memoryview(data)[first:last] for first, last in zip(ends, ends[1:], strict=False)]
    found, at = bytearray(), start
    for chunk in gathered(pieces, start):
        assert len(chunk) <= CHUNK and at % PAGE == address(chunk) % PAGE
        found += chunk
        at += len(chunk)
        assert at % PAGE == 0 or len(found) == len(data)
    assert found == data
    assert len(data) < CHUNK or max(map(len, gathered(pieces, start))) > CHUNK - PAGE


@pytest.mark.parametrize("nbytes", [PAGE - 1, PAGE, 2 * PAGE + 5, 2 * CHUNK + PAGE + 5])
@pytest.mark.parametrize(("start", "offset"), [(0, 0), (3 * PAGE, 0), (PAGE, 8), (8, 8)])
def test_whole_pages_that_lie_right_are_not_copied(nbytes: int, start: int, offset: int) -> None:
    memory = memoryview(mmap.mmap(-1, nbytes + 2 * PAGE))
    memory[:] = random.Random(0).randbytes(len(memory))
    piece = memory[offset : offset + nbytes]
    found, copied = bytearray(), 0
    for chunk in gathered([piece, piece[:7]], start):
        copied += not 0 <= address(chunk) - address(memory) < len(memory)
        assert len(chunk) <= CHUNK and address(chunk) % PAGE == (start + len(found)) % PAGE
        found += chunk
    assert found == bytes(piece) + bytes(piece[:7])
    aligned = start % PAGE == offset == 0
    assert copied == (1 if aligned else -(-(start % PAGE + nbytes + 7) // CHUNK))


def test_each_thread_has_its_own_memory() -> None:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: address(gathering._memory.bytes)).result()
    assert theirs != address(gathering._memory.bytes)
