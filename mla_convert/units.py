"""Figures as people read them."""

from __future__ import annotations

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: int) -> str:
    """A byte count in decimal units with three significant digits: ``1.23 GB``."""
    size = float(count)
    for unit in _UNITS:
        if size < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
