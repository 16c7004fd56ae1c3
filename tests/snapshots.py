"""The content of folders and tensors, to compare before and after."""

from __future__ import annotations

import pathlib

import torch


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    same = (left.dtype, left.shape) == (right.dtype, right.shape)
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def same_values(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(equal(left[name], right[name]) for name in left)
