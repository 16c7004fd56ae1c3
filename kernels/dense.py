"""Attention over dense histories in numbers: PyTorch's own CPU flash kernel, or matrix products."""

from __future__ import annotations

import torch

from mla_convert.kernels.merging import merge_parts
from mla_convert.kernels.tracing import being_traced

_packet = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
#: The overload itself: finding it anew in each call takes longer than a short history.
_flash = None if _packet is None else _packet.default

#: A history is divided among idle threads down to this many tokens; less costs more to start than it saves.
SMALLEST_PART = 512

Result = tuple[torch.Tensor, torch.Tensor]


def describe_host() -> str:
    """What :func:`attend` runs on the CPU, in words."""
    return "PyTorch flash attention over latent rows" if _flash is not None else "PyTorch matrix products"


def nothing(q_latent: torch.Tensor) -> Result:
    """The result of tokens that see nothing: zeros and −inf."""
    lse = torch.full(q_latent.shape[:3], -torch.inf, dtype=torch.float32, device=q_latent.device)
    return torch.zeros_like(q_latent), lse


def attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
) -> Result:
    """Attention over dense histories: [B,S,H,·] on [B,T,·]; ``visible`` bool [B or 1, S, T], None for everything."""
    if 0 in (latent.shape[1], q_latent.shape[0], q_latent.shape[1]):
        return nothing(q_latent)
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
