"""Decode MLA models in latent space under Hugging Face transformers, and prove that nothing changed.

The public names are resolved when they are first used, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mla_convert.version import __version__

if TYPE_CHECKING:
    from mla_convert.benchmark import bench as bench
    from mla_convert.conversion import convert as convert
    from mla_convert.geometry import MLAGeometry as MLAGeometry
    from mla_convert.inspection import inspect_checkpoint as inspect_checkpoint
    from mla_convert.judgement import VerificationReport as VerificationReport
    from mla_convert.patches.apply import patch as patch
    from mla_convert.patches.apply import patched as patched
    from mla_convert.patches.apply import unpatch as unpatch
    from mla_convert.patches.cache import LatentCache as LatentCache
    from mla_convert.patches.loading import load as load
    from mla_convert.report import BenchmarkReport as BenchmarkReport
    from mla_convert.verification import verify as verify

_LAZY = {
    "BenchmarkReport": "mla_convert.report",
    "LatentCache": "mla_convert.patches.cache",
    "MLAGeometry": "mla_convert.geometry",
    "VerificationReport": "mla_convert.judgement",
    "bench": "mla_convert.benchmark",
    "convert": "mla_convert.conversion",
    "inspect_checkpoint": "mla_convert.inspection",
    "load": "mla_convert.patches.loading",
    "patch": "mla_convert.patches.apply",
    "patched": "mla_convert.patches.apply",
    "unpatch": "mla_convert.patches.apply",
    "verify": "mla_convert.verification",
}

__all__ = [
    "BenchmarkReport",
    "LatentCache",
    "MLAGeometry",
    "VerificationReport",
    "__version__",
    "bench",
    "convert",
    "inspect_checkpoint",
    "load",
    "patch",
    "patched",
    "unpatch",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
