"""Expanded and absorbed attention in plain PyTorch, one token at a time: the mathematics, executable.

Slow on purpose, in float64 (or any dtype asked for), and written differently from the backends that
are tested against it: every new token of every sequence is computed alone, from exactly the cached
tokens that it may see. Nothing that a token may not see is ever read.
"""

from __future__ import annotations

import torch

from mla_convert.kernels.arguments import DecodeArguments, LatentScale, check
from mla_convert.kernels.history import decode_latent, scale_of, take_tokens


def visible_positions(args: DecodeArguments, sequence: int, token: int) -> torch.Tensor:
    """Logical positions that one new token attends to, int64, ascending unless ``indices`` give another order."""
    length = args.kv_len if args.kv_lens is None else int(args.kv_lens[sequence])
    limit = min(args.kv_len, length - args.q_latent.shape[1] + token + 1)
    if args.indices is not None:
        positions = args.indices[sequence, token].to(torch.int64)
        positions = positions[(positions >= 0) & (positions < limit)]
    else:
        positions = torch.arange(max(limit, 0), device=args.q_latent.device)
    if args.mask is not None:
        positions = positions[args.mask[sequence, token, positions]]
    return positions


def absorbed_decode_reference(
    args: DecodeArguments, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """``absorbed_decode`` by its definition: (out [B,S,H,C] in ``dtype``, lse [B,S,H] in ``dtype``).

    ``o = Σ softmax(scale · (q_latent·c + q_rope·k_rope)) c`` over the visible tokens, with ``sinks``
    as one more logit that has no value. A token that sees nothing gives zeros and −inf.
    """
    check(args)
    out = torch.zeros(args.q_latent.shape, dtype=dtype, device=args.q_latent.device)
    lse = torch.full(args.q_latent.shape[:3], -torch.inf, dtype=dtype, device=args.q_latent.device)
    for b in range(out.shape[0]):
        for s in range(out.shape[1]):
            seen = visible_positions(args, b, s)
            length = int(seen.max()) + 1 if seen.numel() else 0
            codes = take_tokens(args.latent, b, args.block_table, length)[seen]
            scale = scale_of(args.latent_scale, b, args.block_table, length)
            if isinstance(scale, torch.Tensor) and scale.dim():
                scale = scale[seen]
            latent = decode_latent(codes, scale, dtype)
            rope = take_tokens(args.k_rope, b, args.block_table, length)[seen].to(dtype)
            logits = args.scale * (args.q_latent[b, s].to(dtype) @ latent.T + args.q_rope[b, s].to(dtype) @ rope.T)
            with_sink = logits if args.sinks is None else torch.cat((logits, args.sinks[:, None].to(dtype)), dim=1)
            lse[b, s] = torch.logsumexp(with_sink, dim=1)
            if seen.numel():
                out[b, s] = torch.exp(logits - lse[b, s, :, None]) @ latent
    return out, lse


def decode_by_definition(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    *,
    scale: float,
    kv_lens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    latent_scale: LatentScale | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`absorbed_decode_reference` by the arguments of ``absorbed_decode``; ``dtype`` stands in for a backend."""
    args = DecodeArguments(
        q_latent, q_rope, latent, k_rope, scale, kv_lens, mask, block_table, indices, sinks, latent_scale
    )
    return absorbed_decode_reference(args, dtype)


def expanded_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor,
) -> torch.Tensor:
    """The defining form: keys and values of all heads rebuilt from the latents, in the inputs' dtype.

    Args:
        q_nope: [B,S,H,N]; q_rope: [B,S,H,R]; latent: [B,T,C]; k_rope: [B,T,R].
        w_uk: [H,N,C]; w_uv: [H,V,C].
        visible: bool [B,S,T], True attends.

    Returns:
        [B,S,H,V]; zeros for a token that sees nothing.
    """
    keys = torch.einsum("hnc,btc->bthn", w_uk, latent)
    values = torch.einsum("hvc,btc->bthv", w_uv, latent)
    logits = torch.einsum("bshn,bthn->bsht", q_nope, keys) + torch.einsum("bshr,btr->bsht", q_rope, k_rope)
    logits = (logits * scale).masked_fill(~visible[:, :, None], -torch.inf)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    return torch.einsum("bsht,bthv->bshv", weights, values)
