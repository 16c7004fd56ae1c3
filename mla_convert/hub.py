"""A repository on the Hugging Face Hub as a folder whose files are read by ranges of bytes.

:class:`HubPath` stands for a repository at a commit, or a file in it, and does what the readers of a checkpoint ask of
a path. What is read is kept (:mod:`mla_convert.hub_ranges`); a file that the hub client's own cache has is read from
there. All requests go through the hub client: its endpoint, token, offline mode and session are the caller's.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from mla_convert import hub_listings, hub_ranges
from mla_convert.errors import CheckpointError
from mla_convert.hub_errors import hub_errors

if sys.platform == "win32":
    _Path = pathlib.WindowsPath
else:
    _Path = pathlib.PosixPath

_ID = re.compile(r"([\w][\w.-]*/[\w.-]+?)(?:@([\w][\w./-]*))?")


class HubPath(_Path):
    """``org/name@commit`` or ``org/name@commit/file``: a folder or file that is read, and never written."""

    @property
    def repo_id(self) -> str:
        """The repository, ``org/name``."""
        return f"{self.parts[0]}/{self.parts[1].partition('@')[0]}"

    @property
    def commit(self) -> str:
        """The commit, forty hexadecimal digits."""
        return self.parts[1].partition("@")[2]

    @property
    def inside(self) -> str:
        """The file's name in the repository; empty for the repository itself."""
        return "/".join(self.parts[2:])

    def iterdir(self) -> Iterator[HubPath]:  # type: ignore[override]
        """The files at the top of the repository."""
        return (self / name for name in _listing(self.repo_id, self.commit) if "/" not in name)

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the repository has it."""
        return not self.inside or self.is_file()

    def is_dir(self, **_: Any) -> bool:
        """Whether this is the repository itself."""
        return not self.inside

    def is_file(self, **_: Any) -> bool:
        """Whether the repository has the file."""
        return self.inside in _listing(self.repo_id, self.commit)

    def is_symlink(self) -> bool:
        """Never: a repository has no links."""
        return False

    def resolve(self, strict: bool = False) -> HubPath:
        """The path itself."""
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size of the file; files of a commit never change, so that all are of one time, and on no disk of ours."""
        if not self.inside:
            return os.stat_result((0o40555, 0, -1, 0, 0, 0, 0, 0, 0, 0), {"st_mtime_ns": 0})
        size = _listing(self.repo_id, self.commit).get(self.inside)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file in the repository", str(self))
        return os.stat_result((0o100444, 0, -1, 0, 0, 0, size, 0, 0, 0), {"st_mtime_ns": 0})

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """The file, of which nothing is fetched that is not read; its bytes come as a raw stream."""
        if "r" not in mode or set(mode) - set("rbt"):
            raise _refusal(self, f"open with mode {mode!r}")
        if (local := self.cached()) is not None:
            return local.open(mode, buffering, encoding, errors, newline)
        stream: Any = _Stream(self)
        return stream if "b" in mode else io.TextIOWrapper(io.BufferedReader(stream), encoding, errors, newline)

    def read_bytes(self) -> bytes:
        """The whole file, through the hub client's own cache, and with its own patience."""
        with hub_errors(self.repo_id):
            return self._download().read_bytes()

    def read_text(self, encoding: str | None = None, errors: str | None = None, newline: str | None = None) -> str:
        """The whole file as text, as :meth:`read_bytes` gets it."""
        return io.TextIOWrapper(io.BytesIO(self.read_bytes()), encoding, errors, newline).read()

    def _download(self) -> pathlib.Path:
        from huggingface_hub import errors, hf_hub_download

        try:
            return pathlib.Path(hf_hub_download(self.repo_id, self.inside, revision=self.commit))
        except errors.LocalEntryNotFoundError as error:
            # The client's word for a first request that failed; why it did says what to do.
            cause = error.__cause__
            if not isinstance(cause, hub_ranges.connection_errors()):
                raise
        raise cause

    def cached(self) -> pathlib.Path | None:
        """The whole file in the hub client's cache, if it is there."""
        return hub_listings.in_cache(self.repo_id, self.inside, self.commit)

    def missing(self, start: int, nbytes: int) -> int:
        """How many of these bytes of the file would have to be fetched."""
        if self.cached() is not None:
            return 0
        return hub_ranges.missing(self.repo_id, self.commit, self.inside, start, nbytes)

    def span(self, start: int, nbytes: int) -> bytes | memoryview:
        """Some bytes of the file."""
        with hub_errors(self.repo_id):
            return hub_ranges.span(self.repo_id, self.commit, self.inside, start, nbytes, self.stat().st_size)


def _refusal(path: HubPath, what: str) -> io.UnsupportedOperation:
    return io.UnsupportedOperation(f"{path} is on the hub, where files are only read; {what} is not supported")


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: HubPath, *_: Any, **__: Any) -> Any:
        raise _refusal(self, name)

    return refuse


def _refuse_the_rest() -> None:
    """Let what paths can do on a disk, and is not written above, fail instead of touching a local file of that name."""
    on_disk = set(dir(pathlib.Path)) - set(dir(pathlib.PurePath)) - {"cwd", "home", "from_uri"}
    for name in on_disk - set(vars(HubPath)):
        if not name.startswith("_"):
            setattr(HubPath, name, _refused(name))


class _Stream(io.RawIOBase):
    """A file of a repository, read from wherever it was set to."""

    def __init__(self, path: HubPath) -> None:
        self._path, self._place, self._size = path, 0, path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._place))
        if count:
            buffer[:count] = self._path.span(self._place, count)
        self._place += count
        return count


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of ``org/name`` or ``org/name@revision``."""
    return _ID.fullmatch(text) is not None and not text.startswith(".")


def open_repository(text: str) -> HubPath:
    """The repository ``org/name[@revision]`` at the commit that the revision stands for now.

    Where the hub cannot be asked (offline mode, or no connection), the last one that was read or downloaded.
    CheckpointError where there is no such repository or revision, it may not be read, or cannot be reached.
    """
    from huggingface_hub import HfApi, is_offline_mode

    repo_id, revision = split_id(text)
    with hub_errors(repo_id, revision, text=text):
        if is_offline_mode():
            return _known(repo_id, revision, "the hub client is offline (HF_HUB_OFFLINE)")
        try:
            info = hub_ranges.patiently(lambda: HfApi().model_info(repo_id, revision=revision, files_metadata=True))
        except hub_ranges.connection_errors() as error:
            if not hub_ranges.passes(error):
                raise
            return _known(repo_id, revision, f"the hub cannot be reached ({hub_ranges.reason(error)})")
        files = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
        commit = str(info.sha)
        hub_listings.remember(repo_id, revision, commit, files)
    return HubPath(f"{repo_id}@{commit}")


def split_id(text: str) -> tuple[str, str]:
    """Repository and revision, ``main`` where none is given."""
    match = _ID.fullmatch(text)
    assert match is not None
    return match[1], match[2] or "main"


def _known(repo_id: str, revision: str, why: str) -> HubPath:
    """What was read before; CheckpointError with ``why`` where nothing was."""
    commit = hub_listings.remembered(repo_id, revision)
    if commit is None:
        config = hub_listings.in_cache(repo_id, "config.json", revision)
        commit = config.parent.name if config is not None else None
    if commit is None:
        raise CheckpointError(
            f"there is no folder {repo_id}, and {why}, and nothing of {repo_id} at {revision} was read before; go "
            f"online, or give the folder of a copy: hf download {repo_id} --revision {revision}"
        )
    return HubPath(f"{repo_id}@{commit}")


@functools.lru_cache(maxsize=64)
def _listing(repo_id: str, commit: str) -> dict[str, int]:
    """Every file of a commit with its size, as the hub or the hub client's cache has it."""
    listed = hub_listings.listing(repo_id, commit)
    if listed is not None:
        return listed
    config = hub_listings.in_cache(repo_id, "config.json", commit)
    if config is None:
        return {}
    files = (file for file in config.parent.rglob("*") if file.is_file())
    return {file.relative_to(config.parent).as_posix(): file.stat().st_size for file in files}


_refuse_the_rest()
