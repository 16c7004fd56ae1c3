"""Quantized absorbed weights: codes, scales, and the way back to plain numbers in PyTorch.

A weight here is a Linear-shaped stored tensor, ``k_b_proj`` [H·N, C] or ``v_b_proj`` [H·V, C]; its *rows* are
H·N or H·V, its *columns* C. One rule covers every kind: ``weight[i, j] = number(code[i, j]) · scales[i // r, j // c]``
for a block of r rows and c columns, with blocks at the lower and right edge possibly partial.

======  =============================  ====================================  ==========================
kind    codes                          number of a code                      usual block (r, c)
======  =============================  ====================================  ==========================
int8    int8 [rows, C]                 the code                              (1, C): one scale per row
fp8     uint8 [rows, C]                the byte read as float8_e4m3fn        (128, 128), or (1, C)
int4    uint8 [rows, C / 2]            nibble − 8, low nibble first          (1, 32), (1, 64), (1, 128)
======  =============================  ====================================  ==========================
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.wording import found, plain

#: Dtype of the codes of each kind, and how many codes one element holds.
KINDS = {"int8": (torch.int8, 1), "fp8": (torch.uint8, 1), "int4": (torch.uint8, 2)}


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """One quantized weight; the module's table gives shapes and meaning.

    Args:
        codes: [rows, C], or [rows, C / 2] for int4; any strides. FP8 codes must not be NaN (0x7F, 0xFF): readers
            refuse such checkpoints, and no kernel looks for them.
        scales: float32 [ceil(rows / r), ceil(C / c)].
        kind: "int8", "fp8" or "int4".
        block: (r, c), the rows and columns that share a scale; (1, C) is one scale per row.

    Raises:
        UsageError: when the parts do not fit together.
    """

    codes: Tensor
    scales: Tensor
    kind: str
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"a packed weight of kind {self.kind!r} is not known; supported are {', '.join(KINDS)}")
        dtype, per_element = KINDS[self.kind]
        if self.codes.dim() != 2 or self.codes.dtype != dtype:
            shape = "[rows, C / 2]" if per_element == 2 else "[rows, C]"
            raise UsageError(f"{self.kind} codes must be {shape} {plain(dtype)}, found {found(self.codes)}")
        if min(self.block) < 1 or self.block[1] % per_element:
            raise UsageError(f"{self.kind} blocks must be positive, and even along C in int4, found {self.block}")
        if tuple(self.scales.shape) != self.grid or self.scales.dtype != torch.float32:
            raise UsageError(
                f"codes {list(self.codes.shape)} of kind {self.kind} in blocks of {self.block} need scales "
                f"{list(self.grid)} float32, found {found(self.scales)}"
            )
        if self.scales.device != self.codes.device:
            raise UsageError(f"the codes are on {self.codes.device}, their scales on {self.scales.device}")

    @property
    def rows(self) -> int:
        """H·N or H·V."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """C."""
        return self.codes.shape[1] * KINDS[self.kind][1]

    @property
    def grid(self) -> tuple[int, int]:
        """Shape that the scales must have."""
        return -(-self.rows // self.block[0]), -(-self.columns // self.block[1])


def dequantize(packed: PackedWeight) -> Tensor:
    """The weight [rows, C] in float32, multiplied in float32: the definition, on any device."""
    numbers = _numbers(packed)
    factors = packed.scales.repeat_interleave(packed.block[0], 0)[: packed.rows]
    return numbers * factors.repeat_interleave(packed.block[1], 1)[:, : packed.columns]


def _numbers(packed: PackedWeight) -> Tensor:
    codes = packed.codes
    if packed.kind == "int8":
        return codes.to(torch.float32)
    if packed.kind == "fp8":
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.float32) - 8.0
