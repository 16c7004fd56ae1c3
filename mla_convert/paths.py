"""Paths that callers give, and what the operating system says of them, as errors of ours."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from mla_convert.errors import MLAConvertError, UsageError


def path_of(given: object, what: str) -> pathlib.Path:
    """``given`` as a path; ``what`` is its name in the call. UsageError for what is no path, and for an empty one."""
    found = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(found, str):
        raise UsageError(f"{what} is a path, as str or os.PathLike; found {type(given).__name__} {given!r:.80}")
    if not found or "\0" in found:
        raise UsageError(f"{what} is {found!r}, which is no path; give the name of a file or folder")
    return pathlib.Path(found)


def source_of(given: object) -> pathlib.Path:
    """SOURCE as a path; one that is given as ``./…`` and is not there becomes absolute: it is no name on the hub."""
    path = path_of(given, "SOURCE")
    dotted = os.fspath(given).startswith(("./", f".{os.sep}")) if isinstance(given, str) else False
    return path.absolute() if dotted and not path.exists() else path


def resolved(path: pathlib.Path, what: str) -> pathlib.Path:
    """``path`` with links followed, as far as it exists; UsageError where the links go in a circle."""
    try:
        path.resolve(strict=True)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        pass  # the caller says what stands there
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{what} {path} cannot be followed ({_reason(error)}); give another one") from error
    return path.resolve()


def new_file(given: object, what: str) -> pathlib.Path:
    """A file to be made; UsageError, before any long work, where there is one already or it could not be made."""
    path = path_of(given, what)
    if os.path.lexists(path):
        raise UsageError(f"{what} {path}: it exists already and nothing is overwritten; give another name")
    if not path.parent.is_dir():
        raise UsageError(f"{what} {path}: there is no folder {path.parent}; make it first, or give another name")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{what} {path}: {path.parent} may not be written to by this user; give another name")
    return path


@contextlib.contextmanager
def reading(where: pathlib.Path, kind: type[MLAConvertError], hint: str) -> Iterator[None]:
    """Turn errors of the operating system into ``kind``, naming the file (``where``, if the system names none)."""
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or where} cannot be read ({error.strerror or error}); {hint}") from error


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error)
