"""Whole copies of repositories in the hub client's own cache."""

from __future__ import annotations

import json
import os
import pathlib

from mla_convert.errors import CheckpointError
from mla_convert.hub import is_hub_id, split_id
from mla_convert.hub_listings import in_cache


def local_folder(source: pathlib.Path) -> pathlib.Path:
    """A folder that holds the whole checkpoint: ``source``, or a hub id's whole snapshot in the hub client's cache.

    CheckpointError for a hub id without one, with the command that downloads it.
    """
    text = source.as_posix()
    if os.path.lexists(source) or not is_hub_id(text):
        return source
    repo_id, revision = split_id(text)
    config = in_cache(repo_id, "config.json", revision)
    if config is not None and _is_whole(config.parent):
        return config.parent
    option = "" if revision == "main" else f" --revision {revision}"
    raise CheckpointError(
        f"there is no folder {text}, and no whole copy of a hub repository of that name in {_cache()}; the whole model "
        f"is needed here, so download it first: hf download {repo_id}{option}"
    )


def _is_whole(folder: pathlib.Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return True  # the reader says what is wrong with it
    return all((folder / str(name)).is_file() for name in names)


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def repository_of(folder: pathlib.Path) -> str | None:
    """The repository that ``folder`` is a snapshot of, ``org/name``; None for a folder outside the client's cache.

    The client keeps snapshots in ``models--org--name/snapshots/commit``, and no name of a repository holds ``--``.
    """
    kind, *names = folder.resolve().parent.parent.name.split("--")
    snapshot = folder.resolve().parent.name == "snapshots" and kind == "models" and len(names) == 2
    return "/".join(names) if snapshot else None
