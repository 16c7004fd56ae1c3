"""``absorbed_decode`` as one operator of PyTorch, for compiled code.

In a compiled graph the kernel's launch is opaque, and on a CPU it may look at how long each history
really is. Eager code calls the backends directly: an operator costs tens of microseconds a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.kernels.announcing import announce
from mla_convert.kernels.arguments import DecodeArguments, LatentScale
from mla_convert.kernels.tracing import being_traced


@torch.library.custom_op("mla_convert::absorbed_decode", mutates_args=())
def _operator(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    scale: float,
    kv_lens: Tensor | None,
    mask: Tensor | None,
    block_table: Tensor | None,
    indices: Tensor | None,
    sinks: Tensor | None,
    latent_scale: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    args = DecodeArguments(
        q_latent, q_rope, latent, k_rope, scale, kv_lens, mask, block_table, indices, sinks, latent_scale
    )
    out, lse = run_backend(backend, args)
    return out.contiguous(), lse.contiguous()


@_operator.register_fake
def _shapes(q_latent: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = q_latent.new_empty(q_latent.shape)
    return out, q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


def run_backend(backend: str, args: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Run checked arguments on a backend by its name, "triton" or "torch"; said in the log, once."""
    if not being_traced():
        announce("absorbed decode", backend, args.q_latent.device)
    if backend == "triton":
        from mla_convert.kernels import triton_decode

        return triton_decode.decode(args)
    from mla_convert.kernels import torch_decode

    return torch_decode.torch_decode(args)


def run_compiled(backend: str, args: DecodeArguments) -> tuple[Tensor, Tensor]:
    """:func:`run_backend` from code that is being compiled."""
    out, lse = _operator(
        args.q_latent,
        args.q_rope,
        args.latent,
        args.k_rope,
        args.scale,
        args.kv_lens,
        args.mask,
        args.block_table,
        args.indices,
        args.sinks,
        _as_tensor(args.latent_scale, args.q_latent),
        backend,
    )
    return out, lse


def _as_tensor(scale: LatentScale | None, like: Tensor) -> Tensor | None:
    if scale is None or isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)
