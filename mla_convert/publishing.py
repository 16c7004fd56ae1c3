"""Put what a conversion wrote into a repository on the hub, through the hub's own client."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mla_convert.errors import OutputError, UsageError
from mla_convert.wording import option

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_OWN = {".gitattributes"}  # what the hub itself puts into a new repository


def check_repository(repo_id: str) -> None:
    """UsageError where ``repo_id`` cannot be the name of a repository."""
    if not _ID.fullmatch(repo_id):
        raise UsageError(f"{option('push', repo_id)} is no name of a repository; give org/name")


class Publisher:
    """A repository, ``org/name``, that takes the files of one conversion; checked, and made, before the work begins.

    The client finds its token, its endpoint (``HF_ENDPOINT``) and everything else where it always does. UsageError for
    a name that is none and for a repository that holds files already, OutputError where the hub does not take it.
    """

    def __init__(self, repo_id: str) -> None:
        from huggingface_hub import HfApi

        check_repository(repo_id)
        self.repo_id = repo_id
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        with self._errors(f"nothing was converted: log in with `hf auth login`, or leave {option('push')} out"):
            self._api.create_repo(repo_id, exist_ok=True)
            there = set(self._api.list_repo_files(repo_id)) - _OWN
        if there:
            raise UsageError(
                f"{option('push', repo_id)}: it holds {sorted(there)[0]} already, and nothing is overwritten; give the "
                "name of a new repository"
            )

    def push(self, folder: pathlib.Path, files: Iterable[str]) -> str:
        """Commit the ``files`` of ``folder``, under these names; returns where they are."""
        from huggingface_hub import CommitOperationAdd

        again = f"{folder} is complete: push it again with `hf upload {self.repo_id} {folder}`"
        with self._errors(again):
            commit = self._api.create_commit(
                self.repo_id,
                [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files],
                commit_message="Absorbed attention weights",
            )
        return str(commit.repo_url)

    @contextmanager
    def _errors(self, hint: str) -> Iterator[None]:
        from huggingface_hub.errors import HfHubHTTPError

        # Whichever library the client speaks HTTP with, its errors have one base.
        http_error: type[BaseException] = HfHubHTTPError.__mro__[1]
        try:
            yield
        except (HfHubHTTPError, http_error, OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise OutputError(
                f"{option('push', self.repo_id)}: the hub refused or could not be reached ({reason}); {hint}"
            ) from error
