"""The weights of one layer, read, and the tensors stored for it, made block by block.

A block is a range of rows of a stored tensor that is made and written on its own, so that a tensor of a gigabyte
never stands in memory whole. Which blocks there are follows from the shapes alone, and each is made by one thread:
the bytes do not depend on how many threads or processes share the work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mla_convert.absorption import fuse_ov, fuse_qk, slice_rows, split_kv_b
from mla_convert.checkpoint import Checkpoint
from mla_convert.geometry import MLAGeometry
from mla_convert.manifest import SourceTensor
from mla_convert.recipe import PlannedLayer
from mla_convert.rounding import Rounding
from mla_convert.source_tensors import describe_source

#: Bytes of a stored tensor that are made at a time.
BLOCK_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Operands:
    """Source weights of one layer on the device of the products; those that no side needs are None.

    ``kv_b`` has the dtype it is stored in, so that slices of it are exact, and is float32 where the source is
    quantized. ``wide`` is the same in float32 where a side is fused, else ``kv_b`` itself. ``at_most`` has for the key
    of each fused side what no magnitude in its products exceeds.
    """

    kv_b: Tensor
    wide: Tensor
    query: Tensor | None
    o: Tensor | None
    at_most: Mapping[str, float] = dataclasses.field(default_factory=dict)


def read_operands(
    checkpoint: Checkpoint,
    layer: PlannedLayer,
    device: torch.device,
    memory: Callable[[int], Tensor] | None = None,
) -> tuple[Operands, dict[str, SourceTensor]]:
    """The weights that ``layer`` is made from, and what the manifest records of each.

    ``memory`` gives memory for what is read, as :meth:`Checkpoint.read` takes it. The norms are read as well, though
    nothing is made of them: they are small, and refused if they are damaged.
    """
    for name in layer.spec.norms:
        checkpoint.weight(name)
    described: dict[str, SourceTensor] = {}
    weights: dict[str, Tensor] = {}
    for name in layer.sources:
        stored = None if checkpoint.quantized(name) else checkpoint.read(name, memory)
        described[name] = describe_source(checkpoint, name, stored)
        weights[name] = _operand(checkpoint, name, device, stored)
    kv_b = weights[layer.spec.kv_b]
    fused = "fused" in (layer.forms.qk, layer.forms.vo)
    wide = kv_b.to(torch.promote_types(kv_b.dtype, torch.float32)) if fused else kv_b
    query, o = weights.get(layer.spec.query), weights.get(layer.spec.o)
    return Operands(kv_b, wide, query, o, _limits(layer, wide, query, o)), described


def _limits(layer: PlannedLayer, wide: Tensor, query: Tensor | None, o: Tensor | None) -> dict[str, float]:
    """A sum of products is at most their number times the largest of the one factor times that of the other."""
    g, forms, limits = layer.spec.geometry, layer.forms, dict[str, float]()
    largest = _largest(wide) if "fused" in (forms.qk, forms.vo) else math.nan
    if forms.qk == "fused" and query is not None:  # the rotary rows are the query's own
        limits["qk"] = _largest(query) * max(g.qk_nope_head_dim * largest, 1.0)
    if forms.vo == "fused" and o is not None:
        limits["ov"] = _largest(o) * g.v_head_dim * largest
    return limits


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN where a value is."""
    low, high = torch.aminmax(tensor)
    return max(-float(low), float(high))


def _operand(checkpoint: Checkpoint, name: str, device: torch.device, stored: Tensor | None) -> Tensor:
    """A source weight as products take it: quantized ones in float32, so that only the result is rounded."""
    return checkpoint.weight(name, torch.float32 if checkpoint.quantized(name) else None, stored).to(device)


def block_ranges(key: str, g: MLAGeometry, row_bytes: int, block_bytes: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Rows [start, stop) of every block of the tensor stored under ``key``, in order.

    A block has whole heads where the rows are heads' (all keys but ``ov``), and otherwise a multiple of 64 rows.
    """
    heads, per_head = _rows_by_head(key, g)
    step = per_head * max(1, block_bytes // (per_head * row_bytes))
    if key == "ov" and step > 64:
        step -= step % 64
    rows = heads * per_head
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def make_block(
    operands: Operands,
    g: MLAGeometry,
    key: str,
    rows: tuple[int, int],
    dtype: torch.dtype,
    rounding: Rounding | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows [start, stop) of the tensor stored under ``key`` (one of :func:`block_ranges`), in ``dtype``.

    ``out`` is memory of that shape and dtype for it. The products are those of :mod:`mla_convert.absorption`, taken of
    the heads, or of the rows of W_O, in question.
    """
    start, stop = rows
    if key == "ov":
        assert operands.o is not None
        part = dataclasses.replace(g, hidden_size=stop - start)
        return fuse_ov(split_kv_b(operands.wide, g)[1], operands.o[start:stop], part, dtype, rounding, out)
    per_head = _rows_by_head(key, g)[1]
    heads = slice(start // per_head, stop // per_head)
    if key == "qk":
        assert operands.query is not None
        query = operands.query[heads.start * g.qk_head_dim : heads.stop * g.qk_head_dim]
        part = dataclasses.replace(g, num_heads=heads.stop - heads.start)
        return fuse_qk(split_kv_b(operands.wide, g)[0][heads], query, part, dtype, rounding, out)
    return slice_rows(heads_of(operands, g, key, rows), dtype, rounding, out)


def heads_of(operands: Operands, g: MLAGeometry, key: str, rows: tuple[int, int]) -> Tensor:
    """What rows [start, stop) stored under ``k_b`` or ``v_b`` are in the source: a view [heads, N or V, C]."""
    per_head = _rows_by_head(key, g)[1]
    return split_kv_b(operands.kv_b, g)[0 if key == "k_b" else 1][rows[0] // per_head : rows[1] // per_head]


def make_whole(
    operands: Operands, g: MLAGeometry, key: str, dtype: torch.dtype, rounding: Rounding | None = None
) -> Tensor:
    """The whole tensor stored under ``key``, for what has to see all of it."""
    rows = _rows_by_head(key, g)
    return make_block(operands, g, key, (0, rows[0] * rows[1]), dtype, rounding)


def _rows_by_head(key: str, g: MLAGeometry) -> tuple[int, int]:
    """Heads (or rows of W_O, which count one by one), and the stored rows of each."""
    return {
        "k_b": (g.num_heads, g.qk_nope_head_dim),
        "v_b": (g.num_heads, g.v_head_dim),
        "qk": (g.num_heads, g.latent_width),
        "ov": (g.hidden_size, 1),
    }[key]
