"""The weights of one layer, read, and the tensors stored for it, made block by block.

A block is a range of rows of a stored tensor that is made and written on its own, so that a tensor of a gigabyte
never stands in memory whole. Which blocks there are follows from the shapes alone, and each is made by one thread:
the bytes do not depend on how many threads or processes share the work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from mla_convert.absorption import fuse_ov, fuse_qk, slice_rows, split_kv_b
from mla_convert.checkpoint import Checkpoint
from mla_convert.digest import tensor_digest
from mla_convert.geometry import MLAGeometry
from mla_convert.manifest import SourceTensor
from mla_convert.memory import Memory, new_pages
from mla_convert.recipe import PlannedLayer
from mla_convert.rounding import Rounding
from mla_convert.source_rows import HeldRows, ReadRows, SourceRows, largest_magnitude
from mla_convert.source_tensors import describe_source

# Bytes of a stored tensor that are made at a time: an eighth of it, since several are in memory at once, within these.
_LEAST_BYTES, _MOST_BYTES = 1 << 24, 1 << 25


@dataclasses.dataclass(frozen=True)
class Operands:
    """Source weights of one layer, for the device of the products; those that no side needs are None.

    ``kv_b`` has the dtype it is stored in, so that slices of it are exact, and is float32 where the source is
    quantized. ``wide`` is the same in float32 where a side is fused, else ``kv_b`` itself, and ``largest`` its largest
    magnitude then. ``sources`` gives what the manifest records of each weight; of those that are read by rows, when
    all blocks have been made. ``release`` gives the memory back.
    """

    kv_b: Tensor
    wide: Tensor
    largest: float
    query: SourceRows | None
    o: SourceRows | None
    sources: Callable[[], dict[str, SourceTensor]]
    release: Callable[[], None] = lambda: None


def read_operands(
    checkpoint: Checkpoint, layer: PlannedLayer, device: torch.device, memory: Memory | None = None
) -> Operands:
    """The weights that ``layer`` is made from, in ``memory``.

    What a fused side is made of is left to be read row by row, where it stands in one place on disk and its product is
    not coded, for which it has to be whole. The norms are read, though nothing is made of them: they are small, and
    refused if they are damaged.
    """
    for name in layer.spec.norms:
        checkpoint.weight(name)
    memory = memory or Memory()
    lease = memory.buffers.lease()
    hashes: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    by_rows: dict[str, ReadRows] = {}
    for name in layer.sources:
        piece = checkpoint.piece(name) if name in _taken_by_rows(layer) else None
        if piece is not None:
            by_rows[name] = ReadRows(checkpoint, name, piece, device, memory.rows)
            continue
        stored = None if checkpoint.quantized(name) else checkpoint.read(name, lease)
        hashes[name] = checkpoint.digest(name) if stored is None else tensor_digest(stored)
        held[name] = _operand(checkpoint, name, device, stored)
    kv_b = held[layer.spec.kv_b]
    fused = "fused" in (layer.forms.qk, layer.forms.vo)
    wide = _widened(kv_b) if fused else kv_b
    largest = largest_magnitude(kv_b) if fused else math.nan

    def sources() -> dict[str, SourceTensor]:
        found = hashes | {name: rows.sha256() for name, rows in by_rows.items()}
        return {name: describe_source(checkpoint, name, found[name]) for name in layer.sources}

    def rows(name: str) -> SourceRows | None:
        return by_rows.get(name) or (HeldRows(held[name]) if name in held else None)

    return Operands(kv_b, wide, largest, rows(layer.spec.query), rows(layer.spec.o), sources, lease.release)


def _widened(weight: Tensor) -> Tensor:
    """A weight in float32, or as it is where it has no fewer bits."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.dtype == wide or weight.device.type != "cpu":
        return weight.to(wide)
    return new_pages(weight.numel() * wide.itemsize).view(wide).view(weight.shape).copy_(weight)


def _taken_by_rows(layer: PlannedLayer) -> set[str]:
    """Sources that a side needs row by row."""
    plain = {key for key, tensor in layer.tensors.items() if tensor.scheme is None}
    return {name for key, name in (("qk", layer.spec.query), ("ov", layer.spec.o)) if key in plain}


def _operand(checkpoint: Checkpoint, name: str, device: torch.device, stored: Tensor | None) -> Tensor:
    """A source weight as products take it: quantized ones in float32, so that only the result is rounded."""
    return checkpoint.weight(name, torch.float32 if checkpoint.quantized(name) else None, stored).to(device)


def block_ranges(key: str, g: MLAGeometry, row_bytes: int, block_bytes: int | None = None) -> list[tuple[int, int]]:
    """Rows [start, stop) of every block of the tensor stored under ``key``, in order.

    A block has whole heads where the rows are heads' (all keys but ``ov``), and otherwise a multiple of 64 rows;
    ``block_bytes``, or more where that is less than those.
    """
    heads, per_head = _rows_by_head(key, g)
    block_bytes = block_bytes or min(_MOST_BYTES, max(_LEAST_BYTES, heads * per_head * row_bytes // 8))
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
    rounding = rounding or Rounding()
    start, stop = rows
    # A sum of products is at most their number times the largest of the one factor times that of the other.
    if key == "ov":
        assert operands.o is not None
        part = dataclasses.replace(g, hidden_size=stop - start)
        with operands.o.take(start, stop) as (o, largest):
            rounding.at_most = largest * g.v_head_dim * operands.largest
            return fuse_ov(split_kv_b(operands.wide, g)[1], o, part, dtype, rounding, out)
    per_head = _rows_by_head(key, g)[1]
    heads = slice(start // per_head, stop // per_head)
    if key == "qk":
        assert operands.query is not None
        part = dataclasses.replace(g, num_heads=heads.stop - heads.start)
        with operands.query.take(heads.start * g.qk_head_dim, heads.stop * g.qk_head_dim) as (query, largest):
            # The rotary rows are the query's own.
            rounding.at_most = largest * max(g.qk_nope_head_dim * operands.largest, 1.0)
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
