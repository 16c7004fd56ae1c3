"""Whether coded absorbed weights can have come from the weights of a model in memory; see :mod:`mla_convert.belonging`.

How far codes are from what they code is known: the manifest has the largest difference L over the largest magnitude,
and the norm F of the difference over the norm. A file that was damaged, or a model that is another one, shows as more.
The model's weights may have been cast since, by a unit roundoff u each, which adds to both figures.

**Rows** (factored sides). No element may differ by more than ``(L + u) · max |w|``, and the norm of all differences by
no more than ``(F + u) · ‖w‖``, but for float32's own rounding.

**Products** (fused sides). Forming P = L·M again costs as much as converting. Both are applied to random vectors
x ~ N(0, 1): the mean square of ``(P' − P) x`` is the squared norm of the difference. The ratio of the norms of
``P' x − L (M x)`` and ``L (M x)`` estimates F, and may be half as large again (with eight vectors and a head of rank 8,
six standard deviations) plus the roundings of L and M, 2u.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mla_convert.absorption import split_kv_b, split_q_b
from mla_convert.comparison import Comparison
from mla_convert.geometry import MLAGeometry
from mla_convert.manifest import StoredTensor
from mla_convert.quantization import Quantized

_VECTORS = 8
_ESTIMATE = 1.5
_FLOAT32 = 2.0**-22


def compare_coded(
    key: str,
    coded: Quantized,
    stored: StoredTensor,
    weights: tuple[Tensor, Tensor | None],
    geometry: MLAGeometry,
    casts: Iterable[torch.dtype] = (),
) -> Comparison:
    """Compare what is stored under ``key`` with the model's ``kv_b_proj`` and, fused, its other projection.

    ``weights`` are those two. ``casts`` lists the dtypes that the model's weights were rounded to after the source:
    none where they are the source's own.
    """
    unit = sum(torch.finfo(dtype).eps / 2 for dtype in casts)
    kv_b, other = weights
    w_uk, w_uv = split_kv_b(kv_b, geometry)
    if key in ("k_b", "v_b"):
        mine = w_uk if key == "k_b" else w_uv
        return _compare_rows(coded, stored, mine.flatten(0, 1), unit, f"{'key' if key == 'k_b' else 'value'} rows")
    assert other is not None
    wide = coded.dequantize().to(kv_b.device)
    if key == "ov":
        w_o = other.reshape(geometry.hidden_size, geometry.num_heads, geometry.v_head_dim)
        heads = wide.view(geometry.hidden_size, geometry.num_heads, geometry.kv_lora_rank)
        triples = [(heads[:, h], w_o[:, h], w_uv[h]) for h in range(geometry.num_heads)]
    else:
        w_uq, _ = split_q_b(other, geometry)
        rows = wide.view(geometry.num_heads, geometry.latent_width, geometry.query_rank)[:, : geometry.kv_lora_rank]
        triples = [(rows[h], w_uk[h].T, w_uq[h]) for h in range(geometry.num_heads)]
    return _compare_products(triples, stored, unit, "value side" if key == "ov" else "key side")


def _compare_rows(coded: Quantized, stored: StoredTensor, mine: Tensor, unit: float, what: str) -> Comparison:
    mine = mine.detach().to(torch.float32)
    error = coded.dequantize().to(mine.device).sub_(mine)
    largest = _ratio(error.abs().max(), mine.abs().max())
    norm = _ratio(torch.linalg.vector_norm(error), torch.linalg.vector_norm(mine))
    found = [
        Comparison(largest, (stored.largest_error + unit) * (1 + _FLOAT32) + _FLOAT32, f"{what} of kv_b_proj"),
        Comparison(norm, (stored.frobenius_error + unit) * (1 + 1e-4) + _FLOAT32, f"{what} of kv_b_proj, as a whole"),
    ]
    return max(found, key=lambda comparison: comparison.excess)


def _compare_products(
    triples: Iterable[tuple[Tensor, Tensor, Tensor]], stored: StoredTensor, unit: float, what: str
) -> Comparison:
    """Each triple is one head's P' [m, k], L [m, j] and M [j, k]."""
    generator = torch.Generator().manual_seed(0)
    error = size = 0.0
    for product, left, right in triples:
        x = torch.randn(right.shape[1], _VECTORS, generator=generator).to(product.device)
        expected = left.to(torch.float32) @ (right.to(torch.float32) @ x)
        error += float((product @ x - expected).square().sum())
        size += float(expected.square().sum())
    found = (error / size) ** 0.5 if size else float(error > 0)
    return Comparison(found, _ESTIMATE * stored.frobenius_error + 2 * unit + _FLOAT32 * 64, what)


def _ratio(error: Tensor, size: Tensor) -> float:
    return float(error / size) if float(size) else float(error)
