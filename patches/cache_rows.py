"""The row of one cached token: codes, scales and rotary key side by side, so that appending writes one row.

In the model's dtype a row is the C + R numbers [c ; k_rope]. A coded row is bytes, each part at a multiple of 16:
codes, float32 scales, the rotary key in the model's dtype. With C = 512, R = 64, bfloat16 and FP8 in groups of 128
that is FlashMLA's row of 656 bytes.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.kernels.history import decode_latent
from mla_convert.patches.cache_formats import CacheFormat, encode

_ALIGNMENT = 16
_CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}


def code_dtype(form: CacheFormat | None) -> torch.dtype | None:
    """Dtype of a format's codes; None where latents are numbers in the model's."""
    return None if form is None else _CODES.get(form.kind)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the parts of a row lie. Rows are [..., T, width] of :attr:`stored_dtype`; views share their memory.

    Args:
        form: the format.
        latent: C.
        rope: R, possibly 0.
        dtype: of the model; the rotary key's, and that of the numbers read back.

    Raises:
        UsageError: where the format does not fit C, R or the dtype.
    """

    form: CacheFormat
    latent: int
    rope: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        group = self.form.group
        if self.form.name == "flashmla" and (self.latent, self.rope, self.dtype) != (512, 64, torch.bfloat16):
            raise UsageError(
                "FlashMLA's row holds 512 codes and 64 bfloat16 rotary numbers; this model has C = "
                f'{self.latent}, R = {self.rope} and {self.dtype}: use "fp8:128", which any model can'
            )
        if group is not None and self.latent % group:
            raise UsageError(f"a latent of {self.latent} numbers has no whole groups of {group}: choose a divisor")
        if self.form.name == "int4" and (self.latent % 2 or (group or 2) % 2):
            raise UsageError(f"int4 stores two numbers a byte: {self.latent} and the group must be even; use int8")

    @property
    def groups(self) -> int:
        """G: scales of one token."""
        return 1 if self.form.group is None else self.latent // self.form.group

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the rows: the model's, or bytes."""
        return torch.uint8 if self.form.coded else self.dtype

    @property
    def _offsets(self) -> tuple[int, int, int]:
        """Bytes where a coded row's scales and rotary key begin, and where the row ends."""
        codes = self.latent // 2 if self.form.name == "int4" else self.latent
        rope = _aligned(_aligned(codes) + 4 * self.groups)
        return _aligned(codes), rope, _aligned(rope + self.rope * self.dtype.itemsize)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self._offsets[2] if self.form.coded else self.latent + self.rope

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: what a token takes in each layer."""
        return self.width * self.stored_dtype.itemsize

    def codes(self, rows: Tensor) -> Tensor:
        """The latent as it is stored: [..., T, C] numbers or codes ([..., T, C/2] in int4); a view."""
        if not self.form.coded:
            return rows[..., : self.latent]
        width = self.latent // 2 if self.form.name == "int4" else self.latent
        return rows[..., :width].view(_CODES[self.form.kind])

    def scale(self, rows: Tensor) -> Tensor | None:
        """float32 [..., T] per token or [..., T, G] per group; None in the model's dtype; a view."""
        if not self.form.coded:
            return None
        start = self._offsets[0]
        scale = rows[..., start : start + 4 * self.groups].view(torch.float32)
        return scale[..., 0] if self.form.group is None else scale

    def k_rope(self, rows: Tensor) -> Tensor:
        """The rotary key [..., T, R] in the model's dtype; a view."""
        if not self.form.coded:
            return rows[..., self.latent :]
        start = self._offsets[1]
        return rows[..., start : start + self.rope * self.dtype.itemsize].view(self.dtype)

    def numbers(self, rows: Tensor) -> Tensor:
        """The latent [..., T, C] in the model's dtype; a copy where it is coded."""
        return decode_latent(self.codes(rows), self.scale(rows), self.dtype)

    def write(self, rows: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """Fill ``rows`` [..., T, width] with ``latent`` [..., T, C] and ``k_rope`` [..., T, R]."""
        self.k_rope(rows).copy_(k_rope.detach())
        if not self.form.coded:
            self.codes(rows).copy_(latent.detach())
            return
        codes, scale = encode(latent, self.form)
        self.codes(rows).view(torch.uint8).copy_(codes.view(torch.uint8))
        stored = self.scale(rows)
        assert stored is not None
        stored.copy_(scale[..., 0] if self.form.group is None else scale)
