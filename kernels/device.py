"""Launching on the GPU that the tensors are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, which in a model spread over several need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
