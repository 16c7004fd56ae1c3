"""How messages name tensors and their dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def found(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype: ``[2, 40] bfloat16``."""
    return f"{list(tensor.shape)} {plain(tensor.dtype)}"
