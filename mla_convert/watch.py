"""Notice that a source changes while it is read."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Collection, Iterable, Iterator

from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import CheckpointError, MLAConvertError
from mla_convert.hub import HubPath
from mla_convert.remains import stamp


class Watch:
    """The files that tensors of a checkpoint come from, as they were when the watch began."""

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        self._checkpoint = checkpoint
        self._files = {name: checkpoint.info(name).files for name in names}
        #: Repository and commit of a source on the hub, whose files all bear one time; empty for others.
        self.origin = str(checkpoint.path) if isinstance(checkpoint.path, HubPath) else ""
        #: Size and time of change of every file, by its name.
        self.stamps = {file: stamp(self._path(file)) for files in self._files.values() for file in files}

    def _path(self, file: str) -> pathlib.Path:
        return self._checkpoint.path / file

    def check_all(self) -> None:
        """:meth:`check` of every tensor."""
        self.check(self._files)

    def check(self, names: Iterable[str]) -> None:
        """CheckpointError where one of the files of ``names`` is no longer what it was."""
        for file in {file for name in names for file in self._files[name]}:
            if stamp(self._path(file)) != self.stamps[file]:
                raise CheckpointError(
                    f"{self._path(file)} changed while it was read; wait until nothing writes to it, and convert again"
                )

    @contextlib.contextmanager
    def reading(self, names: Collection[str]) -> Iterator[None]:
        """:meth:`check` when ``names`` have been read, or could not be: what changes is not called damaged."""
        try:
            yield
        except MLAConvertError:
            self.check(names)
            raise
        self.check(names)
