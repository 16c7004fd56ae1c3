"""Where results may be written, and that nothing that is there is changed: names of files, and checks of a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator

from mla_convert.errors import OutputError, UsageError
from mla_convert.paths import resolved
from mla_convert.remains import INCOMPLETE, completed, folders_of, read_renames, remove_temporary, stamp
from mla_convert.units import format_bytes

FOLDER = "mla_absorbed"
MANIFEST = "mla_manifest.json"
INDEX = "mla_absorbed.safetensors.index.json"
CARD = "README.md"
CONFIG = "config.json"
SHARD = "mla_absorbed-{number:05d}-of-{total:05d}.safetensors"

_OURS = ("mla_absorbed-*.safetensors", INDEX, MANIFEST)


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is to stand in ``folder``: complete with the file ``marker``, which comes last.

    ``whole`` says that it is a model's folder of its own, and not absorbed weights beside a model.
    """

    folder: pathlib.Path
    marker: str = MANIFEST
    whole: bool = False


def destination(source: pathlib.Path, out: pathlib.Path, *, whole: bool = False, dry_run: bool = False) -> Goal:
    """What results from ``source`` are to stand where, when ``out`` is asked for; nothing is made there.

    Absorbed weights go into ``out`` itself, or its subfolder ``mla_absorbed`` when it is the source; a ``whole`` model
    into a new or empty folder. UsageError where ``out`` cannot take them: it is a file or below one, holds another
    model, absorbed weights, or files under their names, or may not be written to.
    """
    with disk_errors(out):
        goal = _whole(source, out) if whole else _beside(source, out)
        _check_can_write(goal.folder)
        if goal.folder.is_dir():
            if not dry_run:
                tidy(goal.folder, goal.marker)
            check_free_names(goal)
        return goal


def _whole(source: pathlib.Path, out: pathlib.Path) -> Goal:
    folder = resolved(out, "OUT")
    if folder == source.resolve():
        raise UsageError(f"OUT {out} is SOURCE itself, which is never changed; a whole model goes into a new folder")
    return Goal(folder, CONFIG, whole=True)


def _beside(source: pathlib.Path, out: pathlib.Path) -> Goal:
    folder = resolved(out, "OUT")
    if folder == source.resolve():
        return Goal(folder / FOLDER)
    if folder.is_dir() and (model := _model_file(folder)):
        raise UsageError(
            f"{out} holds a model ({model.name}), and not the one that is converted; supported are a new or empty "
            "folder, or the source itself: choose another OUT"
        )
    return Goal(folder)


def free_space(folder: pathlib.Path) -> int:
    """Bytes free on the disk that ``folder`` is on, or will be."""
    return shutil.disk_usage(_existing(folder)).free


def check_space(folder: pathlib.Path, needed: int, kept: pathlib.Path | None = None, nbytes: int = 0) -> None:
    """UsageError where a disk has less free than it will get.

    That of ``folder`` (there, or to be made) gets ``needed`` bytes, and that of ``kept``, which may be the same one,
    the ``nbytes`` that are kept of what is read from the hub.
    """
    free = free_space(folder)
    together = kept is not None and _existing(kept).stat().st_dev == _existing(folder).stat().st_dev
    also = f", and what is read from the hub {format_bytes(nbytes)} in {kept}," if together and nbytes else ""
    if free < needed + (nbytes if together else 0):
        raise UsageError(
            f"{folder} needs {format_bytes(needed)}{also} and its disk has {format_bytes(free)} free; free some, or "
            f"choose an OUT on another disk{', or set HF_HOME to a folder on one' if also else ''}"
        )
    if kept is not None and not together and (free := free_space(kept)) < nbytes:
        raise UsageError(
            f"what is read from the hub is kept in {kept}, needs {format_bytes(nbytes)}, and that disk has "
            f"{format_bytes(free)} free; free some, or set HF_HOME to a folder on another disk"
        )


def tidy(folder: pathlib.Path, marker: str = MANIFEST) -> None:
    """Remove the temporary folder that a run left beside complete files when it was killed after its last rename.

    Where that can't be done (a disk that may not be written to, another conversion at work) it stays: it harms nothing.
    """
    if completed(folder, marker):
        with contextlib.suppress(OSError, UsageError), locked(folder):
            remove_temporary(folder)


def _model_file(folder: pathlib.Path) -> pathlib.Path | None:
    """A file that makes ``folder`` a model's folder, if there is one."""
    patterns = (CONFIG, "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
    files = (file for pattern in patterns for file in sorted(folder.glob(pattern)))
    return next((file for file in files if not any(file.match(ours) for ours in _OURS)), None)


def check_free_names(goal: Goal) -> None:
    """UsageError where the folder holds what is to be made, or files of such names that no run of ours left."""
    folder = goal.folder
    renames = read_renames(folder)
    if not goal.whole and (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} already holds absorbed weights ({MANIFEST}), and nothing is overwritten; choose another OUT, "
            f"or remove {MANIFEST} and mla_absorbed* there first"
        )
    for file in _in_the_way(goal, renames):
        if renames.get(file.relative_to(folder).as_posix()) == stamp(file):
            continue
        if goal.whole:
            raise UsageError(f"{folder} holds {file.name}; a whole model goes into a new or empty folder")
        raise UsageError(
            f"{folder} already holds {file.name}, and no {MANIFEST} that says what it is; nothing is overwritten: "
            "choose another OUT, or remove that file first"
        )


def _in_the_way(goal: Goal, renames: Iterable[str]) -> Iterator[pathlib.Path]:
    if not goal.whole:
        yield from sorted(file for pattern in _OURS for file in goal.folder.glob(pattern))
        return
    yield from _entries(goal.folder, {goal.folder / name for name in folders_of(renames)})


def _entries(folder: pathlib.Path, ours: set[pathlib.Path]) -> Iterator[pathlib.Path]:
    """What stands in ``folder``, and in those below it that a run of ours has made."""
    for entry in sorted(folder.iterdir()):
        if entry in ours and entry.is_dir():
            yield from _entries(entry, ours)
        elif entry.name != INCOMPLETE:
            yield entry


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The nearest of ``path`` and the folders above it that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _check_can_write(folder: pathlib.Path) -> None:
    base = _existing(folder)
    if not base.is_dir():
        raise UsageError(f"{base} is a file; OUT must be a folder, there already or to be made: choose another OUT")
    if not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(f"{base} may not be written to by this user; change its permissions, or choose another OUT")


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder for this process, so that two conversions cannot take each other's files for remains.

    The lock ends with the process, however that ends. File systems and platforms without such locks go without.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(f"another conversion is writing into {folder}; wait for it, or choose another OUT") from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turn errors of the operating system into ours."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing to {folder} failed ({error.strerror or error}); nothing there passes for complete: mend that "
            "(space, permissions) and convert again"
        ) from error
