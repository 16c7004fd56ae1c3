"""Joining attention over parts of a history by their log-sum-exp (natural logarithm throughout)."""

from __future__ import annotations

import torch


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
    """
    return merge_parts(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))


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
