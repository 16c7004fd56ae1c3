"""What the hub client raises, as errors of ours that say what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Iterator

from mla_convert import hub_ranges
from mla_convert.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What was asked for: a repository, a revision of it, and how the caller wrote both."""

    repo_id: str
    revision: str
    text: str

    @property
    def no_folder(self) -> str:
        return f"there is no folder {self.text or self.repo_id}"


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str = "main", *, text: str = "") -> Iterator[None]:
    """Whatever the hub client raises, as one CheckpointError that says what to do."""
    asked = _Asked(repo_id, revision, text)
    messages = _messages()
    try:
        yield
    except tuple(kind for kinds, _ in messages for kind in kinds) as error:
        message = next(message for kinds, message in messages if isinstance(error, kinds))(asked, error)
        if message is None:
            raise
        raise CheckpointError(message) from error


_Message = Callable[[_Asked, BaseException], str | None]


def _messages() -> list[tuple[tuple[type[BaseException], ...], _Message]]:
    """What to say of each class of error; those that derive from others stand before them."""
    from huggingface_hub import errors

    return [
        ((errors.GatedRepoError,), _gated),
        ((errors.RepositoryNotFoundError,), _no_repository),
        ((errors.RevisionNotFoundError,), _no_revision),
        ((errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError), _offline),
        ((errors.EntryNotFoundError,), _no_file),
        ((errors.HFValidationError,), _no_id),
        (hub_ranges.connection_errors(), _no_answer),
        ((OSError,), _full_disk),
    ]


def _gated(asked: _Asked, error: BaseException) -> str:
    return (
        f"{asked.repo_id} is on the hub, and may not be read without leave: accept its conditions on its page, and log "
        "in with `hf auth login` or set HF_TOKEN"
    )


def _no_repository(asked: _Asked, error: BaseException) -> str:
    return (
        f"{asked.no_folder}, and no repository {asked.repo_id} on the hub that may be read; check the name, or, where "
        "it is private, log in with `hf auth login`"
    )


def _no_revision(asked: _Asked, error: BaseException) -> str:
    return (
        f"{asked.repo_id} on the hub has no revision {asked.revision!r}; give a branch, a tag or a whole commit after "
        "the @"
    )


def _offline(asked: _Asked, error: BaseException) -> str:
    return (
        f"a part of {asked.repo_id} that is needed was not read before, and the hub cannot be asked now "
        f"({hub_ranges.reason(error)}); go online (HF_HUB_OFFLINE=0) and run this again"
    )


def _no_file(asked: _Asked, error: BaseException) -> str:
    return f"{asked.repo_id} on the hub lacks a file ({hub_ranges.reason(error)})"


def _no_id(asked: _Asked, error: BaseException) -> str:
    return f"{asked.no_folder}, and it is no hub id ({hub_ranges.reason(error)})"


def _no_answer(asked: _Asked, error: BaseException) -> str:
    reason = hub_ranges.reason(error)
    if hub_ranges.status(error) in (401, 403):
        return (
            f"the hub refuses {asked.repo_id} to the token that is set ({reason}); log in anew with `hf auth login`, "
            "or correct HF_TOKEN"
        )
    wait = hub_ranges.asked_wait(error)
    later = f"in {wait:.0f} s, as the hub asks" if wait else "later"
    return f"{asked.repo_id} cannot be read from the hub ({reason}); what was read so far is kept: try again {later}"


def _full_disk(asked: _Asked, error: BaseException) -> str | None:
    """None for any other fault of the system, which is none of the hub's."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return None
    return (
        f"the disk is full that what is read of {asked.repo_id} is kept on ({hub_ranges.folder(asked.repo_id)}); free "
        "some space, or set HF_HOME to a folder on another disk"
    )
