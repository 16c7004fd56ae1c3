"""Decode MLA models in latent space under Hugging Face transformers, and prove that nothing changed.

The public names are resolved when they are first used, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mla_convert.version import __version__

if TYPE_CHECKING:
    from mla_convert.conversion import convert as convert
    from mla_convert.geometry import MLAGeometry as MLAGeometry

_LAZY = {
    "MLAGeometry": "mla_convert.geometry",
    "convert": "mla_convert.conversion",
}

__all__ = ["MLAGeometry", "__version__", "convert"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
