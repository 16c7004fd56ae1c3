"""Sparse attention: positions that an indexer chose for each new token.

An indexer gives ``indices`` [B,S,K], each position once; some may point at masked tokens, or be −1 for
none, so they always go together with the mask. Most families hand them to the attention function. One
makes a mask of them by a method of its attention module; :class:`KeptSelection` stands in for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_convert.kernels.selecting import chosen
from mla_convert.patches.layer import AbsorbedLayer

#: The method by which GLM-5.3-Flash makes a mask of its selection.
METHOD = "build_attention_mask_from_topk"


def fold(mask: Tensor | None, indices: Tensor, kv_len: int) -> Tensor:
    """``mask`` (boolean or additive, [B,1,S,≥T]) restricted to ``indices``; without a mask, the indices alone."""
    seen = chosen(indices, kv_len)[:, None]
    if mask is None:
        return seen
    mask = mask[..., :kv_len]
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def selected(module: nn.Module, given: dict[str, Any]) -> int | None:
    """K, as far as it is known before the indexer runs: an upper bound; None where everything is attended to."""
    earlier = given.get("prev_topk_indices")
    indexer = getattr(module, "indexer", None)
    if indexer is None:
        return None if earlier is None else int(earlier.shape[-1])
    # An indexer over pools adds the tokens of the last, incomplete one.
    return int(indexer.index_topk) + int(getattr(indexer, "index_kpool", 1)) - 1


class KeptSelection:
    """Instead of making a mask of a selection that is complete in itself, keeps it for the attention function."""

    def __init__(self, layer: AbsorbedLayer) -> None:
        self.layer = layer

    def __call__(self, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> None:
        """No mask; the call has the selection."""
        call = self.layer.slot.get()
        assert call is not None
        call.selection = topk_indices
