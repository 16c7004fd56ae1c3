"""The content of a folder, to compare before and after."""

from __future__ import annotations

import pathlib


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
