"""Absorbed decode without Triton: the fast path on CPU, and a plain one for everything else.

On CPU the attention of all heads over one shared latent is a single call of PyTorch's own flash
kernel, in which the cached row [c ; k_rope] is key and value at once: the history is read once, in
tiles, and never converted or copied as a whole. Elsewhere, and in compiled code, the same products
are batched matrix products.

The result of one sequence depends on its batch only within rounding: library calls choose by shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from mla_convert.kernels.arguments import DecodeArguments, LatentScale
from mla_convert.kernels.dense import Result, attend, nothing
from mla_convert.kernels.history import decode_latent
from mla_convert.kernels.merging import merge, with_sinks
from mla_convert.kernels.selecting import ungathered
from mla_convert.kernels.tracing import being_traced

#: Tokens of a coded or paged history that are made numbers at once.
TILE_TOKENS = 1024
#: Tokens gathered at once for ``indices``: bounds the memory of S·K rows.
GATHERED_TOKENS = 1 << 16


def torch_decode(args: DecodeArguments) -> Result:
    """Compute ``absorbed_decode`` from checked arguments; every kind that the contract allows."""
    on_host = args.q_latent.device.type == "cpu" and not being_traced()
    if args.q_latent.numel() == 0:
        return nothing(args.q_latent)
    if on_host and args.indices is not None:
        args = ungathered(args)
    if args.indices is not None:
        out, lse = _gathered(args)
    elif args.kv_lens is None and args.block_table is None and not args.coded:
        out, lse = _dense(args)
    elif on_host:
        out, lse = _by_length(args)
    else:
        out, lse = _padded(args)
    if args.sinks is not None:
        out, lse = with_sinks(out, lse, args.sinks)
    return out, lse.to(torch.float32)


def _dense(args: DecodeArguments) -> Result:
    """The plain case, and the shortest way: a cache of numbers, full to its end."""
    visible = _and(_causal(args.q_latent.shape[1], args.kv_len, args.kv_len, args.q_latent.device), args.mask)
    return attend(args.q_latent, args.q_rope, args.latent, args.k_rope, args.scale, visible)


def _by_length(args: DecodeArguments) -> Result:
    """Sequences of one length together, each group sliced to it: what lies past the end is never touched."""
    batch = args.q_latent.shape[0]
    lens = [args.kv_len] * batch if args.kv_lens is None else args.kv_lens.tolist()
    one_length = _tiled if args.coded or args.block_table is not None else _sliced
    if len(set(lens)) == 1 and args.block_table is None:
        return one_length(args, slice(None), lens[0])
    parts = [one_length(args, slice(b, b + 1), length) for b, length in enumerate(lens)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _tiled(args: DecodeArguments, rows: slice, length: int) -> Result:
    """The sequences ``rows`` over a history that must be put together first, by a tile of it at a time.

    Codes become numbers, or pages one history, in memory that does not grow with its length.
    """
    query, rope = args.q_latent[rows], args.q_rope[rows]
    stop = max(0, min(length, args.kv_len))
    limits = _limits(query.shape[1], length, stop, query.device)
    total: Result | None = None
    for begin, latent, k_rope in _tiles(args, rows, stop):
        end = begin + latent.shape[1]
        mask = None if args.mask is None else args.mask[rows, :, begin:end]
        out, lse = attend(query, rope, latent, k_rope, args.scale, _and(_below(limits, begin, end), mask))
        # Parts are added up in float32 or wider: rounding each sum would add up too.
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        total = (out, lse) if total is None else merge(*total, out, lse)
    return nothing(query) if total is None else (total[0].to(query.dtype), total[1])


def _tiles(args: DecodeArguments, rows: slice, stop: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first position, latent [B,·,C], k_rope [B,·,R]) of the sequences ``rows``, as numbers."""
    table, page = args.block_table, args.latent.shape[1]
    step = TILE_TOKENS
    if table is not None:
        step = max(1, TILE_TOKENS // page) * page
    for begin in range(0, stop, step):
        end = min(begin + step, stop)
        if table is None:
            latent, k_rope, scale = (_take(t, (rows, slice(begin, end))) for t in _stored(args))
        else:
            pages = table[rows.start, begin // page : -(-end // page)].to(torch.int64)
            latent, k_rope, scale = (_flat_pages(t, pages, end - begin) for t in _stored(args))
        assert isinstance(latent, torch.Tensor) and isinstance(k_rope, torch.Tensor)
        yield begin, decode_latent(latent, scale, args.q_latent.dtype), k_rope.to(args.q_latent.dtype)


def _stored(args: DecodeArguments) -> tuple[torch.Tensor, torch.Tensor, LatentScale | None]:
    return args.latent, args.k_rope, args.latent_scale


def _take(tensor: LatentScale | None, index: tuple[slice, slice]) -> LatentScale | None:
    return tensor[index] if isinstance(tensor, torch.Tensor) and tensor.dim() else tensor


def _flat_pages(tensor: LatentScale | None, pages: torch.Tensor, length: int) -> LatentScale | None:
    """The first ``length`` tokens of ``pages``, as one sequence [1, length, ...]."""
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        return tensor
    return tensor.index_select(0, pages).flatten(0, 1)[None, :length]


def _sliced(args: DecodeArguments, rows: slice, length: int) -> Result:
    """The sequences ``rows`` of a cache of numbers, all of ``kv_lens`` = ``length``, without a copy."""
    stop = max(0, min(length, args.kv_len))
    mask = None if args.mask is None else args.mask[rows, :, :stop]
    visible = _and(_causal(args.q_latent.shape[1], length, stop, args.q_latent.device), mask)
    latent, rope = args.latent[rows, :stop], args.k_rope[rows, :stop]
    return attend(args.q_latent[rows], args.q_rope[rows], latent, rope, args.scale, visible)


def _causal(q_len: int, length: int, stop: int, device: torch.device) -> torch.Tensor | None:
    """Bool [1, S, stop] where token s sees positions below ``length − S + s + 1``; None when all see all."""
    return _below(_limits(q_len, length, stop, device), 0, stop)


def _limits(q_len: int, length: int, stop: int, device: torch.device) -> torch.Tensor | None:
    """int64 [S], below which position each new token sees; None where that is no limit."""
    if length - q_len + 1 >= stop:
        return None
    return torch.arange(length - q_len + 1, length + 1, device=device)


def _below(limits: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
    """Bool [1, S, end − begin]: the positions from ``begin`` to ``end`` that lie below ``limits``."""
    if limits is None or bool((limits >= end).all()):
        return None
    return (torch.arange(begin, end, device=limits.device) < limits[:, None])[None]


def _and(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a & b


def _padded(args: DecodeArguments) -> Result:
    """All sequences at the cache's full width, with shapes that don't depend on any value on the device."""
    q_len, kv_len, device = args.q_latent.shape[1], args.kv_len, args.q_latent.device
    if args.kv_lens is None:
        latent, rope = _flat(args, None)
        return _dense(dataclasses.replace(args, latent=latent, k_rope=rope, latent_scale=None, block_table=None))
    positions = torch.arange(kv_len, device=device)
    stored = positions < args.kv_lens[:, None]
    limits = args.kv_lens[:, None] + torch.arange(1 - q_len, 1, device=device)
    visible = _and(positions < limits[..., None], args.mask)
    latent, rope = _flat(args, stored)
    return attend(args.q_latent, args.q_rope, latent, rope, args.scale, visible)


def _flat(args: DecodeArguments, stored: torch.Tensor | None) -> Result:
    """The cache as [B,T,C] and [B,T,R] numbers; zeros where ``stored`` [B,T] is False, whatever lies there."""
    latent, rope, scale = args.latent, args.k_rope, args.latent_scale
    if args.block_table is not None:
        table = args.block_table.to(torch.int64)
        if stored is not None:
            table = table.masked_fill(~stored[:, :: latent.shape[1]], 0)
        latent, rope = latent[table].flatten(1, 2), rope[table].flatten(1, 2)
        if isinstance(scale, torch.Tensor) and scale.dim():
            scale = scale[table].flatten(1, 2)
    numbers, rope = decode_latent(latent, scale, args.q_latent.dtype), rope.to(args.q_latent.dtype)
    if stored is None:
        return numbers, rope
    return numbers.masked_fill(~stored[..., None], 0.0), rope.masked_fill(~stored[..., None], 0.0)


def _gathered(args: DecodeArguments) -> Result:
    """Attention over chosen positions alone: work and memory follow K, not the history."""
    assert args.indices is not None
    batch, q_len, count = args.indices.shape
    if count == 0 or args.kv_len == 0:
        return nothing(args.q_latent)
    step = max(1, GATHERED_TOKENS // count)
    tokens = torch.arange(batch * q_len, device=args.indices.device)
    parts = [_gathered_tokens(args, some // q_len, some % q_len) for some in torch.split(tokens, step)]
    outs, lses = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return outs.view(args.q_latent.shape), lses.view(args.q_latent.shape[:3])


def _gathered_tokens(args: DecodeArguments, b: torch.Tensor, s: torch.Tensor) -> Result:
    """New tokens (b[i], s[i]), each as a sequence of its own over its chosen positions."""
    assert args.indices is not None
    positions = args.indices[b, s].to(torch.int64)
    limits = torch.full_like(b, args.kv_len)
    if args.kv_lens is not None:
        limits = args.kv_lens.to(torch.int64)[b]
    limits = (limits - args.q_latent.shape[1] + s + 1).clamp(max=args.kv_len)
    valid = (positions >= 0) & (positions < limits[:, None])
    at = positions.masked_fill(~valid, 0)
    if args.mask is not None:
        valid = valid & args.mask[b[:, None], s[:, None], at]
        at = at.masked_fill(~valid, 0)
    if at.device.type == "cpu" and not being_traced():
        at, valid = _without_unseen(at, valid)
    row, column = b[:, None].expand_as(at), at
    if args.block_table is not None:
        page = args.latent.shape[1]
        table = args.block_table.to(torch.int64)
        row, column = table[row, at // page].masked_fill(~valid, 0), at % page
    scale = args.latent_scale
    if isinstance(scale, torch.Tensor) and scale.dim():
        scale = scale[row, column]
    latent = decode_latent(args.latent[row, column], scale, args.q_latent.dtype).masked_fill(~valid[..., None], 0.0)
    rope = args.k_rope[row, column].to(args.q_latent.dtype).masked_fill(~valid[..., None], 0.0)
    q_latent, q_rope = args.q_latent[b, s][:, None], args.q_rope[b, s][:, None]
    return attend(q_latent, q_rope, latent, rope, args.scale, valid[:, None])


def _without_unseen(at: torch.Tensor, valid: torch.Tensor) -> Result:
    """Positions [tokens, K] and which count, as narrow as the most that any token sees; in the order they had."""
    most = int(valid.sum(dim=-1).max())
    if most == valid.shape[1]:
        return at, valid
    front = torch.argsort(valid, dim=-1, descending=True, stable=True)[:, :most]
    return at.gather(1, front), valid.gather(1, front)
