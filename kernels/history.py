"""Turning the cache as it is stored into plain numbers: codes, pages, packed rows."""

from __future__ import annotations

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import LatentScale

#: One token of FlashMLA's FP8 cache: 512 e4m3 codes, 4 float32 scales of 128 codes, 64 bfloat16 rotary numbers.
FLASHMLA_ROW = 512 + 4 * 4 + 64 * 2


def decode_latent(codes: torch.Tensor, scale: LatentScale | None, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a stored latent, rounded once to ``dtype``.

    Args:
        codes: [..., C] in a floating dtype (returned as it is, cast), float8 or int8, or uint8
            [..., C/2] holding two int4 each, low nibble first, as code + 8.
        scale: None for a floating dtype; a number or scalar tensor, [...] one per token, or
            [..., G] one per group of C/G numbers.
    """
    if scale is None:
        return codes.to(dtype)
    if codes.dtype == torch.uint8:
        low, high = codes & 15, codes >> 4
        numbers = torch.stack((low, high), dim=-1).flatten(-2).to(torch.float32) - 8.0
    elif codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        numbers = _e4m3_numbers(codes)
    else:
        numbers = codes.to(torch.float32)
    if not isinstance(scale, torch.Tensor):
        return (numbers * scale).to(dtype)
    scale = scale.to(torch.float32)
    if scale.dim() == codes.dim():
        grouped = numbers.view(*scale.shape, numbers.shape[-1] // scale.shape[-1]) * scale[..., None]
        return grouped.view(numbers.shape).to(dtype)
    return (numbers * (scale[..., None] if scale.dim() else scale)).to(dtype)


def _e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """``codes.to(float32)``, by bits: PyTorch's own conversion takes several times longer on a CPU.

    Sign and the 7 bits of exponent and fraction, shifted into a float16, are the number divided by 2^8, exactly, with
    subnormal numbers; but NaN (0x7F, 0xFF) would come out as 480.
    """
    magnitude = codes.view(torch.int8) & 127
    if magnitude.numel() and int(magnitude.max()) == 127:
        return codes.to(torch.float32)
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & -0x4080
    return bits.view(torch.float16).to(torch.float32) * 256.0


def take_tokens(tensor: torch.Tensor, sequence: int, block_table: torch.Tensor | None, length: int) -> torch.Tensor:
    """The first ``length`` tokens of one sequence, [length, ...]; a view where the cache is not paged.

    Args:
        tensor: [B, T, ...], or [pages, page, ...] with ``block_table`` [B, pages per sequence].
    """
    if block_table is None:
        return tensor[sequence, :length]
    page = tensor.shape[1]
    needed = block_table[sequence, : -(-length // page)].to(torch.int64)
    return tensor.index_select(0, needed).flatten(0, 1)[:length]


def scale_of(
    scale: LatentScale | None, sequence: int, block_table: torch.Tensor | None, length: int
) -> LatentScale | None:
    """The part of ``latent_scale`` that belongs to the tokens of :func:`take_tokens`."""
    if not isinstance(scale, torch.Tensor) or scale.dim() == 0:
        return scale
    return take_tokens(scale, sequence, block_table, length)


def flashmla_views(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashMLA's 656-byte rows [..., 656] uint8 as ``latent``, ``latent_scale`` and ``k_rope`` of ``absorbed_decode``.

    Returns:
        Views into ``rows``: codes [..., 512] float8_e4m3fn, scales [..., 4] float32, k_rope [..., 64] bfloat16.
    """
    if rows.shape[-1] != FLASHMLA_ROW or rows.element_size() != 1:
        raise UsageError(
            f"flashmla_views: rows must be [..., {FLASHMLA_ROW}] bytes, found {list(rows.shape)} {rows.dtype}"
        )
    raw = rows.view(torch.uint8)
    codes, scales, rope = raw[..., :512], raw[..., 512:528], raw[..., 528:]
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float32), rope.view(torch.bfloat16)
