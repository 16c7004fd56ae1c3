"""The product with a quantized weight whose codes stay in memory: a piece is dequantized, multiplied with and let go.

For devices and dtypes that no product with codes is there for. A piece, which is small enough for a processor's
caches, is all that such a product takes beyond its result; whole weights take longer, at DeepSeek-V3's dimensions
several times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.quantization import Quantized

#: Numbers that are dequantized at a time: 1 MB in float32.
PIECE = 1 << 18


def multiply_in_pieces(x: Tensor, weight: Quantized, heads: int, *, over_rows: bool) -> Tensor:
    """Each head's product with its rows of ``weight`` [rows of all heads, columns], in float32 or wider, rounded once.

    ``x`` [B, S, H, rows of a head] (``over_rows``) gives [B, S, H, columns], and [B, S, H, columns] the other way.
    """
    per_head, columns = weight.shape[0] // heads, weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    batch, q_len, _, width = x.shape
    activations = x.permute(2, 0, 1, 3).reshape(heads, batch * q_len, width).to(wide)
    out = x.new_empty(heads, batch * q_len, columns if over_rows else per_head)
    for first, last, top, bottom in _pieces(heads, per_head, columns, whole_heads=over_rows):
        numbers = dequantize_rows(weight, first * per_head + top, (last - 1) * per_head + bottom).to(wide)
        numbers = numbers.view(last - first, bottom - top, columns)
        part = torch.bmm(activations[first:last], numbers if over_rows else numbers.transpose(1, 2))
        (out if over_rows else out[..., top:bottom])[first:last] = part
    return out.view(heads, batch, q_len, -1).permute(1, 2, 0, 3)


def _pieces(heads: int, rows: int, columns: int, *, whole_heads: bool) -> list[tuple[int, int, int, int]]:
    """Heads [first, last) and rows [top, bottom) in each of them: several heads whole, or some rows of a single one."""
    together = max(1, PIECE // (rows * columns))
    step = rows if whole_heads or together > 1 else max(1, PIECE // columns)
    return [
        (first, min(heads, first + together), top, min(rows, top + step))
        for first in range(0, heads, together)
        for top in range(0, rows, step)
    ]


def dequantize_rows(weight: Quantized, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a weight in float32, which may begin and end inside of a block."""
    rows, columns = weight.scheme.blocks(weight.shape[1])
    scales = weight.scales[start // rows : -(-stop // rows)]
    if rows > 1:
        scales = scales.repeat_interleave(rows, 0)[start % rows :][: stop - start]
    numbers = _numbers(Quantized(weight.codes[start:stop], scales, weight.scheme))
    if weight.shape[1] % columns == 0:
        numbers.view(stop - start, -1, columns).mul_(scales[:, :, None])
        return numbers
    return numbers.mul_(scales.repeat_interleave(columns, 1)[:, : weight.shape[1]])


def _numbers(weight: Quantized) -> Tensor:
    """:meth:`Quantized.numbers`; for FP8, of which sidecars hold no NaN, faster than PyTorch converts it on a CPU."""
    if weight.scheme.kind != "fp8":
        return weight.numbers()
    # Sign and seven bits of an e4m3 number, moved to where float16 has its own: a number 2 ** 8 times too small.
    bits = (weight.codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
    return bits.view(torch.float16).to(torch.float32).mul_(2.0**8)
