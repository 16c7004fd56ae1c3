"""Keeping still what knows nothing of ``--quiet``: transformers' own progress bars, and what libraries warn of."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

#: Loggers that warn when transformers imports torchao, which it does wherever that is installed.
_LOGGERS = ("torchao", "torch.utils._pytree")


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Inside the ``with`` block, libraries that come along with transformers log nothing less than errors."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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
