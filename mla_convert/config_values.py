"""Numbers out of a config, or an error that says which one is missing or cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mla_convert.errors import UnsupportedModelError

_MOST_LAYERS = 10_000


def whole(config: Mapping[str, Any], key: str, *, least: int = 1, hint: str = "") -> int:
    """``config[key]``, a whole number of at least ``least``; UnsupportedModelError for anything else."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = f"gives {key} = {value!r}" if key in config else f"has no {key}"
        raise UnsupportedModelError(
            f"the config {found}; an MLA model ({config.get('model_type')}) needs a whole number of at least {least} "
            f"there{hint}: take the config.json that belongs to the checkpoint"
        )
    return value


def layer_count(config: Mapping[str, Any], key: str = "num_hidden_layers") -> int:
    """The number of layers under ``key``; UnsupportedModelError for one that no model has."""
    count = whole(config, key)
    if count > _MOST_LAYERS:
        raise UnsupportedModelError(
            f"the config gives {key} = {count}; supported are up to {_MOST_LAYERS}: take the config.json "
            "that belongs to the checkpoint"
        )
    return count


def positive(rope: Mapping[str, Any], key: str) -> float:
    """``rope[key]``, a positive number; UnsupportedModelError for anything else."""
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            f"the config's rope parameters give {key} = {value!r}; needed is a positive number: take the config.json "
            "that belongs to the checkpoint"
        )
    return float(value)


def one_per_layer(config: Mapping[str, Any], key: str, count: int) -> Sequence[Any] | None:
    """The list under ``key`` with an entry for each of ``count`` layers; None where the config has none."""
    given = config.get(key)
    if given is None:
        return None
    if not isinstance(given, list | tuple) or len(given) < count:
        found = f"{len(given)} entries" if isinstance(given, list | tuple) else repr(given)
        raise UnsupportedModelError(
            f"the config gives {found} under {key}; a model of {count} layers needs a list with one for each: take the "
            "config.json that belongs to the checkpoint"
        )
    return given
