"""Codes in blocks that share a scale, and what holds for every stored number: it is finite, or it is refused.

A weight ``[rows, columns]`` in float8_e4m3fn or int8, and a scale for each block of ``block_size`` (128 × 128 in every
public FP8 checkpoint), ``[ceil(rows / block rows), ceil(columns / block columns)]``; blocks at the lower and right edge
may be partial. ``weight[i, j] = code[i, j] · scale[i // block rows, j // block columns]``, computed in float32. A scale
for each row, or for the whole tensor, is the same with blocks of that size. Other forms are in
:mod:`mla_convert.readers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mla_convert.errors import FormatError
from mla_convert.wording import plain as plain

FP8 = torch.float8_e4m3fn
#: Dtypes of codes that are multiplied by a scale as they are.
CODES = (FP8, torch.int8)
#: Dtypes of a scale: plain floats, or one exponent byte each (UE8M0).
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_CHUNK = 1 << 22
_SLAB = 256


def scale_grid(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across a weight of ``shape`` [rows, columns], partial ones at the edges included."""
    return -(-shape[0] // block_size[0]), -(-shape[1] // block_size[1])


def dequantize_blocks(
    codes: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "weight",
    scale_name: str = "scale",
) -> torch.Tensor:
    """``codes`` [rows, columns] in float8_e4m3fn or int8 times their blocks' ``scale``.

    Multiplied in float32 and rounded once to ``dtype``; extra memory is one row of blocks, and at least 256 rows.
    Raises FormatError, naming ``name``, for codes of another kind, a scale of the wrong size or with a value that is
    no positive finite number, and results that are NaN or infinite.
    """
    if codes.dtype not in CODES or codes.dim() != 2:
        raise FormatError(
            f"{name} is stored in {plain(codes.dtype)} with shape {list(codes.shape)}; supported are weights of two "
            f"dimensions in {', '.join(map(plain, CODES))}"
        )
    if tuple(scale.shape) != scale_grid(codes.shape, block_size):
        raise wrong_shape(scale_name, scale.shape, name, codes.shape, block_size, [scale_grid(codes.shape, block_size)])
    factors = decode_scale(scale, name=scale_name)
    rows, columns = block_size
    blocks = -(-_SLAB // rows)  # in one slab
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    bad = lost = 0
    for first in range(0, len(factors), blocks):
        at = slice(first * rows, (first + blocks) * rows)
        wide = codes[at].to(torch.float32)
        factor = factors[first : first + blocks].repeat_interleave(rows, 0)[: len(wide)]
        wide *= factor.repeat_interleave(columns, 1)[:, : codes.shape[1]]
        out[at] = wide
        bad += count_nonfinite(wide)
        lost += count_nonfinite(out[at])
    refuse_nonfinite(name, bad, out.numel(), codes.dtype)
    refuse_overflow(name, lost, out.numel(), dtype)
    return out


def wrong_shape(
    part: str,
    found: Iterable[int],
    name: str,
    shape: Iterable[int],
    block_size: tuple[int, int],
    needed: Iterable[tuple[int, ...]],
) -> FormatError:
    """The error for a tensor that goes with a weight's codes and does not fit them."""
    return FormatError(
        f"{part} has shape {list(found)}, but {name} of shape {list(shape)} in blocks of {list(block_size)} needs "
        f"{' or '.join(str(list(each)) for each in needed)}: one of them, or the config's quantization_config, is not "
        "of this checkpoint"
    )


def decode_scale(scale: torch.Tensor, *, name: str = "scale", may_be_zero: bool = False) -> torch.Tensor:
    """A scale in float32. Bytes (uint8 or float8_e8m0fnu) are UE8M0 exponents, ``2 ** (byte - 127)``, and 255 is NaN.

    FormatError where a value is not a positive finite number. ``may_be_zero``: nor 0, which is what the scale of a
    group of tiny weights becomes where scales themselves have few bits.
    """
    if scale.dtype not in (*SCALE_DTYPES, FP8):
        supported = ", ".join(plain(dtype) for dtype in SCALE_DTYPES)
        raise FormatError(f"{name} is stored in {plain(scale.dtype)}; supported are {supported}")
    exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    factors = _ue8m0(scale.view(torch.uint8)) if exponents else scale.to(torch.float32)
    sound = torch.isfinite(factors) & ((factors >= 0) if may_be_zero else (factors > 0))
    bad = int((~sound).sum())
    if bad:
        raise FormatError(
            f"{name} has {bad} of {factors.numel()} values that are NaN, infinite, zero or negative; a scale is a "
            "positive number: the file is damaged, fetch it again"
        )
    return factors


def _ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    # The byte is a float32's own exponent field, but for the two ends: 0 is the subnormal 2 ** -127, and 255 is NaN.
    bits = exponents.to(torch.int32) << 23
    bits[exponents == 0] = 1 << 22
    bits[exponents == 255] = 0x7FC00000
    return bits.view(torch.float32)


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many values are NaN or infinite; integers never are. Works in pieces, with little extra memory."""
    if not tensor.is_floating_point():
        return 0
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))
    return sum(_count(piece.float() if piece.element_size() == 1 else piece) for piece in pieces)


def _count(piece: torch.Tensor) -> int:
    # The extremes of a piece are NaN or infinite if anything in it is, and cost a twentieth of looking at each value.
    if all(math.isfinite(float(extreme)) for extreme in torch.aminmax(piece)):
        return 0
    return int((~torch.isfinite(piece)).sum())


def refuse_nonfinite(name: str, bad: int, total: int, dtype: torch.dtype) -> None:
    """FormatError where ``bad`` of ``total`` values are NaN or infinite."""
    if bad:
        raise FormatError(
            f"{name} has {bad} NaN or infinite values (of {total}) in {plain(dtype)}; a weight must be finite: the "
            "checkpoint is damaged, fetch it again"
        )


def refuse_overflow(name: str, lost: int, total: int, dtype: torch.dtype) -> None:
    """FormatError where ``lost`` of ``total`` finite values became infinite in ``dtype``."""
    if lost:
        raise FormatError(
            f"{name} has {lost} values (of {total}) too large for {plain(dtype)}; use bfloat16 or float32 instead"
        )


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The config's dtype; bfloat16 without one, the dtype that every public FP8 checkpoint was trained in."""
    name = config.get("dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        raise FormatError(f"the config gives dtype = {name!r}; supported are float32, bfloat16 and float16")
    return dtype
