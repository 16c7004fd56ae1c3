"""What the hub client raises, as errors of ours that say what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from mla_convert import hub_ranges
from mla_convert.errors import CheckpointError


@contextlib.contextmanager
def hub_errors(repo_id: str, revision: str = "main", *, text: str = "") -> Iterator[None]:
    """Whatever the hub client raises, as one CheckpointError that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id} is on the hub, and may not be read without leave: accept its conditions on its page, and log "
            "in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {text or repo_id}, and no repository {repo_id} on the hub that may be read; check the "
            "name, or, where it is private, log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo_id} on the hub has no revision {revision!r}; give a branch, a tag or a whole commit after the @"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"a part of {repo_id} that is needed was not read before, and the hub cannot be asked now "
            f"({hub_ranges.reason(error)}); go online (HF_HUB_OFFLINE=0) and run this again"
        ) from error
    except errors.EntryNotFoundError as error:
        raise CheckpointError(f"{repo_id} on the hub lacks a file ({hub_ranges.reason(error)})") from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"there is no folder {text or repo_id}, and it is no hub id ({hub_ranges.reason(error)})"
        ) from error
    except hub_ranges.connection_errors() as error:
        if hub_ranges.status(error) in (401, 403):
            raise CheckpointError(
                f"the hub refuses {repo_id} to the token that is set ({hub_ranges.reason(error)}); log in anew with "
                "`hf auth login`, or correct HF_TOKEN"
            ) from error
        asked = hub_ranges.asked_wait(error)
        later = f"in {asked:.0f} s, as the hub asks" if asked else "later"
        raise CheckpointError(
            f"{repo_id} cannot be read from the hub ({hub_ranges.reason(error)}); what was read so far is kept: try "
            f"again {later}"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CheckpointError(
            f"the disk is full that what is read of {repo_id} is kept on ({hub_ranges.folder(repo_id)}); free some "
            "space, or set HF_HOME to a folder on another disk"
        ) from error
