"""Rounding products to the dtype they are stored in, and what that costs; in pieces that a processor's cache holds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_convert.errors import FormatError, UsageError
from mla_convert.formats import plain

# Numbers rounded at a time by one thread: few enough for a processor's cache, and enough that calling PyTorch costs
# little beside what it does. Where it has several threads it would share such a piece among them, whose waiting
# for each other costs more than the product itself: half as many are left to one.
_PIECE = 1 << 18


class Rounding:
    """Measures what rounding a tensor to its stored dtype costs, block by block.

    ``name`` is the tensor's, for the message when a value does not fit the dtype at all.
    """

    def __init__(self, name: str = "the absorbed weight") -> None:
        self.name = name
        self._largest_error = self._largest = 0.0
        self._squared_error = self._squared = 0.0
        # One piece, rounded, and its differences: memory that is new each time, or that lies in rows far apart, as the
        # columns of one head do, would cost more than all that is done in it.
        self._piece: tuple[Tensor, Tensor] | None = None

    def round(self, reference: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``reference`` (any shape, a wide dtype) in ``dtype`` and take note of the difference.

        Raises UsageError where a finite value overflows ``dtype``, and FormatError where the
        reference itself is not finite.
        """
        return self.round_into(torch.empty_like(reference, dtype=dtype), reference)

    def round_into(self, stored: Tensor, reference: Tensor) -> Tensor:
        """:meth:`round` into memory that is there, ``stored``, of the reference's shape and any strides; returns it."""
        piece = _PIECE if torch.get_num_threads() == 1 else _PIECE // 8
        rows = max(1, piece // max(1, reference[:1].numel()))
        rounded, error = self._memory(reference[:rows], stored.dtype)
        for start in range(0, len(reference), rows):
            exact = reference[start : start + rows]
            count = len(exact)
            values = exact if stored.dtype == exact.dtype else rounded[:count].copy_(exact)
            self._note(exact, values, error[:count])
            stored[start : start + rows] = values
        return stored

    def _memory(self, piece: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for ``piece`` in ``dtype``, and for its differences in its own dtype; a larger one's is used again."""
        count, kinds = piece.numel(), (dtype, piece.dtype, piece.device)
        found = self._piece
        if found is None or (found[0].dtype, found[1].dtype, found[1].device) != kinds or len(found[1]) < count:
            values, error = (torch.empty(count, dtype=kind, device=piece.device) for kind in (dtype, piece.dtype))
            found = self._piece = values, error
        return found[0][:count].view(piece.shape), found[1][:count].view(piece.shape)

    def _note(self, exact: Tensor, rounded: Tensor, error: Tensor) -> None:
        size = _norm(exact)
        if not math.isfinite(size):
            raise FormatError(
                f"{self.name}: the product of its source weights is not finite; check the source for damage"
            )
        largest = _magnitude(exact)
        self._largest = max(self._largest, largest)
        self._squared += size * size
        if rounded.dtype == exact.dtype:
            return
        error.copy_(rounded).sub_(exact)
        size = _norm(error)
        if not math.isfinite(size):
            raise UsageError(
                f"{self.name}: the largest magnitude is {largest:.4g}, and {plain(rounded.dtype)} ends at "
                f"{torch.finfo(rounded.dtype).max:.4g}; store bfloat16 or float32 instead"
            )
        self._largest_error = max(self._largest_error, _magnitude(error))
        self._squared_error += size * size

    def add(self, other: Rounding) -> None:
        """Take what another one has seen of the same tensor into this one."""
        self._largest_error = max(self._largest_error, other._largest_error)
        self._largest = max(self._largest, other._largest)
        self._squared_error += other._squared_error
        self._squared += other._squared

    @property
    def largest(self) -> float:
        """Largest error over the largest magnitude, of all blocks seen so far; 0 when nothing was rounded."""
        return self._largest_error / self._largest if self._largest_error else 0.0

    @property
    def frobenius(self) -> float:
        """Frobenius norm of the error over that of the reference."""
        return math.sqrt(self._squared_error / self._squared) if self._squared_error else 0.0


def _norm(tensor: Tensor) -> float:
    """The Frobenius norm; infinite or NaN where a value is.

    Squares of one piece are summed in the tensor's own dtype, which a processor does at the speed of its memory, and
    in float64 only where they leave the range in which that loses nothing to speak of.
    """
    flat = tensor.reshape(-1)
    squared = float(torch.dot(flat, flat))
    if 1e-30 < squared < 1e30:
        return math.sqrt(squared)
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _magnitude(tensor: Tensor) -> float:
    # Two passes of the plain reductions are quicker than one of aminmax.
    return max(-float(tensor.amin()), float(tensor.amax()))
