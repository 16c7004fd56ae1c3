"""Where a checkpoint comes from, as far as it, or its folder, says: the model's name on the hub, and its licence."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError  # type: ignore[import-untyped]  # what the hub's reader of cards raises

from mla_convert.checkpoint import Checkpoint
from mla_convert.destination import CARD
from mla_convert.errors import UsageError
from mla_convert.hub import HubPath
from mla_convert.hub_snapshots import repository_of
from mla_convert.wording import option

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_LICENCE = ("license", "license_name", "license_link")
#: What cards of ours say they are.
TAG = "mla-convert"


@dataclasses.dataclass(frozen=True)
class Origin:
    """The model's name on the hub, if it is known, what its card says of the licence, and whether it has a card."""

    base: str | None
    licence: Mapping[str, str]
    has_card: bool

    def front(self) -> str:
        """The first lines of a card made for it."""
        lines = {"base_model": self.base, **self.licence}
        return "".join(f"{key}: {_scalar(value)}\n" for key, value in lines.items() if value)


def origin_of(checkpoint: Checkpoint, base_model: str | None = None) -> Origin:
    """What is known of a checkpoint's origin; ``base_model`` is the user's word for its name.

    The name is else that of the repository, or the snapshot of one, that it is read from, the one that a card of ours
    names, or the config's ``_name_or_path``. UsageError for a ``base_model`` that is none.
    """
    if base_model is not None and not _HUB_ID.fullmatch(base_model):
        raise UsageError(f"{option('base_model', base_model)} is no name of a model on the hub; give org/name")
    card = checkpoint.path / CARD
    data = _data(card)
    ours = data.get("base_model") if TAG in (data.get("tags") or ()) else None
    said = _name(ours) or _name(checkpoint.raw_config.get("_name_or_path"))
    return Origin(
        base=base_model or _repository(checkpoint.path) or said,
        licence={key: data[key] for key in _LICENCE if isinstance(data.get(key), str)},
        has_card=card.is_file(),
    )


def _repository(path: pathlib.Path) -> str | None:
    return path.repo_id if isinstance(path, HubPath) else repository_of(path)


def _name(given: Any) -> str | None:
    """A hub id; a path on somebody's machine is not one."""
    return given if isinstance(given, str) and _HUB_ID.fullmatch(given) else None


def _data(card: pathlib.Path) -> Mapping[str, Any]:
    """What stands in front of a card; nothing where there is none, or it cannot be read as one."""
    if not card.is_file():
        return {}
    try:
        data: Any = ModelCard(card.read_text("utf-8"), ignore_metadata_errors=True).data
    except (OSError, ValueError, TypeError, AttributeError, YAMLError):  # whatever stands there is somebody's text
        return {}
    return dict(data.to_dict())


def _scalar(value: str) -> str:
    """A text in YAML: bare where it cannot mean anything else."""
    return value if re.fullmatch(r"[A-Za-z][\w./-]*", value) else json.dumps(value)
