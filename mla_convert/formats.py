"""Quantized forms in which checkpoints hold weights, and the way back to plain numbers.

FP8 blocks: a weight ``[rows, columns]`` in float8_e4m3fn, and a scale for each block of ``block_size`` (128 × 128 in
every public checkpoint), ``[ceil(rows / block rows), ceil(columns / block columns)]``; blocks at the lower and right
edge may be partial. ``weight[i, j] = code[i, j] · scale[i // block rows, j // block columns]``, computed in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from mla_convert.errors import FormatError

SCALE_SUFFIX = "_scale_inv"
FP8 = torch.float8_e4m3fn
#: Dtypes of a scale: plain floats, or one exponent byte each (UE8M0).
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Fp8Blocks:
    """The FP8 block quantization of a checkpoint: block size (rows, columns), and the format its scales are in."""

    block_size: tuple[int, int]
    scale_fmt: str | None = None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scale of a weight of ``shape`` [rows, columns]."""
        return scale_grid(shape, self.block_size)


def scale_grid(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across a weight of ``shape`` [rows, columns], partial ones at the edges included."""
    return -(-shape[0] // block_size[0]), -(-shape[1] // block_size[1])


def parse_quantization(config: Mapping[str, Any]) -> Fp8Blocks | None:
    """What ``quantization_config`` says, None without one; FormatError for what cannot be read."""
    given = config.get("quantization_config") or config.get("compression_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or method != "fp8":
        raise FormatError(
            f"the config's quantization_config has quant_method = {method!r}; supported is 'fp8' with "
            "weight_block_size: dequantize the checkpoint with its own tools, or take one in bfloat16 or FP8 blocks"
        )
    return Fp8Blocks(_block_size(given), given.get("scale_fmt"))


def _block_size(given: Mapping[str, Any]) -> tuple[int, int]:
    block = given.get("weight_block_size")
    whole = isinstance(block, list | tuple) and all(type(n) is int and n > 0 for n in block)
    if not isinstance(block, list | tuple) or not whole or len(block) != 2:
        raise FormatError(
            f"the config's quantization_config has weight_block_size = {block!r}; supported are FP8 blocks of "
            "[rows, columns], such as [128, 128] (FP8 with one scale for a whole tensor is not)"
        )
    if given.get("fmt", "e4m3") != "e4m3":
        raise FormatError(f"the config's quantization_config has fmt = {given['fmt']!r}; supported is 'e4m3'")
    return block[0], block[1]


def dequantize_fp8_blocks(
    codes: torch.Tensor,
    scale: torch.Tensor,
    block_size: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "weight",
) -> torch.Tensor:
    """``codes`` [rows, columns] float8_e4m3fn times its blocks' ``scale``, multiplied in float32 and rounded once to
    ``dtype``; extra memory is one row of blocks.

    Raises FormatError, naming ``name``, for codes of another kind, a scale of the wrong size or with a value that is
    no positive finite number, and results that are NaN or infinite.
    """
    check_grid(name, tuple(codes.shape), codes.dtype, tuple(scale.shape), block_size)
    factors = decode_scale(scale, name=name + SCALE_SUFFIX)
    rows, columns = block_size
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    bad = lost = 0
    for block, factor in enumerate(factors):
        at = slice(block * rows, (block + 1) * rows)
        wide = codes[at].to(torch.float32)
        wide *= factor.repeat_interleave(columns)[: codes.shape[1]]
        out[at] = wide
        bad += count_nonfinite(wide)
        lost += count_nonfinite(out[at])
    refuse_nonfinite(name, bad, out.numel(), codes.dtype)
    refuse_overflow(name, lost, out.numel(), dtype)
    return out


def check_grid(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale_shape: tuple[int, ...],
    block_size: tuple[int, int],
) -> None:
    """Whether a scale of ``scale_shape`` can belong to an FP8 weight; FormatError with both sizes where it cannot."""
    if dtype != FP8:
        raise FormatError(f"{name} has a scale but is stored in {plain(dtype)}; supported is float8_e4m3fn")
    if len(shape) != 2:
        raise FormatError(f"{name} is an FP8 tensor of shape {list(shape)}; supported are weights of two dimensions")
    expected = scale_grid(shape, block_size)
    if scale_shape != expected:
        raise FormatError(
            f"{name}{SCALE_SUFFIX} has shape {list(scale_shape)}, but {name} of shape {list(shape)} in blocks of "
            f"{list(block_size)} needs {list(expected)}: one of them, or the config's weight_block_size, is not of "
            "this checkpoint"
        )


def decode_scale(scale: torch.Tensor, *, name: str = "scale") -> torch.Tensor:
    """A scale in float32. Bytes (uint8 or float8_e8m0fnu) are UE8M0 exponents, ``2 ** (byte - 127)``, and 255 is NaN.

    FormatError where a value is not a positive finite number.
    """
    if scale.dtype not in SCALE_DTYPES:
        supported = ", ".join(plain(dtype) for dtype in SCALE_DTYPES)
        raise FormatError(f"{name} is stored in {plain(scale.dtype)}; supported are {supported}")
    factors = _ue8m0(scale.view(torch.uint8)) if scale.element_size() == 1 else scale.to(torch.float32)
    bad = int((~(torch.isfinite(factors) & (factors > 0))).sum())
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


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
