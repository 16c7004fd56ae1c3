"""Launching the Triton kernel: a tile, grids that depend on shapes alone, and parts joined where there are several."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton

from mla_convert.kernels.arguments import DecodeArguments, LatentScale
from mla_convert.kernels.decode_kernel import join_kernel, part_kernel
from mla_convert.kernels.device import on_device
from mla_convert.kernels.tiles import INTERPRETED, Tile, choose_tile, nearest_arch, padded, piece_width

_LOG2E = 1.4426950408889634


def decode(args: DecodeArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``absorbed_decode`` from checked arguments, which have none of ``dispatch.obstacle``."""
    if args.q_latent.numel() == 0:
        lse = torch.full(args.q_latent.shape[:3], -torch.inf, device=args.q_latent.device)
        return torch.zeros_like(args.q_latent), lse
    with on_device(args.q_latent.device):
        return launch(args, tile_for(args))


def tile_for(args: DecodeArguments) -> Tile:
    """The launch that ``args`` get on their device."""
    if args.q_latent.device.type == "cpu":
        return INTERPRETED
    heads = args.q_latent.shape[2]
    rows = heads if per_token(args) else heads * args.q_latent.shape[1]
    return choose_tile(
        device_arch(args.q_latent.device),
        rows,
        args.q_latent.shape[3],
        args.q_rope.shape[3],
        query_bytes=args.q_latent.element_size(),
        cache_bytes=args.latent.element_size(),
    )


def per_token(args: DecodeArguments) -> bool:
    """Whether a program's rows are the heads of one new token: the same positions count for all of them."""
    return args.q_latent.shape[1] == 1 or args.mask is not None or args.indices is not None


def device_arch(device: torch.device) -> str:
    """The name in ``tiles`` of a device's architecture."""
    properties = torch.cuda.get_device_properties(device)
    gcn = getattr(properties, "gcnArchName", "")
    if gcn.startswith("gfx"):
        name = str(gcn).split(":")[0]
        return name if name in ("gfx942", "gfx950") else "gfx942"
    return nearest_arch(properties.major, properties.minor)


def form_of(latent: torch.Tensor) -> str:
    """How the kernel reads a latent's dtype."""
    if latent.dtype == torch.int8:
        return "int8"
    return {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8fnuz"}.get(latent.dtype, "plain")


def _scale_arguments(args: DecodeArguments) -> tuple[torch.Tensor, tuple[int, int, int], int]:
    """``latent_scale`` as a tensor, its strides (0 where one is for all), and numbers per scale (0 for no scales)."""
    scale, query = args.latent_scale, args.q_latent
    width = query.shape[3]
    if scale is None:
        return query, (0, 0, 0), 0
    if not isinstance(scale, torch.Tensor) or (scale.dim() == 0 and scale.device != query.device):
        # A fill and not a copy, which from the CPU's ordinary memory could not be captured in a graph.
        scale = torch.full((), float(scale), dtype=torch.float32, device=query.device)
    if scale.dim() == 0:
        return scale, (0, 0, 0), width
    if scale.dim() == 2:
        return scale, (scale.stride(0), scale.stride(1), 0), width
    return scale, (scale.stride(0), scale.stride(1), scale.stride(2)), width // scale.shape[2]


@dataclasses.dataclass(frozen=True)
class Division:
    """A problem in programs: ``parts`` of the history for each of ``sequences`` with ``rows`` rows each."""

    sequences: int
    rows: int
    parts: int

    @staticmethod
    def of(args: DecodeArguments, tile: Tile) -> Division:
        """How ``args`` are shared out: rows are the heads of one query, or of all queries that see the same tokens."""
        batch, q_len, heads = args.q_latent.shape[:3]
        reach = args.kv_len if args.indices is None else args.indices.shape[2]
        parts = max(1, triton.cdiv(reach, tile.split_tokens))
        if per_token(args):
            return Division(batch * q_len, heads, parts)
        return Division(batch, q_len * heads, parts)


def launch(args: DecodeArguments, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute checked arguments in tiles of ``tile``: see ``absorbed_decode``."""
    division = Division.of(args, tile)
    shape = (division.sequences, division.parts, division.rows)
    out = torch.empty(args.q_latent.shape, dtype=args.q_latent.dtype, device=args.q_latent.device)
    lse = torch.empty(args.q_latent.shape[:3], dtype=torch.float32, device=out.device)
    if division.parts == 1:
        _run_parts(args, tile, division, out, lse)
    else:
        parts_out = torch.empty(*shape, out.shape[3], dtype=torch.float32, device=out.device)
        parts_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        _run_parts(args, tile, division, parts_out, parts_lse)
        join_kernel[(division.rows, division.sequences)](
            parts_out, parts_lse, out, lse, **join_arguments(args, tile, division), num_warps=1
        )
    return out, lse


def _run_parts(args: DecodeArguments, tile: Tile, division: Division, out: torch.Tensor, lse: torch.Tensor) -> None:
    grid = (triton.cdiv(division.rows, tile.block_rows), division.parts, division.sequences)
    values = part_arguments(args, tile, division)
    part_kernel[grid](out=out, lse=lse, **values, num_warps=tile.warps, num_stages=tile.stages)


def _given(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` in rows, or a pointer that the kernel doesn't follow."""
    return other if tensor is None else tensor.contiguous()


def _unit(strides: tuple[int, ...]) -> int:
    """The largest power of two, up to 16, that divides a cache's strides: known to the kernel, it makes loads wide."""
    return math.gcd(16, *strides[:2])


def _in_units(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides as ``part_kernel`` takes them: of entries and tokens in units, of numbers as it is."""
    unit = _unit(strides)
    return (strides[0] // unit, strides[1] // unit, strides[2])


def _far(tensor: LatentScale | None) -> bool:
    """Whether the last number of a token lies so far behind its first that 32 bits don't count it."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 3:
        return False
    return (tensor.shape[2] - 1) * tensor.stride(2) >= 1 << 31


def _strides(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}_s{i}": stride for i, stride in enumerate(strides)}


def part_arguments(args: DecodeArguments, tile: Tile, division: Division) -> dict[str, Any]:
    """What ``part_kernel`` is called with, by name, besides its outputs."""
    query, table, mask = args.q_latent.contiguous(), args.block_table, args.mask
    form, width, rope = form_of(args.latent), query.shape[3], args.q_rope.shape[3]
    codes = args.latent.view(torch.uint8) if form.startswith("fp8") else args.latent
    scale, scale_strides, group = _scale_arguments(args)
    piece = piece_width(tile, width, group)
    rope_strides = args.k_rope.stride() if rope else (0, 0, 0)
    return {
        "q_latent": query,
        "q_rope": args.q_rope.contiguous() if rope else query,
        "latent": codes,
        "k_rope": args.k_rope if rope else codes,
        "mask": query if mask is None else mask.view(torch.uint8),
        "block_table": _given(table, query),
        "indices": _given(args.indices, query),
        "latent_scale": scale,
        "scale": args.scale * _LOG2E,
        **_strides("latent", _in_units(codes.stride())),
        **_strides("rope", _in_units(rope_strides)),
        **_strides("scale", scale_strides),
        **_strides("mask", (0, 0, 0) if mask is None else mask.stride()),
        "table_s0": 0 if table is None else table.shape[1],
        "C": width,
        "R": rope,
        "LATENT_UNIT": _unit(codes.stride()),
        "ROPE_UNIT": _unit(rope_strides),
        "W": piece,
        "PIECES": triton.cdiv(width, piece),
        "BC": padded(piece),
        "BP": padded(rope) if rope else 16,
        "BR": tile.block_rows,
        "BN": tile.block_tokens,
        "PAGE": 0 if table is None else args.latent.shape[1],
        "FORM": form,
        "GROUP": group if scale_strides[2] else group and piece,
        "FAR": any(_far(each) for each in (codes, args.k_rope, args.latent_scale)),
        "TRANSPOSED": tile.transposed,
        "RELOAD": tile.reload_query,
        "SINGLE": division.parts == 1,
        "HAS_MASK": mask is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else None,
        **_common_arguments(args, tile),
    }


def join_arguments(args: DecodeArguments, tile: Tile, division: Division) -> dict[str, Any]:
    """What ``join_kernel`` is called with, by name, besides parts and outputs."""
    width = args.q_latent.shape[3]
    return {
        "parts": division.parts,
        "C": width,
        "BC": padded(width),
        **_common_arguments(args, tile),
    }


def _common_arguments(args: DecodeArguments, tile: Tile) -> dict[str, Any]:
    return {
        "kv_lens": _given(args.kv_lens, args.q_latent),
        "sinks": _given(args.sinks, args.q_latent),
        "kv_len": args.kv_len,
        "q_len": args.q_latent.shape[1],
        "heads": args.q_latent.shape[2],
        "count": 0 if args.indices is None else args.indices.shape[2],
        "SPLIT": tile.split_tokens,
        "PER_TOKEN": per_token(args),
        "HAS_LENS": args.kv_lens is not None,
        "HAS_INDICES": args.indices is not None,
        "HAS_SINKS": args.sinks is not None,
    }
