"""What a run has to make: which files, of which units of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mla_convert.shard_plan import PlannedFile
from mla_convert.work import Unit


@dataclasses.dataclass(frozen=True)
class Job:
    """What is made: ``files``, by ``units``. ``plan`` is one text for everything that decides the bytes.

    ``largest`` is the largest tensor read or written, in bytes, ``noun`` what units are called, and ``release`` lets go
    of the memory that they have shared, when they have ended.
    """

    files: tuple[PlannedFile, ...]
    units: tuple[Unit, ...]
    plan: str
    largest: int
    noun: str = "layers"
    release: Callable[[], None] = lambda: None

    @property
    def bytes_out(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def groups(self) -> list[tuple[int, ...]]:
        """Files that must be written by one process, since a unit writes to several of them."""
        joined: dict[int, set[int]] = {file: {file} for file in range(len(self.files))}
        for unit in self.units:
            together = set().union(*(joined[file] for file in unit.files))
            for file in together:
                joined[file] = together
        return sorted({tuple(sorted(group)) for group in joined.values()})
