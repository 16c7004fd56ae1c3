"""How far a result of ``absorbed_decode`` may be off: what plain PyTorch loses at the same dtype, and roundings."""

from __future__ import annotations

import dataclasses

import torch

from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.history import decode_latent, scale_of, take_tokens
from mla_convert.kernels.reference import absorbed_decode_reference


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The float64 result, and the largest error of output and log-sum-exp."""

    exact: torch.Tensor
    exact_lse: torch.Tensor
    out: float
    lse: float

    def errors(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
        """The largest errors of a result; NaN where it has one. Rows that see nothing are compared apart."""
        seen = ~torch.isneginf(self.exact_lse)
        return _largest(out, self.exact), _largest(lse[seen], self.exact_lse[seen])


def bounds(args: DecodeArguments) -> Bounds:
    """Twice the error of plain PyTorch at the query's dtype, one rounding of the logits and one of the result.

    Plain PyTorch can be right by luck on a small case, hence the roundings. In float64 the reference
    is not exact either: a sum of n terms is known to n roundings.

    Raises:
        AssertionError: where they would let anything pass, because the result's own size is no more than they allow.
    """
    exact, exact_lse = absorbed_decode_reference(numbers_of(args))
    usual, usual_lse = plain(args)
    logits = logit_rounding(args) if args.q_latent.dtype != torch.float64 else 0.0
    unit = torch.finfo(args.q_latent.dtype).eps + args.kv_len * torch.finfo(torch.float64).eps + logits
    size, seen = float(exact.abs().max()), ~torch.isneginf(exact_lse)
    size_lse = max(1.0, float(exact_lse[seen].abs().max())) if bool(seen.any()) else 1.0
    rounding = torch.finfo(torch.float32).eps * size_lse
    found = Bounds(
        exact,
        exact_lse,
        out=2 * _largest(usual, exact) + unit * size,
        lse=2 * _largest(usual_lse[seen], exact_lse[seen]) + rounding + logits,
    )
    sane = (found.out < size or size == 0) and found.lse < size_lse
    assert sane, f"an error of {found.out:.2e} in {size:.2e} would pass, one of {found.lse:.2e} in {size_lse:.2e}"
    return found


def numbers_of(args: DecodeArguments, dtype: torch.dtype = torch.float64) -> DecodeArguments:
    """All numbers in ``dtype``, coded ones decoded: exactly in float64, which a coded cache is compared with."""
    latent = decode_latent(args.latent, args.latent_scale, dtype)
    query, rope, k_rope = (numbers.to(dtype) for numbers in (args.q_latent, args.q_rope, args.k_rope))
    return dataclasses.replace(args, q_latent=query, q_rope=rope, latent=latent, k_rope=k_rope, latent_scale=None)


def plain(args: DecodeArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention as anybody would write it, in the query's dtype: what that dtype costs."""
    out, lse = absorbed_decode_reference(numbers_of(args, args.q_latent.dtype), args.q_latent.dtype)
    return out.double(), lse.double()


def logit_rounding(args: DecodeArguments) -> float:
    """One float32 rounding of the largest sum that a logit can be: eps · scale · |q| · |k| (Cauchy-Schwarz).

    The largest |k| of a token that is stored: what lies past the end is garbage, and would make any bound as large.
    """
    query = torch.cat((args.q_latent, args.q_rope), -1).double().norm(dim=-1).max()
    key = max(_largest_key(args, b) for b in range(args.q_latent.shape[0]))
    return float(torch.finfo(torch.float32).eps * args.scale * query * key)


def _largest_key(args: DecodeArguments, sequence: int) -> float:
    length = args.kv_len if args.kv_lens is None else min(args.kv_len, int(args.kv_lens[sequence]))
    if length == 0:
        return 0.0
    codes, rope = (take_tokens(each, sequence, args.block_table, length) for each in (args.latent, args.k_rope))
    scale = scale_of(args.latent_scale, sequence, args.block_table, length)
    latent = decode_latent(codes, scale, torch.float64)
    return float(torch.cat((latent, rope.double()), -1).norm(dim=-1).max())


def _largest(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth.double()).abs().max()) if truth.numel() else 0.0
