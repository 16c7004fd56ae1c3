"""Which commit a revision on the hub stood for, and which files that has, as it was when the hub was last asked.

Kept beside the ranges of these files (:mod:`mla_convert.hub_ranges`). What cannot be read counts as not there: the next
answer of the hub is written in its place.
"""

from __future__ import annotations

import json
import os
import pathlib
import uuid
from collections.abc import Mapping

from mla_convert import disk
from mla_convert.hub_ranges import folder

_LISTING = "listing.json"


def remember(repo_id: str, revision: str, commit: str, files: Mapping[str, int]) -> None:
    """Keep which commit a revision stood for, and which files that has, with their sizes."""
    _write(folder(repo_id, commit) / _LISTING, json.dumps(dict(files)))
    _write(folder(repo_id) / revision.replace("/", "--"), commit)


def remembered(repo_id: str, revision: str) -> str | None:
    """The commit that a revision, or a commit itself, stood for when it was last asked for, if its files are known."""
    commit = _read(folder(repo_id) / revision.replace("/", "--"))
    known = commit is not None and commit.isalnum() and listing(repo_id, commit) is not None
    return commit if known else None


def listing(repo_id: str, commit: str) -> dict[str, int] | None:
    """The files of a commit with their sizes, if it was asked for before."""
    try:
        found = json.loads(_read(folder(repo_id, commit) / _LISTING) or "")
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(type(size) is int for size in found.values()) else None


def _read(file: pathlib.Path) -> str | None:
    try:
        return file.read_text("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _write(file: pathlib.Path, text: str) -> None:
    """Write a small file so that it is whole or not there."""
    beside = file.with_name(f".{uuid.uuid4().hex}")
    disk.write_text(beside, text)
    os.replace(beside, file)


def in_cache(repo_id: str, name: str, revision: str) -> pathlib.Path | None:
    """A file of a repository in the hub client's cache, if it is there."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, name, cache_dir=constants.HF_HUB_CACHE, revision=revision)
    return pathlib.Path(found) if isinstance(found, str) else None
