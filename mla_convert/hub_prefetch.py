"""The beginnings of files on the hub, fetched together before their headers are read."""

from __future__ import annotations

import pathlib
from concurrent.futures import ThreadPoolExecutor

from mla_convert.hub import HubPath

_CONNECTIONS = 8
#: The beginning of a file that is fetched at once, so that its header often needs no second request: so many bytes, and
#: so small a part of the file.
_BEGINNING, _SHARE = 1 << 17, 512


def prefetch_beginnings(files: list[pathlib.Path]) -> None:
    """Fetch the beginnings of files of a repository, several at once; nothing for files on disk."""
    remote = [file for file in files if isinstance(file, HubPath) and file.is_file() and file.cached() is None]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for fetched in [pool.submit(_beginning, file) for file in remote]:
            fetched.result()


def _beginning(file: HubPath) -> None:
    size = file.stat().st_size
    file.span(0, max(min(8, size), min(_BEGINNING, size // _SHARE)))
