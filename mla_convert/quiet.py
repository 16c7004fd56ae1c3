"""Loading models without transformers' own progress bars, which know nothing of ``--quiet``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """No bars of transformers inside the ``with`` block; afterwards as before."""
    from transformers.utils import logging

    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
