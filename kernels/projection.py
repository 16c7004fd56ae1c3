"""Per-head products of the absorbed form with plain or quantized weights, for few rows of activations.

``lift_query`` is q·W_UK and ``lift_output`` is W_UV·o of :mod:`mla_convert.absorption`, one product a head. With
Triton the weights are dequantized inside the kernel, so that a step reads the codes and nothing else; the backend
"torch" dequantizes the whole weight and multiplies, on any device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.kernels.announcing import announce
from mla_convert.kernels.device import on_device
from mla_convert.kernels.dispatch import choose_backend
from mla_convert.kernels.packed import PackedWeight, dequantize
from mla_convert.kernels.tiles import padded
from mla_convert.kernels.tracing import being_traced
from mla_convert.wording import found

#: What the kernel computes in; the torch backend takes float64 too.
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Weight = Tensor | PackedWeight


@dataclasses.dataclass(frozen=True)
class Tile:
    """One launch: BR stored rows against BC columns of the weight; ``warps``, ``stages`` are Triton's options."""

    stored_rows: int
    columns: int
    warps: int
    stages: int


#: Tiles by architecture (or vendor, for all others) and bytes of an activation: 2 for matrix instructions, 4 for plain
#: multiplications. A third stage makes mma.sync kernels spill.
_TILES = {
    "sm_90": {2: Tile(64, 128, 4, 3), 4: Tile(32, 64, 4, 2)},
    "sm_100": {2: Tile(64, 128, 4, 3), 4: Tile(32, 64, 4, 2)},
    "sm": {2: Tile(64, 128, 4, 2), 4: Tile(32, 64, 4, 2)},
    "gfx": {2: Tile(64, 128, 4, 2), 4: Tile(32, 64, 4, 2)},
}
#: Rows of activations in one program: the smallest that holds them all, else the largest, several times.
ROW_BLOCKS = (16, 32, 64)


def choose_tile(arch: str, itemsize: int, stored_rows: int, columns: int, block_columns: int) -> Tile:
    """The table's tile for ``arch`` ("sm_90", "gfx942", …) and activations of ``itemsize`` bytes, cut to the weight.

    ``block_columns`` of the ``columns`` share a scale: a column tile holds whole blocks, or lies inside one.
    """
    vendor = "gfx" if arch.startswith("gfx") else "sm"
    tile = _TILES.get(arch, _TILES[vendor])[itemsize]
    width = min(tile.columns, padded(columns))
    if block_columns < width and width % block_columns:
        width = padded(block_columns)
    return dataclasses.replace(tile, stored_rows=min(tile.stored_rows, padded(stored_rows)), columns=width)


def choose_row_block(rows: int) -> int:
    """BM for ``rows`` = B·S rows of activations."""
    return next((size for size in ROW_BLOCKS if rows <= size), ROW_BLOCKS[-1])


def decodes_fp8(arch: str) -> bool:
    """Whether ``arch`` converts float8_e4m3fn itself; elsewhere its bits are moved by integer operations."""
    return not arch.startswith("gfx") and int(arch.removeprefix("sm_")) >= 89


def lift_query(q_nope: Tensor, weight: Weight, *, backend: str = "auto") -> Tensor:
    """``q_latent[b, s, h] = q_nope[b, s, h] · W_UK[h]``.

    Args:
        q_nope: [B, S, H, N], any strides; float16, bfloat16, float32 (float64 with the torch backend).
        weight: W_UK as a tensor [H, N, C] of the same dtype, any strides, or packed [H·N, C].
        backend: as for :func:`mla_convert.kernels.dispatch.choose_backend`.

    Returns:
        [B, S, H, C] in the activations' dtype, contiguous; sums are float32 or wider.

    Raises:
        UsageError: when shapes, dtypes, devices or the backend do not fit together.
    """
    return _project("lift_query", q_nope, weight, over_rows=True, backend=backend)


def lift_output(out: Tensor, weight: Weight, *, backend: str = "auto") -> Tensor:
    """``value[b, s, h] = W_UV[h] · out[b, s, h]``: [B, S, H, C] to [B, S, H, V].

    W_UV is a tensor [H, V, C], or packed [H·V, C].
    Everything else as in :func:`lift_query`.
    """
    return _project("lift_output", out, weight, over_rows=False, backend=backend)


def _project(name: str, x: Tensor, weight: Weight, *, over_rows: bool, backend: str) -> Tensor:
    stored_rows, columns = _check(name, x, weight, over_rows)
    chosen = choose_backend(backend, x.device, query_dtype=x.dtype)
    if not being_traced():
        announce("per-head products", chosen, x.device)
    width = columns if over_rows else stored_rows
    if x.numel() == 0:
        return x.new_empty(*x.shape[:3], width)
    if chosen == "torch":
        return _torch_project(x, weight, over_rows)
    return _triton_project(x, weight, stored_rows, columns, over_rows)


def _check(name: str, x: Tensor, weight: Weight, over_rows: bool) -> tuple[int, int]:
    """Stored rows per head and columns of a weight that fits ``x``; UsageError for one that does not."""
    letter = "N" if over_rows else "C"
    if x.dim() != 4 or not x.is_floating_point() or x.element_size() < 2:
        raise UsageError(f"{name}: activations must be [B, S, H, {letter}] floating point, found {found(x)}")
    heads = x.shape[2]
    if isinstance(weight, PackedWeight):
        if heads == 0 or weight.rows % heads:
            raise UsageError(f"{name}: {weight.rows} packed rows do not divide among {heads} heads")
        rows, columns, held = weight.rows // heads, weight.columns, weight.codes
    else:
        if weight.dim() != 3 or weight.shape[0] != heads or weight.dtype != x.dtype:
            raise UsageError(
                f"{name}: a plain weight must be [{heads}, rows, C] in the activations' {x.dtype}, "
                f"found {found(weight)}"
            )
        rows, columns, held = weight.shape[1], weight.shape[2], weight
    if x.shape[3] != (rows if over_rows else columns):
        raise UsageError(
            f"{name}: activations of width {letter} = {x.shape[3]} do not fit a weight of {rows} rows per head and "
            f"{columns} columns"
        )
    if held.device != x.device:
        raise UsageError(f"{name}: the activations are on {x.device}, the weight is on {held.device}")
    return rows, columns


def _torch_project(x: Tensor, weight: Weight, over_rows: bool) -> Tensor:
    batch, q_len, heads, _ = x.shape
    if isinstance(weight, PackedWeight):
        weight = dequantize(weight).to(x.dtype).view(heads, -1, weight.columns)
    rows = x.permute(2, 0, 1, 3).reshape(heads, batch * q_len, -1)
    product = torch.bmm(rows, weight if over_rows else weight.transpose(1, 2))
    return product.view(heads, batch, q_len, -1).permute(1, 2, 0, 3).contiguous()


@functools.cache
def _architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942" or the like; what the interpreter runs on counts as sm_80."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _triton_project(x: Tensor, weight: Weight, stored_rows: int, columns: int, over_rows: bool) -> Tensor:
    from mla_convert.kernels import projection_kernel

    batch, q_len, heads, _ = x.shape
    out = x.new_empty(batch, q_len, heads, columns if over_rows else stored_rows)
    constants = constants_of(_architecture(x.device), x, weight, stored_rows, columns, over_rows)
    grid = (kept_tiles(constants), heads, _ceil_div(batch * q_len, constants["BM"]))
    codes, scales, strides = _operands(weight, stored_rows)
    with on_device(x.device):
        projection_kernel.project_heads[grid](
            x, codes, scales, out, batch * q_len, q_len, *x.stride(), *strides, *out.stride()[1:3], **constants
        )
    return out


def _operands(weight: Weight, stored_rows: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Codes, scales, and the kernel's strides of a weight: codes by head, stored row and column, scales by both."""
    if isinstance(weight, PackedWeight):
        row, column = weight.codes.stride()
        return weight.codes, weight.scales, (stored_rows * row, row, column, *weight.scales.stride())
    return weight, weight, (*weight.stride(), 0, 0)


def constants_of(
    arch: str, x: Tensor, weight: Weight, stored_rows: int, columns: int, over_rows: bool
) -> dict[str, Any]:
    """Compile-time arguments and options of the kernel for one call on ``arch``."""
    kind, block = ("plain", (1, columns))
    if isinstance(weight, PackedWeight):
        kind, block = weight.kind, (weight.block[0], min(weight.block[1], columns))
    tile = choose_tile(arch, x.element_size(), stored_rows, columns, block[1])
    # One size of matrix instruction for every number of rows, so that it changes no row's result.
    options = {"matrix_instr_nonkdim": 16} if arch.startswith("gfx") else {}
    return options | {
        "ROWS": stored_rows,
        "COLUMNS": columns,
        "OVER_ROWS": over_rows,
        "KIND": kind,
        "BLOCK_ROWS": block[0],
        "BLOCK_COLUMNS": block[1],
        "SPAN": max(block[1], tile.columns) if tile.columns % block[1] == 0 else block[1],
        "NATIVE_FP8": kind == "fp8" and decodes_fp8(arch),
        "BM": choose_row_block(x.shape[0] * x.shape[1]),
        "BR": tile.stored_rows,
        "BC": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def kept_tiles(constants: Mapping[str, Any]) -> int:
    """Programs per head and block of activation rows: tiles of the axis that is not summed over."""
    if not constants["OVER_ROWS"]:
        return _ceil_div(constants["ROWS"], constants["BR"])
    span = constants["SPAN"]
    return _ceil_div(constants["COLUMNS"], span) * _ceil_div(span, constants["BC"])


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)
