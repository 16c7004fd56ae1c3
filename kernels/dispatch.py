"""Which backend computes the absorbed attention: chosen in one place, and sayable."""

from __future__ import annotations

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels import torch_decode
from mla_convert.kernels.arguments import DecodeArguments, LatentScale, check

BACKENDS = ("auto", "torch")


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend that will run on ``device``; ``backend`` is one of :data:`BACKENDS`.

    Raises:
        UsageError: for a name that is not a backend of this version.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    return "torch"


def describe_backend(backend: str, device: torch.device) -> str:
    """The choice and what it runs, for ``handle.describe()`` and logs."""
    name = choose_backend(backend, device)
    detail = torch_decode.describe() if device.type == "cpu" else "PyTorch matrix products"
    return f"{name} ({detail})"


def absorbed_decode(
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
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few new tokens over a latent cache that all heads share.

    The mathematics stands in :mod:`mla_convert.absorption`.
    Always causal: new token s of S sees positions below ``kv_lens − S + s + 1``, and never one past
    the cache's T. ``mask`` and ``indices`` restrict further. ``kv_lens`` may exceed T: with
    ``kv_lens = T + S − 1`` every new token may see all T positions, and ``mask`` alone decides.

    Args:
        q_latent: [B,S,H,C], the query lifted into latent space, floating point.
        q_rope: [B,S,H,R], the rotated half, same dtype; R may be 0.
        latent: [B,T,C], or [pages, page, C] with ``block_table``; any strides; the query's dtype, or
            coded: float8_e4m3fn, float8_e4m3fnuz, int8, or uint8 [..., C/2] holding int4 + 8, low nibble first.
        k_rope: [B,T,R] or [pages, page, R]; never coded; width 0 is a tensor, not None.
        scale: multiplies the logits, (N + R) ** -0.5 · mscale²: the width before absorption.
        kv_lens: int [B], tokens stored per sequence, the new ones included; None is T for all.
            What lies past them is never read.
        mask: bool [B,S,T], True attends.
        block_table: int [B, pages per sequence], page numbers in order; entries past the end are never used.
        indices: int [B,S,K], the only positions each new token may see; −1 for none.
        sinks: [H] logits that take weight and have no value.
        latent_scale: of a coded cache: a number, a scalar tensor, one per token ([B,T] or
            [pages, page]) or one per group ([..., groups]).
        backend: "auto" or a name of :data:`BACKENDS`.

    Returns:
        (out [B,S,H,C] in the query's dtype, lse [B,S,H] float32, natural logarithm, sinks included).
        A token that sees nothing gives zeros and −inf (with sinks: zeros and the sink).

    Raises:
        UsageError: for arguments that do not fit together.
    """
    args = check(
        DecodeArguments(
            q_latent, q_rope, latent, k_rope, scale, kv_lens, mask, block_table, indices, sinks, latent_scale
        )
    )
    choose_backend(backend, q_latent.device)
    return torch_decode.torch_decode(args)
