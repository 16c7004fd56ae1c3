"""Operations on the disk: all of what is handed over is written, or an error is raised."""

from __future__ import annotations

import io
import pathlib
import resource
from typing import Any

import pytest

from mla_convert import disk


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
