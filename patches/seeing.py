"""What the new tokens of a call see: the mask, and the arguments that restrict it or add to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_convert.errors import PatchError
from mla_convert.patches.call import Call
from mla_convert.patches.layer import Seen
from mla_convert.patches.masks import as_bool, causal, end_of, end_of_choice, restricted, visibility
from mla_convert.patches.selection import fold


def seen_by(query: Tensor, kv_len: int, mask: Any, call: Call, kwargs: dict[str, Any], *, lower_right: bool) -> Seen:
    """What the new tokens see, from the mask and the arguments that restrict it further."""
    batch, _, q_len, _ = query.shape
    sinks, window, indices = kwargs.get("s_aux"), kwargs.get("sliding_window"), kwargs.get("indices")
    if window is not None and kv_len > window and (mask is None or mask.dim() != 4):
        raise PatchError(
            f"sliding_window={window} was given with no mask that holds it ({kv_len} tokens are cached): patch "
            "with prefill_threshold=0 and report the model"
        )
    if call.selection is not None:
        indices, mask = call.selection, None
    if call.capacity:
        kv_len = end_of(mask, kv_len) if call.selection is None else end_of_choice(call.selection, kv_len)
    if indices is None:
        return Seen(
            visibility(mask, batch, q_len, kv_len, capacity=call.capacity, lower_right=lower_right), sinks=sinks
        )
    if call.selection is None and mask is None:
        mask = causal(q_len, kv_len, query.device)
    if indices.shape[-1] >= kv_len:  # reading everything is no more than gathering, and needs no copy
        mask, indices = fold(mask, indices, kv_len), None
    if mask is not None and call.capacity:  # a kernel then leaves alone what was chosen past the end
        return Seen(visibility(mask, batch, q_len, kv_len, capacity=True), indices, sinks)
    by_mask = None if mask is None else as_bool(mask, batch, q_len, kv_len)
    return Seen(restricted(by_mask, batch, q_len, kv_len, query.device), indices, sinks)


def with_indices(mask: Any, query: Tensor, key: Tensor, indices: Tensor, *, ahead: bool = False) -> Tensor:
    """The mask of an expanded call, restricted to ``indices`` [B,S,K].

    No mask means causal, or with ``ahead`` that everything is visible.

    Raises:
        PatchError: where the mask is in a form that cannot be restricted.
    """
    if mask is None:
        if ahead:
            return fold(None, indices, key.shape[2])
        mask = causal(query.shape[2], key.shape[2], query.device)
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise PatchError(
            f"an indexer chose positions for attention whose mask is {type(mask)}; "
            'call model.set_attn_implementation("sdpa") before patching'
        )
    return fold(mask, indices, key.shape[2])
