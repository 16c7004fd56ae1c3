"""Which backend computes the absorbed attention: chosen in one place, and sayable."""

from __future__ import annotations

import importlib.util
import os

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import DecodeArguments, LatentScale, check
from mla_convert.kernels.custom_op import run_backend, run_compiled
from mla_convert.kernels.dense import describe_host
from mla_convert.kernels.device import OLDEST_CAPABILITY, too_old
from mla_convert.kernels.tracing import being_traced
from mla_convert.wording import option

BACKENDS = ("auto", "triton", "torch")
#: Scales per token that the Triton kernel takes: each group of numbers has products of its own when it is compiled.
MOST_SCALES = 32


_INSTALLED = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether the triton package is installed."""
    return _INSTALLED


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python on the CPU (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(
    device: torch.device,
    latent_dtype: torch.dtype | None = None,
    query_dtype: torch.dtype | None = None,
    scales: int = 1,
) -> str | None:
    """What of a call the Triton kernel does not take, in words; None where it takes everything.

    Args:
        latent_dtype, query_dtype: as the tensors have them; None where they are not known, or like any other.
        scales: of one token.
    """
    if latent_dtype == torch.uint8:
        return "latents in int4 (an int8 or FP8 cache can be read)"
    if query_dtype == torch.float64:
        return "float64"
    if scales > MOST_SCALES:
        return f"{scales} scales per token ({MOST_SCALES} at most)"
    if too_old(device):
        return f"{device}, a GPU older than compute capability {'.'.join(map(str, OLDEST_CAPABILITY))}"
    return None


def choose_backend(
    backend: str,
    device: torch.device,
    latent_dtype: torch.dtype | None = None,
    query_dtype: torch.dtype | None = None,
    scales: int = 1,
) -> str:
    """The backend that will run on ``device``: "triton" or "torch".

    ``backend`` is one of :data:`BACKENDS`. "auto" takes Triton on CUDA and ROCm devices where it is installed and the
    call has no :func:`obstacle`, and PyTorch everywhere else.

    Raises:
        UsageError: for a name that is not known, or a backend that was asked for and cannot run there.
    """
    if backend not in BACKENDS:
        raise UsageError(f"{option('backend', backend)} is not known; choose one of {', '.join(BACKENDS)}")
    if backend == "torch" or (backend == "auto" and (device.type != "cuda" or not has_triton())):
        return "torch"
    found = obstacle(device, latent_dtype, query_dtype, scales)
    if backend == "auto":
        return "triton" if found is None else "torch"
    if not has_triton():
        raise UsageError(
            f"{option('backend', backend)} needs the triton package: pip install triton, or use "
            f"{option('backend', 'torch')}"
        )
    if device.type != "cuda" and not _interpreted():
        raise UsageError(
            f"{option('backend', backend)} runs on CUDA and ROCm devices, found {device}; use 'auto' or 'torch'"
        )
    if found is not None:
        raise UsageError(
            f"{option('backend', backend)} does not take {found}; use {option('backend', 'auto')} or 'torch'"
        )
    return "triton"


def describe_backend(
    backend: str,
    device: torch.device,
    latent_dtype: torch.dtype | None = None,
    query_dtype: torch.dtype | None = None,
    scales: int = 1,
) -> str:
    """The choice and what it runs, for ``handle.describe()`` and logs; arguments as for :func:`choose_backend`."""
    name = choose_backend(backend, device, latent_dtype, query_dtype, scales)
    if name == "triton":
        return "triton (interpreted)" if device.type == "cpu" else "triton"
    return f"torch ({describe_host() if device.type == 'cpu' else 'PyTorch matrix products'})"


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
        mask: bool [B,S,T], True attends. Tokens inside ``kv_lens`` are read, masked or not, and must be finite:
            a masked one has weight 0, and 0 · NaN is NaN. Only past the end may lie anything.
        block_table: int [B, pages per sequence], page numbers in order; entries past the end are never used.
            Those that are used must be pages of the cache: on a CPU others are refused; on an accelerator they
            are not looked at (that would wait for the device), and memory outside the cache is read.
        indices: int [B,S,K], the only positions each new token may see; −1 for none. Others inside ``kv_lens`` may be
            read as well, where that is no more work.
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
    scale = args.latent_scale
    scales = scale.shape[2] if isinstance(scale, torch.Tensor) and scale.dim() == 3 else 1
    name = choose_backend(backend, args.q_latent.device, args.latent.dtype, args.q_latent.dtype, scales)
    if being_traced():
        # PyTorch's products on an accelerator are left to the compiler; everything else is one operator to it.
        on_host = args.q_latent.device.type == "cpu"
        return run_compiled(name, args) if name == "triton" or on_host else run_backend(name, args)
    return run_backend(name, args)
