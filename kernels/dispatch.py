"""Which backend computes the absorbed attention: chosen in one place, and sayable."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import DecodeArguments, LatentScale, check
from mla_convert.kernels.custom_op import run_backend, run_compiled
from mla_convert.kernels.dense import describe_host
from mla_convert.kernels.tracing import being_traced

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "torch")


_INSTALLED = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether the triton package is installed."""
    return _INSTALLED


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python on the CPU (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_backend(backend: str, device: torch.device, latent_dtype: torch.dtype | None = None) -> str:
    """The backend that will run on ``device``: "triton" or "torch".

    ``backend`` is one of :data:`BACKENDS`. "auto" takes Triton on CUDA and ROCm devices where it is installed, unless
    the latent is in a form that it does not read (int4), and PyTorch everywhere else.

    Raises:
        UsageError: for a name that is not known, or a backend that was asked for and cannot run there.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if backend == "triton":
        if not has_triton():
            raise UsageError("backend='triton' needs the triton package: pip install triton, or use backend='torch'")
        if device.type != "cuda" and not _interpreted():
            raise UsageError(f"backend='triton' runs on CUDA and ROCm devices, found {device}; use 'auto' or 'torch'")
        return "triton"
    if backend == "auto" and device.type == "cuda" and has_triton() and latent_dtype != torch.uint8:
        return "triton"
    return "torch"


def describe_backend(backend: str, device: torch.device) -> str:
    """The choice and what it runs, for ``handle.describe()`` and logs."""
    name = choose_backend(backend, device)
    if name == "triton":
        return "triton (interpreted)" if device.type == "cpu" else "triton"
    return f"torch ({describe_host() if device.type == 'cpu' else 'PyTorch matrix products'})"


@functools.cache
def _announce(name: str, device: torch.device) -> None:
    """Log what runs, once for each backend and device."""
    logger.info("absorbed decode on %s runs on the %s backend", device, name)
    if name == "triton" and device.type == "cuda":
        logger.info("Triton compiles its kernel at the first call of each kind, which takes seconds")


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
            Those that are used must be pages of the cache: on a CPU others are refused; on an accelerator they
            are not looked at (that would wait for the device), and memory outside the cache is read.
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
    return decode(args, backend)


def decode(args: DecodeArguments, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`absorbed_decode` for arguments that are known to fit together."""
    name = choose_backend(backend, args.q_latent.device, args.latent.dtype)
    if being_traced():
        # PyTorch's products on an accelerator are left to the compiler; everything else is one operator to it.
        on_host = args.q_latent.device.type == "cpu"
        return run_compiled(name, args) if name == "triton" or on_host else run_backend(name, args)
    _announce(name, args.q_latent.device)
    return run_backend(name, args)


def warm_up(backend: str, device: torch.device, dtype: torch.dtype, *, heads: int, latent: int, rope: int) -> int:
    """Run every kind of call that decoding one token makes, so that Triton compiles now and not in the first step.

    Args:
        heads, latent, rope: H, C and R of the model's attention.

    Returns:
        How many kinds ran; 0 on the PyTorch backend, which compiles nothing.
    """
    if choose_backend(backend, device) != "triton":
        return 0
    from mla_convert.kernels.triton_decode import tile_for

    def call(kv_len: int, masked: bool) -> DecodeArguments:
        rows = torch.zeros(1, kv_len, latent + rope, dtype=dtype, device=device)
        query = torch.zeros(1, 1, heads, latent + rope, dtype=dtype, device=device)
        lens = torch.full((1,), kv_len, device=device) if masked else None
        mask = torch.ones(1, 1, kv_len, dtype=torch.bool, device=device) if masked else None
        parts = query[..., :latent], query[..., latent:], rows[..., :latent], rows[..., latent:]
        return DecodeArguments(*parts, 1.0, kv_lens=lens, mask=mask)

    several_parts = tile_for(call(16, False)).split_tokens + 16
    calls = [call(kv_len, masked) for kv_len in (16, several_parts) for masked in (False, True)]
    for args in calls:
        run_backend("triton", args)
    return len(calls)
