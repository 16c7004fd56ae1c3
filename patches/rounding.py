"""Gradients through numbers that were rounded when they were stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Rounded(torch.autograd.Function):
    """Numbers that were rounded, with the gradient of those that they came from."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, new: Tensor) -> Tensor:
        """``history`` [B, 1, T, ·], whose last S tokens are ``new`` [B, 1, S, ·], rounded."""
        ctx.count = new.shape[2]
        return history.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient of the last S tokens."""
        return None, gradient[:, :, -ctx.count :]


def with_gradient(history: Tensor, new: Tensor) -> Tensor:
    """``history`` [B, 1, T, ·], in whose backward pass the last S tokens stand for ``new`` [B, 1, S, ·]."""
    rounded: Tensor = _Rounded.apply(history, new)  # type: ignore[no-untyped-call]
    return rounded
