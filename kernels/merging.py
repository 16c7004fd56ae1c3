"""Joining attention over parts of a history by their log-sum-exp (natural logarithm throughout)."""

from __future__ import annotations

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.arguments import FLOATING
from mla_convert.wording import found


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint parts of a history.

    Args:
        out_a, out_b: [..., C], attention over each part alone.
        lse_a, lse_b: [...], natural log-sum-exp of each part's logits; −inf for an empty part, whose
            ``out`` is then not read.

    Returns:
        (out [..., C] in the dtype of ``out_a``, lse [...]); zeros and −inf where both parts are empty.

    Raises:
        UsageError: shapes, dtypes or devices that do not fit together.
    """
    _check(out_a, lse_a, out_b, lse_b)
    return merge_parts(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"merge: {name} must be a tensor, found {type(tensor).__name__}")
        if tensor.device != out_a.device:
            raise UsageError(f"merge: {name} is on {tensor.device}, out_a on {out_a.device}; move it there")
    if out_a.dtype not in FLOATING or out_a.dim() == 0 or (out_b.shape, out_b.dtype) != (out_a.shape, out_a.dtype):
        raise UsageError(
            f"merge: out_a and out_b must be [..., C] of one shape in one floating dtype, found {found(out_a)} and "
            f"{found(out_b)}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1] or lse.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"merge: {name} must be {list(out_a.shape[:-1])} in float32 (or float64), found {found(lse)}: fewer "
                "bits lose the weights of the parts"
            )


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge` for any number of parts: ``outs`` [parts, ..., C], ``lses`` [parts, ...]."""
    empty = torch.isneginf(lses)
    # Softmax and not exp(lses - lse): far from zero, a rounded log-sum-exp would not make the weights add up to one.
    weights = torch.softmax(lses, dim=0).masked_fill(empty, 0.0)[..., None]
    total = (outs.to(weights.dtype) * weights).masked_fill(empty[..., None], 0.0).sum(dim=0)
    return total.to(outs.dtype), torch.logsumexp(lses, dim=0)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one logit per head that has no value: it takes weight from ``out`` [..., H, C] and joins ``lse`` [..., H].

    ``sinks`` [H] are logits, added to the softmax's denominator as they are (not scaled).
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    kept = torch.exp(lse - total).masked_fill(torch.isneginf(lse), 0.0)
    return (out * kept[..., None]).to(out.dtype), total
