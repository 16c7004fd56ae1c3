"""Results in JSON's own types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


def jsonable(value: Any) -> Any:
    """The value in JSON's own types: dataclasses become objects, paths and dtypes strings, NaN and infinities null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)
