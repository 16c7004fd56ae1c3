"""Launching the Triton kernel: a tile, grids that depend on shapes alone, and parts joined where there are several."""

from __future__ import annotations

import torch
import triton

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.decode_kernel import join_kernel, part_kernel
from mla_convert.kernels.tiles import INTERPRETED, Tile, choose_tile, nearest_arch, padded, piece_width

_LOG2E = 1.4426950408889634
#: Scales per token, at most: each group of numbers has products of its own in the compiled kernel.
MOST_GROUPS = 32


def decode(args: DecodeArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``absorbed_decode`` from checked arguments.

    Raises:
        UsageError: for a cache in int4, which this kernel does not read.
    """
    if args.q_latent.numel() == 0:
        lse = torch.full(args.q_latent.shape[:3], -torch.inf, device=args.q_latent.device)
        return torch.zeros_like(args.q_latent), lse
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
    """How the kernel reads a latent's dtype.

    Raises:
        UsageError: for int4.
    """
    if latent.dtype == torch.uint8:
        raise UsageError("the Triton backend does not read int4 latents; use backend='torch', or an int8 or FP8 cache")
    if latent.dtype == torch.int8:
        return "int8"
    return {torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8fnuz"}.get(latent.dtype, "plain")


def _scale_arguments(args: DecodeArguments) -> tuple[torch.Tensor, tuple[int, int, int], int]:
    """``latent_scale`` as a tensor, its strides (0 where one is for all), and numbers per scale (0 for no scales)."""
    scale, query = args.latent_scale, args.q_latent
    width = query.shape[3]
    if scale is None:
        return query, (0, 0, 0), 0
    if not isinstance(scale, torch.Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=query.device)
    if scale.dim() == 0:
        return scale.to(query.device), (0, 0, 0), width
    if scale.dim() == 2:
        return scale, (scale.stride(0), scale.stride(1), 0), width
    if scale.shape[2] > MOST_GROUPS:
        raise UsageError(
            f"latent_scale has {scale.shape[2]} scales per token; the Triton backend reads {MOST_GROUPS} at most; "
            "use backend='torch'"
        )
    return scale, (scale.stride(0), scale.stride(1), scale.stride(2)), width // scale.shape[2]


def launch(args: DecodeArguments, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads, width = args.q_latent.shape
    rope = args.q_rope.shape[3]
    device, dtype = args.q_latent.device, args.q_latent.dtype
    q_latent, q_rope = args.q_latent.contiguous(), args.q_rope.contiguous()
    indices = None if args.indices is None else args.indices.contiguous()
    alone = per_token(args)
    sequences, rows = (batch * q_len, heads) if alone else (batch, q_len * heads)
    count = 0 if indices is None else indices.shape[2]
    reach = args.kv_len if indices is None else count
    parts = max(1, triton.cdiv(reach, tile.split_tokens))
    out = torch.empty_like(q_latent)
    lse = torch.empty(q_latent.shape[:3], dtype=torch.float32, device=device)
    single = parts == 1
    part_out = out if single else torch.empty(sequences, parts, rows, width, dtype=torch.float32, device=device)
    part_lse = lse if single else torch.empty(sequences, parts, rows, dtype=torch.float32, device=device)
    codes = args.latent.view(torch.uint8) if form_of(args.latent).startswith("fp8") else args.latent
    scale, scale_strides, group = _scale_arguments(args)
    piece = piece_width(tile, width, group)
    mask = args.mask
    lengths = args.kv_lens
    sinks = args.sinks
    table = args.block_table
    part_kernel[(triton.cdiv(rows, tile.block_rows), parts, sequences)](
        q_latent,
        q_rope if rope else q_latent,
        codes,
        args.k_rope if rope else codes,
        part_out,
        part_lse,
        q_latent if lengths is None else lengths.contiguous(),
        q_latent if mask is None else mask.view(torch.uint8),
        q_latent if table is None else table.contiguous(),
        q_latent if indices is None else indices,
        scale,
        q_latent if sinks is None else sinks.contiguous(),
        args.scale * _LOG2E,
        args.kv_len,
        q_len,
        heads,
        count,
        *codes.stride(),
        *(args.k_rope.stride() if rope else (0, 0, 0)),
        *scale_strides,
        *((0, 0, 0) if mask is None else mask.stride()),
        0 if table is None else table.shape[1],
        C=width,
        R=rope,
        W=piece,
        PIECES=triton.cdiv(width, piece),
        BC=padded(piece),
        BP=padded(rope) if rope else 16,
        BR=tile.block_rows,
        BN=tile.block_tokens,
        SPLIT=tile.split_tokens,
        PAGE=0 if table is None else args.latent.shape[1],
        FORM=form_of(args.latent),
        GROUP=group if scale_strides[2] else group and piece,
        TRANSPOSED=tile.transposed,
        PER_TOKEN=alone,
        SINGLE=single,
        HAS_LENS=lengths is not None,
        HAS_MASK=mask is not None,
        HAS_INDICES=indices is not None,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee" if dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not single:
        join_kernel[(rows, sequences)](
            part_out,
            part_lse,
            out,
            lse,
            q_latent if lengths is None else lengths.contiguous(),
            q_latent if sinks is None else sinks.contiguous(),
            args.kv_len,
            q_len,
            heads,
            count,
            parts,
            C=width,
            BC=padded(width),
            BPARTS=triton.next_power_of_2(parts),
            SPLIT=tile.split_tokens,
            PER_TOKEN=alone,
            HAS_LENS=lengths is not None,
            HAS_INDICES=indices is not None,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
    return out, lse
