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
# What bfloat16 and float32 can hold.
_WIDEST = torch.finfo(torch.bfloat16).max
# Of large matrices every fourth row of every eighth is compared: what rounding to nearest costs hardly differs from row
# to row, and comparing each would take as long as the product itself.
_LARGE, _EVERY_MATRIX, _EVERY_ROW = 1 << 17, 8, 4


class Rounding:
    """Measures what rounding a tensor to its stored dtype costs, block by block.

    ``name`` is the tensor's, for the message when a value does not fit the dtype at all.
    """

    def __init__(self, name: str = "the absorbed weight") -> None:
        self.name = name
        #: What no magnitude of what comes next exceeds, but for the rounding of the products, where that is known: only
        #: where it leaves a doubt is each value looked at, which takes a tenth of the time of a conversion.
        self.at_most = math.inf
        self._largest_error = self._largest = 0.0
        self._squared_error = self._squared = 0.0
        # Memory for the differences of one piece: if it were new each time, that would cost more than all that is
        # done in it.
        self._memory: Tensor | None = None

    def round(self, reference: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``reference`` (any shape, a wide dtype) in ``dtype`` and take note of the difference.

        Raises UsageError where a finite value overflows ``dtype``, and FormatError where the
        reference itself is not finite.
        """
        return self.round_into(torch.empty_like(reference, dtype=dtype), reference)

    def round_into(self, stored: Tensor, reference: Tensor, *, every: int = 1) -> Tensor:
        """:meth:`round` into memory that is there, ``stored``, of the reference's shape and any strides; returns it.

        One row in ``every`` (0: none) is compared with what is stored of it; that all values are finite, and fit, is
        made sure of in any case.
        """
        doubtful = not 2 * self.at_most < torch.finfo(stored.dtype).max
        measured = bool(every) and stored.dtype != reference.dtype
        if not doubtful and not measured:
            return stored.copy_(reference)
        piece = _PIECE if torch.get_num_threads() == 1 else _PIECE // 8
        rows = max(1, piece // max(1, reference[:1].numel()))
        for start in range(0, len(reference), rows):
            exact, values = reference[start : start + rows], stored[start : start + rows]
            values.copy_(exact)
            if doubtful:
                self._check(exact, values)
            if measured:
                self._compare(exact[-start % every :: every], values[-start % every :: every])
        return stored

    def _check(self, exact: Tensor, values: Tensor) -> None:
        largest = _magnitude(exact)
        if not math.isfinite(largest):
            raise FormatError(
                f"{self.name}: the product of its source weights is not finite in {plain(exact.dtype)}; check the "
                "source for damage: its values are far larger than any model's"
            )
        limit = torch.finfo(values.dtype).max
        if largest > limit and not math.isfinite(_magnitude(values)):  # what is a little larger is rounded to the limit
            fits = largest < _WIDEST
            hint = "store bfloat16 or float32 instead" if fits else "no dtype that is stored reaches further"
            raise UsageError(
                f"{self.name}: the largest magnitude is {largest:.4g}, and {plain(values.dtype)} ends at {limit:.4g}; "
                f"{hint}"
            )

    def _compare(self, exact: Tensor, values: Tensor) -> None:
        if not len(exact):
            return
        found = self._room(exact)
        self._largest = max(self._largest, _magnitude(exact))
        self._squared += _norm(found.copy_(exact)) ** 2
        found.copy_(values).sub_(exact)
        self._largest_error = max(self._largest_error, _magnitude(found))
        self._squared_error += _norm(found) ** 2

    def _room(self, piece: Tensor) -> Tensor:
        """Memory in the shape and dtype of ``piece``; a larger one's is used again."""
        found = self._memory
        kinds = (piece.dtype, piece.device)
        if found is None or (found.dtype, found.device) != kinds or len(found) < piece.numel():
            found = self._memory = torch.empty(piece.numel(), dtype=piece.dtype, device=piece.device)
        return found[: piece.numel()].view(piece.shape)

    def add(self, other: Rounding) -> None:
        """Take what another one has seen of the same tensor into this one."""
        self._largest_error = max(self._largest_error, other._largest_error)
        self._largest = max(self._largest, other._largest)
        self._squared_error += other._squared_error
        self._squared += other._squared

    @property
    def largest(self) -> float:
        """Largest error over the largest magnitude, of all rows compared so far; 0 when nothing was rounded."""
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


def rows_compared(number: int, size: int) -> int:
    """Which rows of the ``number``-th of many matrices of ``size`` numbers are compared: ``every`` of a Rounding."""
    if size < _LARGE:
        return 1
    return 0 if number % _EVERY_MATRIX else _EVERY_ROW
