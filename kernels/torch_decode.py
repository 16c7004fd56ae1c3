"""Absorbed decode without Triton: the fast path on CPU, and a plain one for everything else.

On CPU the attention of all heads over one shared latent is a single call of PyTorch's own flash
kernel, in which the cached row [c ; k_rope] is key and value at once: the history is read once, in
tiles, and never converted or copied as a whole. Elsewhere, and in compiled code, the same products
are batched matrix products.

The result of one sequence depends on its batch only within rounding: library calls choose by shape.
"""

from __future__ import annotations

import dataclasses

import torch

from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.history import decode_latent, scale_of, take_tokens
from mla_convert.kernels.merging import merge_parts, with_sinks
from mla_convert.kernels.tracing import being_traced

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

#: A history is divided among idle threads down to this many tokens; less costs more to start than it saves.
SMALLEST_PART = 512
#: Tokens gathered at once for ``indices``: bounds the memory of S·K rows.
GATHERED_TOKENS = 1 << 16

Result = tuple[torch.Tensor, torch.Tensor]


def torch_decode(args: DecodeArguments) -> Result:
    """Compute ``absorbed_decode`` from checked arguments; every kind that the contract allows."""
    on_host = args.q_latent.device.type == "cpu" and not being_traced()
    if args.q_latent.numel() == 0:
        return _nothing(args.q_latent)
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


def describe() -> str:
    """What :func:`torch_decode` runs on the CPU, in words."""
    return "PyTorch flash attention over latent rows" if _flash is not None else "PyTorch matrix products"


def _dense(args: DecodeArguments) -> Result:
    """The plain case, and the shortest way: a cache of numbers, full to its end."""
    visible = _and(_causal(args.q_latent.shape[1], args.kv_len, args.kv_len, args.q_latent.device), args.mask)
    return _attend(args.q_latent, args.q_rope, args.latent, args.k_rope, args.scale, visible)


def _by_length(args: DecodeArguments) -> Result:
    """Sequences of one length together, each group sliced to it: what lies past the end is never touched."""
    batch = args.q_latent.shape[0]
    lens = [args.kv_len] * batch if args.kv_lens is None else args.kv_lens.tolist()
    if len(set(lens)) == 1 and args.block_table is None and not args.coded:
        return _sliced(args, args.latent, args.k_rope, slice(None), lens[0])
    parts = []
    for b, length in enumerate(lens):
        stop = max(0, min(length, args.kv_len))
        codes = take_tokens(args.latent, b, args.block_table, stop)
        latent = decode_latent(codes, scale_of(args.latent_scale, b, args.block_table, stop), args.q_latent.dtype)
        rope = take_tokens(args.k_rope, b, args.block_table, stop)
        parts.append(_sliced(args, latent[None], rope[None], slice(b, b + 1), length))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sliced(args: DecodeArguments, latent: torch.Tensor, rope: torch.Tensor, rows: slice, length: int) -> Result:
    """The sequences ``rows``, all of ``kv_lens`` = ``length``, over ``latent`` and ``rope`` of at least that length."""
    stop = max(0, min(length, args.kv_len))
    mask = None if args.mask is None else args.mask[rows, :, :stop]
    visible = _and(_causal(args.q_latent.shape[1], length, stop, args.q_latent.device), mask)
    return _attend(args.q_latent[rows], args.q_rope[rows], latent[:, :stop], rope[:, :stop], args.scale, visible)


def _causal(q_len: int, length: int, stop: int, device: torch.device) -> torch.Tensor | None:
    """Bool [1, S, stop] where token s sees positions below ``length − S + s + 1``; None when all see all."""
    if length - q_len + 1 >= stop:
        return None
    limits = torch.arange(length - q_len + 1, length + 1, device=device)
    return (torch.arange(stop, device=device) < limits[:, None])[None]


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
    return _attend(args.q_latent, args.q_rope, latent, rope, args.scale, visible)


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
        return _nothing(args.q_latent)
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
    return _attend(q_latent, q_rope, latent, rope, args.scale, valid[:, None])


def _nothing(q_latent: torch.Tensor) -> Result:
    lse = torch.full(q_latent.shape[:3], -torch.inf, dtype=torch.float32, device=q_latent.device)
    return torch.zeros_like(q_latent), lse


def _attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
) -> Result:
    """Attention over dense histories: [B,S,H,·] on [B,T,·]; ``visible`` bool [B or 1, S, T], None for everything."""
    if 0 in (latent.shape[1], q_latent.shape[0], q_latent.shape[1]):
        return _nothing(q_latent)
    k_rope = k_rope.to(q_latent.dtype)
    if q_latent.device.type == "cpu" and _flash is not None and not being_traced():
        rows = _joint_rows(latent, k_rope)
        query = torch.cat((q_latent, q_rope), dim=-1)
        out, lse = _flash_parts(query, rows, scale, visible)
        return out[..., : q_latent.shape[-1]], lse
    return _products(q_latent, q_rope, latent, k_rope, scale, visible)


def _joint_rows(latent: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """[B,T,C+R] rows: a view where both halves already lie side by side (``LatentCache``), a copy elsewhere."""
    width, stride = latent.shape[-1], latent.stride()
    if k_rope.shape[-1] == 0:
        return latent if stride[-1] == 1 else latent.contiguous()
    beside = (
        k_rope.stride() == stride
        and stride[-1] == 1
        and k_rope.dtype == latent.dtype
        and k_rope.data_ptr() == latent.data_ptr() + width * latent.element_size()
        and k_rope.untyped_storage().data_ptr() == latent.untyped_storage().data_ptr()
    )
    if not beside:
        return torch.cat((latent, k_rope), dim=-1)
    return latent.as_strided((*latent.shape[:2], width + k_rope.shape[-1]), stride)


def _flash_parts(query: torch.Tensor, rows: torch.Tensor, scale: float, visible: torch.Tensor | None) -> Result:
    """One flash call, or one over equal parts of a single sequence's history when threads would stay idle."""
    batch, q_len, kv_len = query.shape[0], query.shape[1], rows.shape[1]
    parts = min(torch.get_num_threads() // (batch * q_len), kv_len // SMALLEST_PART)
    if parts < 2 or batch > 1:
        return _flash_call(query, rows, scale, visible)
    size = kv_len // parts
    even = size * parts
    body = rows[0, :even].view(parts, size, -1)
    seen = None if visible is None else visible[0, :, :even].view(q_len, parts, size).transpose(0, 1)
    outs, lses = _flash_call(query.expand(parts, -1, -1, -1), body, scale, seen)
    if even < kv_len:
        seen = None if visible is None else visible[..., even:]
        out, lse = _flash_call(query, rows[:, even:], scale, seen)
        outs, lses = torch.cat((outs, out)), torch.cat((lses, lse))
    out, lse = merge_parts(outs, lses)
    return out[None], lse[None]


def _flash_call(query: torch.Tensor, rows: torch.Tensor, scale: float, visible: torch.Tensor | None) -> Result:
    """PyTorch's CPU flash kernel with the H heads of a token as its query rows, and tokens in the place of heads."""
    assert _flash is not None
    batch, q_len = query.shape[:2]
    history = rows[:, None].expand(-1, q_len, -1, -1)
    if visible is None:
        out, lse = _flash(query, history, history, 0.0, False, scale=scale)
        return out, lse
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
    bias = bias[:, :, None].expand(batch, -1, -1, -1)
    out, lse = _flash(query, history, history, 0.0, False, attn_mask=bias, scale=scale)
    # The kernel gives zeros for a row that sees nothing, but 0 for its log-sum-exp.
    return out, lse.masked_fill(~visible.any(dim=-1)[..., None], -torch.inf)


def _products(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
) -> Result:
    """The same attention as matrix products; softmax in float32 or wider."""
    batch, q_len, heads, width = q_latent.shape
    logits = torch.bmm(q_latent.reshape(batch, -1, width), latent.transpose(1, 2))
    if q_rope.shape[-1]:
        logits = logits + torch.bmm(q_rope.reshape(batch, q_len * heads, -1), k_rope.transpose(1, 2))
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.view(batch, q_len, heads, -1).to(wide) * scale
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    out = torch.bmm(weights.to(latent.dtype).view(batch, q_len * heads, -1), latent)
    return out.view(batch, q_len, heads, width), lse
