"""Which releases of transformers models can be patched under."""

from __future__ import annotations

import re

import transformers

from mla_convert.errors import PatchError

OLDEST = (5, 16)
BEFORE = (6,)


def check_transformers() -> None:
    """Refuse a transformers whose attention has not the seam that patching needs, or may have another one.

    Raises:
        PatchError: with what to install.
    """
    found = transformers.__version__
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = tuple(int(number) for number in numbers.groups()) if numbers else ()
    if not OLDEST <= release < BEFORE:
        raise PatchError(
            f'transformers {found} is installed; supported are 5.16 and later 5.x: pip install "transformers>=5.16,<6"'
        )
