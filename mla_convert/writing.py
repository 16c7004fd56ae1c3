"""Files that are either complete or not there.

They are made as parts, in the folder ``.mla_absorbed.incomplete`` inside the destination, at places known beforehand,
and flushed to the disk. Then the list of what is about to get which name is written, the parts are renamed, and the
file without which nothing is loaded comes last. Nothing that was there before is changed or overwritten.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from mla_convert import disk
from mla_convert.destination import Goal, disk_errors
from mla_convert.gathering import gathered
from mla_convert.journal import WrittenBlock, checksum
from mla_convert.remains import INCOMPLETE, JOURNAL, folders_of, list_renames, part, remove_temporary
from mla_convert.shard_plan import PlannedFile
from mla_convert.work import Block

MAX_SHARD_BYTES = 250_000_000
"""Data of one file of absorbed weights: the least that one process takes, so not the largest that loaders like. Of
DeepSeek-V3's factored weights, seven layers, so that nine processes have something to do."""


class Staging:
    """The planned files of a run, as parts, and the names they get in the end. Blocks may come from several threads."""

    def __init__(self, goal: Goal, files: Sequence[PlannedFile]) -> None:
        self.goal = goal
        self.files = tuple(files)
        self.parts = [part(goal.folder, file.name) for file in files]
        self._begun: set[int] = set()
        self._lock = threading.Lock()

    def write(self, block: Block) -> WrittenBlock:
        """Write a block at its place."""
        nbytes = found = 0

        def pieces() -> Iterator[memoryview]:
            nonlocal nbytes, found
            for piece in gathered(_rows(block.tensor.detach().cpu()), block.start):
                found, nbytes = checksum(piece, block.start + nbytes, found), nbytes + len(piece)
                yield piece

        with disk_errors(self.goal.folder):
            self._begin(block.file)
            disk.write_at(self.parts[block.file], block.start, pieces(), block.made)
        return WrittenBlock(block.file, block.start, nbytes, found)

    def _begin(self, number: int) -> None:
        with self._lock:
            if number not in self._begun:
                disk.make_file(self.parts[number], self.files[number].nbytes)
                disk.write_at(self.parts[number], 0, [self.files[number].header])
                self._begun.add(number)

    def sync(self, number: int) -> None:
        """Flush a file that is complete, or has no data at all."""
        with disk_errors(self.goal.folder):
            self._begin(number)
            disk.sync(self.parts[number])

    def commit(self, texts: Mapping[str, str], others: Sequence[str] = ()) -> list[str]:
        """Write the small files and give everything its name; returns the names, the last of ``texts`` coming last.

        ``others`` are names of parts that somebody else has put into the temporary folder.
        """
        folder = self.goal.folder
        *names, marker = [*(file.name for file in self.files), *others, *texts]
        with disk_errors(folder):
            for name, text in texts.items():
                disk.write_text(part(folder, name), text)
            disk.write_text(folder / INCOMPLETE / JOURNAL, list_renames(folder, [*names, marker]))
            disk.sync_folder(folder / INCOMPLETE)
            for name in names:
                self._move(name)
            for below in ("", *folders_of(names)):
                disk.sync_folder(folder / below)
            self._move(marker)
            disk.sync_folder(folder)
            remove_temporary(folder)
        return [*names, marker]

    def _move(self, name: str) -> None:
        target = self.goal.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        disk.move(part(self.goal.folder, name), target)


def _rows(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor on the host in row-major order; of rows that lie apart, as heads do, without a copy."""
    if tensor.is_contiguous():
        rows: Sequence[torch.Tensor] = [tensor]
    else:
        rows = tensor.unbind(0) if tensor[0].is_contiguous() else [tensor.contiguous()]
    for row in rows:
        yield row.reshape(-1).view(torch.uint8).numpy().data


def make_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Make ``folder`` and those above it that are missing; returns the ones made, innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made
