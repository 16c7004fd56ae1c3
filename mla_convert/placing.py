"""Files of the source that go with a result as they are: links or copies of weights, copies of everything small."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping

from mla_convert import disk
from mla_convert.destination import CARD, CONFIG, FOLDER, MANIFEST, Goal, disk_errors
from mla_convert.errors import OutputError, UsageError
from mla_convert.remains import INCOMPLETE, part, stamp
from mla_convert.wording import option

LINKS = ("auto", "hard", "reflink", "copy")
#: Where the source's own card goes in a folder that has one of its own.
SOURCE_CARD = "README.source.md"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".onnx")
_FICLONE = 0x40049409  # linux/fs.h


def check_link(given: str) -> str:
    """How weights are to be placed; UsageError for anything unknown."""
    if given not in LINKS:
        raise UsageError(f"{option('link', given)}; supported are {', '.join(LINKS)}")
    return given


def companions(source: pathlib.Path, *, code: bool = True) -> dict[str, pathlib.Path]:
    """What goes with a model beside its weights and config, by the name it gets.

    Tokenizer, generation config, licences, its card under another name, and, with ``code``, its own modelling files.
    Files of subfolders come along; hidden ones, absorbed weights, and subfolders that are models or results of their
    own do not.
    """
    found: dict[str, pathlib.Path] = {}
    for file in _files(source):
        name = file.relative_to(source).as_posix()
        if name == CONFIG or file.name.endswith(_WEIGHTS) or (file.suffix == ".py" and not code):
            continue
        found[SOURCE_CARD if name == CARD else name] = file
    return found


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and not _of_its_own(entry):
            yield from _files(entry)


def _of_its_own(folder: pathlib.Path) -> bool:
    """Whether a subfolder is a model, the result of a conversion, or what an interrupted one has left."""
    return folder.name == FOLDER or any((folder / name).exists() for name in (CONFIG, MANIFEST, INCOMPLETE))


def needs_copies(files: Iterable[pathlib.Path], folder: pathlib.Path, link: str) -> bool:
    """Whether ``files`` have to be copied to get into ``folder``, which need not be there yet.

    Tried with the first of them, under a name that is removed at once: disks differ in what they allow. OutputError
    where ``link`` asks for what cannot be.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    trial = there / f"{INCOMPLETE}.{secrets.token_hex(4)}"
    try:
        return not all(_share(file.resolve(), trial, link) for file in itertools.islice(files, 1))
    finally:
        trial.unlink(missing_ok=True)


def place(goal: Goal, files: Mapping[str, pathlib.Path], link: str) -> Iterator[str]:
    """Put the ``files`` into the temporary folder under the names they are to get, and flush them to the disk.

    Yields the name of each one done. A copy that is there already, of an earlier run, is known by its time of change,
    which is set last.
    """
    with disk_errors(goal.folder):
        for name, file in files.items():
            target = part(goal.folder, name)
            if stamp(target) != stamp(file):
                target.unlink(missing_ok=True)
                _place(file.resolve(), target, link)
            disk.sync(target)
            yield name


def _place(source: pathlib.Path, target: pathlib.Path, link: str) -> None:
    if not _share(source, target, link):
        shutil.copyfile(source, target)
        shutil.copystat(source, target)


def _share(source: pathlib.Path, target: pathlib.Path, link: str) -> bool:
    """Put ``source`` at ``target`` without a copy of its data; whether that was allowed, and could be done."""
    if link in ("auto", "hard"):
        try:
            os.link(source, target)
            return True
        except OSError as error:
            if link == "hard":
                raise OutputError(
                    f"{source} cannot be linked into {target.parent} ({error.strerror}); use {option('link', 'auto')} "
                    "or copy"
                ) from error
    if link in ("auto", "reflink"):
        try:
            _reflink(source, target)
            return True
        except OSError as error:
            target.unlink(missing_ok=True)
            if link == "reflink":
                raise OutputError(
                    f"{source} cannot share its blocks with a file in {target.parent} ({error.strerror}); use "
                    f"{option('link', 'auto')} or copy"
                ) from error
    return False


def _reflink(source: pathlib.Path, target: pathlib.Path) -> None:
    if sys.platform != "linux":
        raise OSError(95, "not known on this system")
    import fcntl

    with source.open("rb") as read, target.open("xb") as written:
        fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
    with contextlib.suppress(OSError):
        shutil.copystat(source, target)
