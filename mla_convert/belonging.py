"""Whether stored absorbed weights can have come from the weights of a model in memory, up to rounding alone.

Where model and source have the same dtype, hashes answer that. Here the model's weights were dequantized or cast, so
that both sides carry roundings, and the question is whether these explain the difference. ``u`` is a dtype's unit
roundoff, half the distance from 1 to the next number: rounding changes a normal value x by at most u·|x|, and a
subnormal one by at most half the smallest subnormal, written η.

**Rows** (factored sides, and the rotary rows of a fused key side). The stored a and the model's b are roundings of one
value x: ``|a − b| ≤ (u_a + u_b)·|x| + η``, and ``|x| ≤ max(|a|, |b|) / (1 − max(u_a, u_b))``. Each element is held
to that. It is no estimate: nothing that rounding does can exceed it.

**Products** (fused sides). The stored matrix of a head is P = L·M, rounded once, with L [m, j] and M [j, k] of the
source; the model has L and M rounded. Forming P again costs as much as converting. Instead both are applied to random
vectors x ~ N(0, 1), and ``e = P x − L (M x)`` is compared with its standard deviation. Roundings of different elements
are taken as independent with mean zero, so that their squares add up: with u_a for the stored product and u_b for the
model's weights, row i of e has, to first order,

    σ_i² = Σ_k (u_a² P_ik² + η_a²) x_k²                       rounding of P
         + Σ_j (u_b² L_ij² + η_b²) y_j²                       rounding of L, with y = M x
         + Σ_j L_ij² Σ_k (u_b² M_jk² + η_b²) x_k²             rounding of M
         + j·u_w² (Σ_k P_ik² x_k² + Σ_j L_ij² Σ_k M_jk² x_k²)    the sums over j, in the dtype w of the products

The largest error of a rounding stands where its standard deviation belongs; for values spread evenly over a binade that
is about 2.4 times too much. This margin is left for what is not independent: the codes of an FP8 block have only eight
mantissas, so that rounding them after scaling shifts the elements of a block together.

Vectors are given one tile of 128 columns at a time, and e is judged over tiles of 128 rows, as large as a quantization
block: a fault in one block then stands alone and is not diluted by the rest of the matrix. Over n numbers (128 rows × 8
vectors) the root mean square of e/σ must lie below ``1 + 6 / √(2n)``, six standard deviations of a root mean square of
n normal numbers above its largest expectation. Each row alone, with n = 8, is held to the same rule. Where everything
is bfloat16, rounding gives about 0.4, and a scale that is 2 % wrong in one block about 3, against a limit of 1.13.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mla_convert.absorption import split_kv_b, split_q_b
from mla_convert.comparison import Comparison
from mla_convert.geometry import MLAGeometry

_TILE = 128
_VECTORS = 8
_DEVIATIONS = 6.0
# Sums of products below this need float64: float32's own rounding would be seen.
_FINE = 1e-4


@dataclasses.dataclass(frozen=True)
class _Roundings:
    """Unit roundoff and half the smallest subnormal of the roundings that a tensor has gone through."""

    squared_unit: float
    unit: float
    absolute: float

    @classmethod
    def of(cls, *dtypes: torch.dtype | None) -> _Roundings:
        infos = [torch.finfo(dtype) for dtype in dtypes if dtype is not None]
        units = [info.eps / 2 for info in infos]
        # The smallest subnormal is eps · smallest normal.
        absolute = sum(info.eps * info.smallest_normal / 2 for info in infos)
        return cls(math.fsum(unit * unit for unit in units), math.fsum(units), absolute)


def compare_factored(
    stored_k_b: Tensor | None,
    stored_v_b: Tensor | None,
    kv_b_weight: Tensor,
    geometry: MLAGeometry,
    *,
    source_dtype: torch.dtype | None = None,
    stored_exactly: bool = False,
) -> Comparison:
    """Compare factored weights [H·N, C] and [H·V, C] (None for a side that is fused) with ``kv_b_proj.weight``.

    ``kv_b_weight`` is [H·(N + V), C] in the model's dtype. ``source_dtype`` is given where the model's weights may have
    been rounded to another dtype on their way: the dtype an FP8 source was dequantized to before the model was cast.
    ``stored_exactly``: the stored values are the source's own, as an error of 0 in the manifest says.
    Returns the worst element; raises UsageError for shapes that are not the geometry's.
    """
    w_uk, w_uv = split_kv_b(kv_b_weight, geometry)
    worst = [
        _compare_rows(
            stored.reshape(mine.shape), mine, f"{side} rows of kv_b_proj", source_dtype, stored_exactly=stored_exactly
        )
        for stored, mine, side in ((stored_k_b, w_uk, "key"), (stored_v_b, w_uv, "value"))
        if stored is not None
    ]
    return max(worst, key=_badness)


def compare_fused_qk(
    stored: Tensor,
    kv_b_weight: Tensor,
    q_weight: Tensor,
    geometry: MLAGeometry,
    generator: torch.Generator | None = None,
    *,
    source_dtype: torch.dtype | None = None,
) -> Comparison:
    """Compare a fused key side [H·(C + R), Q] with the model's ``kv_b_proj`` and ``q_b_proj`` (or ``q_proj``) weights.

    ``generator`` (a CPU one) draws the vectors, by default with seed 0. Otherwise as :func:`compare_factored`.
    """
    w_uk, _ = split_kv_b(kv_b_weight, geometry)
    w_uq, w_qr = split_q_b(q_weight, geometry)
    heads = stored.reshape(geometry.num_heads, geometry.latent_width, geometry.query_rank)
    content = _compare_products(
        ((heads[h, : geometry.kv_lora_rank], w_uk[h].T, w_uq[h]) for h in range(geometry.num_heads)),
        "key side",
        generator,
        source_dtype,
    )
    if not geometry.qk_rope_head_dim:
        return content
    rotary = _compare_rows(heads[:, geometry.kv_lora_rank :], w_qr, "rotary rows of the query", source_dtype)
    return max(content, rotary, key=_badness)


def compare_fused_ov(
    stored: Tensor,
    kv_b_weight: Tensor,
    o_weight: Tensor,
    geometry: MLAGeometry,
    generator: torch.Generator | None = None,
    *,
    source_dtype: torch.dtype | None = None,
) -> Comparison:
    """Compare a fused value side [D, H·C] with the model's ``kv_b_proj`` and ``o_proj`` weights, like the other two."""
    _, w_uv = split_kv_b(kv_b_weight, geometry)
    heads = stored.reshape(geometry.hidden_size, geometry.num_heads, geometry.kv_lora_rank)
    w_o = o_weight.reshape(geometry.hidden_size, geometry.num_heads, geometry.v_head_dim)
    return _compare_products(
        ((heads[:, h], w_o[:, h], w_uv[h]) for h in range(geometry.num_heads)), "value side", generator, source_dtype
    )


def _badness(comparison: Comparison) -> float:
    return comparison.excess


def _compare_rows(
    stored: Tensor, mine: Tensor, what: str, source_dtype: torch.dtype | None, *, stored_exactly: bool = False
) -> Comparison:
    """Elementwise, head by head: both [H, rows, columns]."""
    a, b = (
        _Roundings.of(None if stored_exactly else stored.dtype),
        _Roundings.of(mine.dtype, _between(mine, source_dtype)),
    )
    bound = (a.unit + b.unit) / (1 - max(a.unit, b.unit))
    worst = Comparison(0.0, bound, what)
    for head in range(len(mine)):
        x, y = stored[head].to(mine.device, torch.float64), mine[head].to(torch.float64)
        beyond = ((x - y).abs() - (a.absolute + b.absolute)).clamp(min=0)
        relative = float((beyond / torch.maximum(x.abs(), y.abs()).clamp(min=1e-300)).max())
        worst = max(worst, Comparison(relative, bound, f"{what}, head {head}"), key=_badness)
    return worst


def _compare_products(
    heads: Iterator[tuple[Tensor, Tensor, Tensor]],
    what: str,
    generator: torch.Generator | None,
    source_dtype: torch.dtype | None,
) -> Comparison:
    """The worst tile of all heads; each head gives P [m, k], L [m, j] and M [j, k]."""
    generator = generator or torch.Generator().manual_seed(0)
    worst = Comparison(0.0, 0.0, what)
    for number, (stored, left, right) in enumerate(heads):
        a = _Roundings.of(stored.dtype)
        b = max((_Roundings.of(w.dtype, _between(w, source_dtype)) for w in (left, right)), key=lambda r: r.unit)
        dtype = torch.float32 if a.unit + b.unit > _FINE else torch.float64
        x = torch.randn(right.shape[1], _VECTORS, generator=generator, dtype=torch.float64).to(left.device, dtype)
        found = _worst_tile(_tiled(stored.to(left.device, dtype)), left.to(dtype), _tiled(right.to(dtype)), x, a, b)
        worst = max(worst, dataclasses.replace(found, where=f"{what}, head {number}"), key=_badness)
    return worst


def _tiled(matrix: Tensor) -> Tensor:
    """Column tiles [tiles, rows, 128] of a matrix, the last one filled with zeros."""
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % _TILE))
    return padded.reshape(len(matrix), -1, _TILE).transpose(0, 1)


def _worst_tile(p: Tensor, left: Tensor, m: Tensor, x: Tensor, a: _Roundings, b: _Roundings) -> Comparison:
    """The worst of one head's tiles and single rows; the formula is the module's.

    ``p`` [tiles, m, 128], ``left`` [m, j], ``m`` [tiles, j, 128], ``x`` [k, vectors].
    """
    x = _tiled(x.T).transpose(1, 2)  # [tiles, 128, vectors]
    y = m @ x
    expected = left @ y
    error = p @ x - expected
    squared_x, squared_left = x.square(), left.square()
    of_product = p.square() @ squared_x
    of_right = m.square() @ squared_x
    sums = left.shape[1] * (torch.finfo(torch.float32).eps / 2) ** 2
    size_of_x = squared_x.sum(1, keepdim=True)
    variance = (a.squared_unit + sums) * of_product + a.absolute**2 * size_of_x
    variance += squared_left @ (b.squared_unit * y.square() + (b.squared_unit + sums) * of_right)
    variance += squared_left.sum(1, keepdim=True) * (b.absolute**2 * size_of_x)
    variance += b.absolute**2 * y.square().sum(1, keepdim=True)
    return _worst_group(error.square().sum(2), variance.sum(2), expected.square().sum(2))


def _worst_group(squared_error: Tensor, variance: Tensor, size: Tensor) -> Comparison:
    """The worst of the single rows and of the 128-row tiles; sums of squares [tiles, m] over the vectors."""
    # Each row in units of its own deviation, so that one row of outliers does not stand for its whole tile.
    ratio = torch.where(squared_error == 0, squared_error, squared_error / variance)
    group = torch.arange(ratio.shape[1], device=ratio.device) // _TILE
    rows = torch.bincount(group)
    mean, of_variance, of_size = (
        values.new_zeros(len(ratio), len(rows)).index_add_(1, group, values) for values in (ratio, variance, size)
    )
    by_row = _judge(ratio, variance, size, torch.ones_like(group))
    return max(by_row, _judge(mean / rows, of_variance, of_size, rows), key=_badness)


def _judge(ratio: Tensor, variance: Tensor, size: Tensor, rows: Tensor) -> Comparison:
    """The worst of several groups of ``rows`` rows: ``ratio`` is the mean of (e/σ)², the other two are sums of squares.

    Error and bound are given relative to the product's own size in that group.
    """
    limit = (1 + _DEVIATIONS / (2 * _VECTORS * rows).sqrt().to(ratio.dtype)).expand_as(ratio)
    worst = int((ratio.sqrt() / limit).argmax())  # NaN counts as the largest
    found, of_variance, of_size, most = (float(values.reshape(-1)[worst]) for values in (ratio, variance, size, limit))
    sigma = math.sqrt(of_variance / (of_size or torch.finfo(size.dtype).tiny))
    return Comparison(math.sqrt(found) * sigma, most * sigma, where="")


def _between(tensor: Tensor, source_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype that ``tensor`` was rounded to on its way, where that is another than its own."""
    return source_dtype if source_dtype != tensor.dtype else None
