"""Where absorbed weights may be written, and what belongs to whom there.

Holds the names of the files, the checks of a destination, and the remains of an interrupted run: the folder
``.mla_absorbed.incomplete`` with its journal, from which the next run tells its own files from other people's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable, Iterator

from mla_convert.errors import SidecarError, UsageError
from mla_convert.paths import resolved
from mla_convert.units import format_bytes

FOLDER = "mla_absorbed"
MANIFEST = "mla_manifest.json"
INDEX = "mla_absorbed.safetensors.index.json"
CARD = "README.md"
INCOMPLETE = ".mla_absorbed.incomplete"
SHARD = "mla_absorbed-{number:05d}-of-{total:05d}.safetensors"

#: Inside the folder of an unfinished run: what is about to be renamed, and the ending of everything not yet renamed.
JOURNAL = "journal.json"
PART = ".part"
_OURS = ("mla_absorbed-*.safetensors", INDEX, MANIFEST)


def destination(source: pathlib.Path, out: pathlib.Path, *, dry_run: bool = False) -> pathlib.Path:
    """The folder that absorbed weights of ``source`` go into when ``out`` is asked for; nothing is made there.

    ``out`` itself, or its subfolder ``mla_absorbed`` when it is the source. UsageError where it cannot take them: it is
    a file or below one, holds another model, absorbed weights, or files under their names, or may not be written to.
    """
    with disk_errors(out):
        folder = resolved(out, "OUT")
        if folder == source.resolve():
            folder = folder / FOLDER
        elif folder.is_dir() and (model := _model_file(folder)):
            raise UsageError(
                f"{out} holds a model ({model.name}), and not the one that is converted; supported are a new or empty "
                "folder, or the source itself: choose another OUT"
            )
        _check_can_write(folder)
        if folder.is_dir():
            if not dry_run:
                tidy(folder)
            check_free_names(folder)
        return folder


def check_space(folder: pathlib.Path, needed: int) -> None:
    """UsageError where the disk that ``folder`` is on (or will be) has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed:
        raise UsageError(
            f"{folder} needs {format_bytes(needed)} and its disk has {format_bytes(free)} free; free some, or choose "
            "an OUT on another disk"
        )


def remove_remains(folder: pathlib.Path) -> None:
    """Remove what an interrupted run left in ``folder``: its own folder, and what it had given a final name.

    A set of weights whose manifest is in place is complete and stays. UsageError where the temporary folder holds
    files of somebody else.
    """
    temporary = folder / INCOMPLETE
    if not temporary.is_dir():
        return
    if not (folder / MANIFEST).exists():
        for name, (size, changed) in _read_journal(temporary).items():
            final = folder / name
            if not (temporary / (name + PART)).exists() and _stamp(final) == (size, changed):
                final.unlink()
    remove_temporary(temporary)


def tidy(folder: pathlib.Path) -> None:
    """Remove the temporary folder that a run left beside complete weights when it was killed after its last rename.

    Where that can't be done (a disk that may not be written to, another conversion at work) it stays: it harms nothing.
    """
    temporary = folder / INCOMPLETE
    if not (temporary.is_dir() and (folder / MANIFEST).is_file()):
        return
    with contextlib.suppress(OSError, UsageError), locked(folder):
        remove_temporary(temporary)


def remove_temporary(temporary: pathlib.Path) -> None:
    """Remove the folder of an unfinished run; UsageError where it holds files of somebody else."""
    for file in temporary.iterdir():
        if file.suffix == PART:
            file.unlink()
    # The journal goes after the files it tells about.
    (temporary / JOURNAL).unlink(missing_ok=True)
    try:
        temporary.rmdir()
    except OSError as error:
        raise UsageError(f"{temporary} holds files that are not of an interrupted conversion; remove it") from error


def journal(temporary: pathlib.Path, names: Iterable[str]) -> str:
    """The text of the journal: the final names, and the stamps of the files that will get them."""
    return json.dumps({name: _stamp(temporary / (name + PART)) for name in names})


def _read_journal(temporary: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Names with their stamps; empty where the run ended before the journal was complete, so before any renaming."""
    try:
        entries = json.loads((temporary / JOURNAL).read_bytes())
        return {name: (size, changed) for name, (size, changed) in entries.items() if "/" not in name}
    except (FileNotFoundError, ValueError):
        return {}


def _stamp(file: pathlib.Path) -> tuple[int, int] | None:
    """Size and time of change: renaming keeps both."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def _model_file(folder: pathlib.Path) -> pathlib.Path | None:
    """A file that makes ``folder`` a model's folder, if there is one."""
    patterns = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.gguf")
    files = (file for pattern in patterns for file in sorted(folder.glob(pattern)))
    return next((file for file in files if not any(file.match(ours) for ours in _OURS)), None)


def check_free_names(folder: pathlib.Path) -> None:
    """UsageError where ``folder`` holds weights, or files of their names that no interrupted run of ours left."""
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} already holds absorbed weights ({MANIFEST}), and nothing is overwritten; choose another OUT, "
            f"or remove {MANIFEST} and mla_absorbed* there first"
        )
    journal = _read_journal(folder / INCOMPLETE)
    for file in sorted(file for pattern in _OURS for file in folder.glob(pattern)):
        if journal.get(file.name) != _stamp(file):
            raise UsageError(
                f"{folder} already holds {file.name}, and no {MANIFEST} that says what it is; nothing is overwritten: "
                "choose another OUT, or remove that file first"
            )


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
        raise SidecarError(
            f"writing to {folder} failed ({error.strerror or error}); nothing usable was left there: mend that "
            "(space, permissions), and convert again"
        ) from error
