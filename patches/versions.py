"""Which releases of transformers models can be patched under."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import transformers

from mla_convert.errors import PatchError

OLDEST = (5, 16)
#: Before it, indexers add masks of truth values to their scores, and choose tokens that come later.
SPARSE = (5, 24)
BEFORE = (6,)


def check_transformers() -> None:
    """Refuse a transformers whose attention has not the seam that patching needs, or may have another one.

    Raises:
        PatchError: with what to install.
    """
    if not OLDEST <= _release() < BEFORE:
        raise PatchError(
            f"transformers {transformers.__version__} is installed; supported are 5.16 and later 5.x: "
            'pip install "transformers>=5.16,<6"'
        )


def check_sparse(modules: Iterable[Any]) -> None:
    """Refuse attention modules with indexers under a transformers whose indexers misread masks.

    Raises:
        PatchError: with what to install.
    """
    if _release() < SPARSE and any(hasattr(module, "indexer") for module in modules):
        raise PatchError(
            f"transformers {transformers.__version__} is installed, whose sparse attention (DSA) misreads masks; "
            'models that have it are patched from 5.24 on: pip install "transformers>=5.24,<6"'
        )


def _release() -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", transformers.__version__)
    return tuple(int(number) for number in numbers.groups()) if numbers else ()
