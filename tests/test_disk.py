"""Operations on the disk: all of what is handed over is written, or an error is raised."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pathlib
import random
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mla_convert import disk
from mla_convert.gathering import PAGE, address, gathered


class _Reluctant(io.FileIO):
    """A file that takes seven bytes at a time, as the system may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:7])


def test_writes_that_come_short_are_gone_on_with(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, block = tmp_path / "lines", tmp_path / "block"
    block.write_bytes(bytes(40))
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "open", lambda file, mode, buffering: _Reluctant(file, mode))
        disk.append_line(lines, "one line that is longer")
        disk.append_line(lines, "ä" * 20)
        disk.write_at(block, 3, [b"0123456789", b"abcdefghij"])
    assert lines.read_text("utf-8") == f"one line that is longer\n{'ä' * 20}\n"
    assert block.read_bytes() == bytes(3) + b"0123456789abcdefghij" + bytes(17)


def test_a_line_that_does_not_fit_is_an_error(tmp_path: pathlib.Path) -> None:
    """A file may have so many bytes and no more: the system takes what fits of a write, and says how much that was."""
    file = tmp_path / "journal"
    disk.append_line(file, "the first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            disk.append_line(file, "the second, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text().startswith("the first\n")


def test_files_that_may_only_be_read_are_flushed(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "LICENSE"
    file.write_text("free")
    file.chmod(0o444)
    disk.sync(file)


PLACES = [
    (0, PAGE * 300),
    (0, PAGE * 300 + 5),
    (3, PAGE * 300),
    (PAGE - 1, 5_000_000),
    (PAGE, 9_000_001),
    (2 * PAGE, 77),
]


class _System:
    """Stands for a file system with direct writes: counts them, and holds them to what such systems ask for.

    The writes themselves go through the page cache, so that the tests run on any disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flag: int = 1 << 27) -> None:
        self.written = 0
        self._flag, self._open, self._pwrite = flag, os.open, os.pwrite
        monkeypatch.setattr(disk, "_DIRECT", flag)
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def open(self, path: Any, flags: int, *rest: Any) -> int:
        return self._open(path, flags & ~self._flag, *rest)

    def pwrite(self, handle: int, data: memoryview, start: int) -> int:
        assert start % PAGE == len(data) % PAGE == address(data) % PAGE == 0 and len(data)
        self.written += len(data)
        return self._pwrite(handle, data, start)


def write_and_compare(file: pathlib.Path, start: int, size: int, direct: bool = True) -> None:
    """Write random bytes into a file of ones; what is around them must stay."""
    data = random.Random(size).randbytes(size)
    file.write_bytes(b"1" * (start + size + 9))
    disk.write_at(file, start, gathered([memoryview(data)], start), direct)
    assert file.read_bytes() == b"1" * start + data + b"1" * 9


@pytest.mark.parametrize(("start", "size"), PLACES)
def test_whole_pages_pass_by_the_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, start: int, size: int
) -> None:
    system = _System(monkeypatch)
    write_and_compare(tmp_path / "file", start, size)
    assert system.written > size - 2 * PAGE - disk._LEAST_DIRECT if size > PAGE else system.written == 0
    system.written = 0
    write_and_compare(tmp_path / "file", start, size, direct=False)
    assert system.written == 0


@pytest.mark.parametrize(("start", "size"), PLACES)
def test_this_disk_takes_them_too(tmp_path: pathlib.Path, start: int, size: int) -> None:
    """Through whatever way the disk of this machine has."""
    write_and_compare(tmp_path / "file", start, size)


def test_what_does_not_lie_as_in_the_file_goes_through_the_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, file = _System(monkeypatch), tmp_path / "file"
    file.write_bytes(bytes(PAGE * 400))
    data = bytearray(PAGE * 300)
    shift = 1 + -address(data) % PAGE
    disk.write_at(file, 0, [memoryview(data)[shift : shift + PAGE * 200]], True)
    assert system.written == 0


@contextlib.contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, place: str, error: int) -> Iterator[list[int]]:
    """Direct writes fail with ``error``, when the file is opened, or when it is written."""
    tried: list[int] = []

    def fail(*_: Any) -> int:
        tried.append(error)
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        system = _System(patch)

        def refuse(original: Callable[..., int]) -> Callable[..., int]:
            def opening(path: Any, flags: int, *rest: Any) -> int:
                return fail() if flags & 1 << 27 else original(path, flags, *rest)

            return opening if place == "open" else fail

        patch.setattr(os, place, refuse(getattr(system, place)))
        yield tried


@pytest.mark.parametrize("place", ["open", "pwrite"])
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_disk_without_direct_writes_takes_them_through_the_cache(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, error: int
) -> None:
    with caplog.at_level(logging.INFO, "mla_convert"), refusing(monkeypatch, place, error) as tried:
        write_and_compare(tmp_path / "file", 3, 9_000_000)
    assert len(tried) == 1  # once for each file that is written, not for each piece
    assert f"{tmp_path / 'file'} is written through the page cache" in caplog.text


@pytest.mark.parametrize("place", ["open", "pwrite"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_other_errors_of_direct_writes_are_errors(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, place: str, error: int
) -> None:
    with refusing(monkeypatch, place, error), pytest.raises(OSError) as caught:
        write_and_compare(tmp_path / "file", 0, 9_000_000)
    assert caught.value.errno == error


def test_direct_writes_that_come_short_are_done_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = _System(monkeypatch)
    monkeypatch.setattr(os, "pwrite", lambda handle, data, start: system.pwrite(handle, data[:PAGE], start))
    write_and_compare(tmp_path / "file", 5, 9_000_000)
    assert system.written == 3 * PAGE  # of each chunk
