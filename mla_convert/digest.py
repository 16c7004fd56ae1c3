"""The hash by which a tensor is known."""

from __future__ import annotations

import hashlib

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256, in hex, of a CPU tensor's bytes in row-major order, whatever its dtype and strides."""
    return hashlib.sha256(as_integers(tensor.contiguous()).reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, which every operation of PyTorch takes; equality then also holds for NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])
