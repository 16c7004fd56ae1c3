"""Saying in the log, once, what runs where."""

from __future__ import annotations

import functools
import logging

import torch

logger = logging.getLogger(__name__)


@functools.cache
def announce(work: str, backend: str, device: torch.device) -> None:
    """Log which backend does ``work`` on ``device``, once for each; not to be called while a graph is traced."""
    logger.info("%s on %s: the %s backend", work, device, backend)
    if backend == "triton" and device.type == "cuda":
        compiles = "Triton compiles its kernel at the first call of each kind, which takes seconds"
        logger.info("%s: %s; handle.warmup() does it ahead", work, compiles)
