"""Masks for flex attention, which takes blocks and a rule where others take a tensor.

Only the expanded form needs them. transformers' rules are kept beside the boolean mask that the absorbed form reads:
a rule that computes with positions compiles where one that looks up a tensor may not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import flex_attention_mask, sdpa_mask

from mla_convert.kernels.tracing import being_traced

#: The attribute of a mask that makes it again in blocks.
_AGAIN = "_mla_in_blocks"


def boolean_mask(*args: Any, **given: Any) -> Tensor | None:
    """transformers' ``sdpa_mask``, from which :func:`in_blocks` can make what ``flex_attention_mask`` gives."""
    mask = sdpa_mask(*args, **given)
    if mask is not None and not being_traced():
        # Once for all layers.
        setattr(mask, _AGAIN, functools.cache(functools.partial(flex_attention_mask, *args, **given)))
    return mask


def in_blocks(mask: Tensor | None, query: Tensor, kv_len: int, *, ahead: bool) -> Any:
    """``mask`` as flex attention takes it: a ``BlockMask``, numbers [B,1,S,T] that it adds, or None for everything.

    Without a mask S tokens see causally from the upper left, or, where ``ahead``, everything.
    """
    batch, _, q_len, _ = query.shape
    if mask is None:
        return None if ahead or q_len == 1 else _blocks(_causal, None, query, kv_len)
    again = getattr(mask, _AGAIN, None)
    if again is not None and mask.shape[-1] == kv_len:
        return again()
    # Flex attention looks up an entry for each sequence, without looking whether there is one.
    mask = mask[..., :kv_len].expand(batch, -1, -1, -1)
    return _blocks(_looked_up(mask), batch, query, kv_len) if mask.dtype == torch.bool else mask


def _blocks(rule: Callable[..., Tensor], batch: int | None, query: Tensor, kv_len: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(rule, batch, None, query.shape[2], kv_len, device=query.device)


def _causal(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _looked_up(mask: Tensor) -> Callable[..., Tensor]:
    def seen(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b, 0, q, k]

    return seen
