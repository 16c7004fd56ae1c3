"""What an unfinished run leaves in a folder, and how the next one tells it from other people's files.

Everything is made in the folder ``.mla_absorbed.incomplete``, under names that no loader takes. Before anything gets
its final name, a list of these names is written there, with the size and the time of change of each file, which
renaming keeps. So a file that a killed run had renamed already is known by more than its name.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterable

from mla_convert import disk
from mla_convert.errors import UsageError

INCOMPLETE = ".mla_absorbed.incomplete"

#: Inside that folder: the list of renames, the ending of everything not yet renamed, what the processes at work keep.
JOURNAL = "journal.json"
PART = ".part"
LOCK = "lock.json"
RANK = "rank-{}.json"
PROGRESS = "progress-{}.jsonl"
_MADE = (f"*{PART}", f"{RANK.format('*')}*", f"{PROGRESS.format('*')}*")

Stamp = tuple[int, int]


def part(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Where the file of that final name (relative to ``folder``) is made."""
    return folder / INCOMPLETE / (name.replace("%", "%25").replace("/", "%2F") + PART)


def stamp(file: pathlib.Path) -> Stamp | None:
    """Size and time of change; None where there is no file."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime_ns


def reusable(folder: pathlib.Path) -> int:
    """Bytes on the disk that an unfinished run in ``folder`` takes already."""
    nbytes = 0
    for file in (folder / INCOMPLETE).glob(f"*{PART}"):
        with contextlib.suppress(FileNotFoundError):  # another rank of this launch may be clearing up
            nbytes += getattr(file.stat(), "st_blocks", 0) * 512
    return nbytes


def list_renames(folder: pathlib.Path, names: Iterable[str]) -> str:
    """The text of the list: final names in order, and the stamps of the files that will get them."""
    return json.dumps({name: stamp(part(folder, name)) for name in names})


def read_renames(folder: pathlib.Path) -> dict[str, Stamp]:
    """Names with their stamps; empty where the run ended before the list was complete, so before any renaming."""
    try:
        entries = json.loads((folder / INCOMPLETE / JOURNAL).read_bytes())
        found = {name: (size, changed) for name, (size, changed) in entries.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}
    return {name: at for name, at in found.items() if ".." not in name.split("/") and not name.startswith("/")}


def renamed(folder: pathlib.Path) -> list[str]:
    """Names that the unfinished run had given already, to files that are still there as it left them."""
    renames = read_renames(folder)
    return [name for name, at in renames.items() if not part(folder, name).exists() and stamp(folder / name) == at]


def take_back(folder: pathlib.Path) -> None:
    """Give what had got its final name the temporary one again, so that the run can go on from before the renames."""
    for name in renamed(folder):
        disk.move(folder / name, part(folder, name))
    _remove_empty_folders(folder)
    (folder / INCOMPLETE / JOURNAL).unlink(missing_ok=True)


def remove_unbegun(temporary: pathlib.Path) -> None:
    """Remove journals whose process was killed before it had written their first line: they say nothing."""
    for file in temporary.glob(PROGRESS.format("*")):
        if b"\n" not in file.read_bytes():
            file.unlink()


def remove_remains(folder: pathlib.Path, marker: str, *, keep_lock: bool = False) -> None:
    """Remove what an interrupted run left in ``folder``: its own folder, and what it had given a final name.

    What has its ``marker``, the file that comes last, is complete and stays. ``keep_lock`` leaves the folder with the
    lock in it. UsageError where the temporary folder holds files of somebody else.
    """
    if not (folder / INCOMPLETE).is_dir():
        return
    refuse_others(folder)
    if not (folder / marker).exists():
        for name in renamed(folder):
            (folder / name).unlink()
        _remove_empty_folders(folder)
    remove_temporary(folder, keep_lock=keep_lock)


def remove_temporary(folder: pathlib.Path, *, keep_lock: bool = False) -> None:
    """Remove the folder of an unfinished run; UsageError where it holds files of somebody else."""
    refuse_others(folder)
    # The list of renames goes after the files it tells about, the lock last.
    for pattern in (*_MADE, f"{JOURNAL}*", *(() if keep_lock else (f"{LOCK}*",))):
        for file in (folder / INCOMPLETE).glob(pattern):
            file.unlink(missing_ok=True)
    if not keep_lock:
        (folder / INCOMPLETE).rmdir()


def refuse_others(folder: pathlib.Path) -> None:
    """UsageError where the temporary folder holds files of somebody else."""
    ours = (*_MADE, f"{JOURNAL}*", f"{LOCK}*")
    if any(not any(file.match(pattern) for pattern in ours) for file in (folder / INCOMPLETE).iterdir()):
        raise UsageError(f"{folder / INCOMPLETE} holds files that are not of an interrupted conversion; remove it")


def completed(folder: pathlib.Path, marker: str) -> bool:
    """Whether the temporary folder in ``folder`` is beside files that are complete: the run ended after its work."""
    if not (folder / INCOMPLETE).is_dir() or not (folder / marker).is_file():
        return False
    last = list(read_renames(folder).items())[-1:]
    return not last or (last[0][0] == marker and stamp(folder / marker) == last[0][1])


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that files of these names stand in, every level of them, outer ones first."""
    return sorted({str(above) for name in names for above in pathlib.PurePosixPath(name).parents} - {"."})


def _remove_empty_folders(folder: pathlib.Path) -> None:
    """Remove what was made for the names of the list of renames, and holds nothing."""
    for below in reversed(folders_of(read_renames(folder))):
        with contextlib.suppress(OSError):
            (folder / below).rmdir()
