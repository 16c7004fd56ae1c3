"""What attention masks mean, and turning one form into another.

transformers hands an attention function one of: nothing, a boolean [B,1,S,T] (True attends), an
additive float [B,1,S,T], or, for flash attention, the padding mask [B,T]. Nothing means: with one
new token, everything is visible; with S = T, causal; with 1 < S < T (the first prefill into a
``StaticCache``) the first S keys, causal from the upper left. Flash attention aligns to the lower
right instead.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mla_convert.kernels.tracing import being_traced


@dataclasses.dataclass(frozen=True)
class Visibility:
    """What the new tokens may see, as ``absorbed_decode`` takes it.

    Attributes:
        stop: cached positions that count; the rest of the cache is left out.
        mask: bool [B,S,stop], or None.
        kv_lens: int64 [B], or None for ``stop``.
    """

    stop: int
    mask: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None


def representable(mask: Any, heads: int) -> bool:
    """Whether the absorbed kernel can express ``mask``: one pattern for all heads, and attend or not.

    A float mask is read (a synchronisation on an accelerator) unless code is being compiled, where it
    is taken for a bias.
    """
    if mask is None:
        return True
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return False
    if mask.dim() == 2:
        return True
    if mask.shape[1] != 1 and heads != 1:
        return False
    if mask.dtype == torch.bool:
        return True
    if not mask.is_floating_point() or being_traced():
        return False
    return bool(((mask == 0) | _hidden(mask)).all())


def _hidden(mask: torch.Tensor) -> torch.Tensor:
    """Where an additive mask hides: −inf or the dtype's lowest number (or half of it, after a cast)."""
    return mask <= torch.finfo(mask.dtype).min / 2


def visibility(
    mask: torch.Tensor | None, batch: int, q_len: int, kv_len: int, *, capacity: bool, lower_right: bool = False
) -> Visibility:
    """``mask``, one that :func:`representable` accepts, as arguments of ``absorbed_decode``.

    Args:
        capacity: ``kv_len`` is what the cache can hold, not what it holds (``StaticCache``); where it ends
            is then worked out on the device, without a synchronisation.
        lower_right: None means causal to the lower right (flash attention) if 1 < S < T.
    """
    if mask is None:
        return Visibility(q_len if 1 < q_len < kv_len and not lower_right else kv_len)
    if mask.dim() == 2:
        stop = min(kv_len, mask.shape[1])
        return Visibility(stop, mask[:, None, :stop].to(torch.bool).expand(batch, q_len, stop))
    if capacity:
        seen = as_bool(mask, batch, q_len, kv_len)
        return Visibility(kv_len, seen, _lengths(seen))
    return restricted(as_bool(mask, batch, q_len, kv_len), batch, q_len, kv_len, mask.device)


def restricted(seen: torch.Tensor | None, batch: int, q_len: int, kv_len: int, device: torch.device) -> Visibility:
    """Visibility by ``seen`` [B,S,T] alone, or, without it, of everything (where indices say what is seen)."""
    # One new token sees all that is stored unless the mask hides it; several may see what a causal rule would hide.
    open_end = None if q_len == 1 else torch.full((batch,), kv_len + q_len - 1, device=device)
    return Visibility(kv_len, seen, open_end)


def as_bool(mask: torch.Tensor, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """A mask [B,1,S,≥T] that :func:`representable` accepts as bool [B,S,T], True attends."""
    seen = mask[:, 0] if mask.dtype == torch.bool else ~_hidden(mask[:, 0])
    return seen[..., :kv_len].expand(batch, q_len, -1)


def _lengths(seen: torch.Tensor) -> torch.Tensor:
    """Smallest ``kv_lens`` [B] under which the causal rule hides nothing that ``seen`` [B,S,T] shows."""
    q_len, kv_len = seen.shape[1:]
    after_last = (seen * torch.arange(1, kv_len + 1, device=seen.device)).amax(dim=-1)
    room = torch.arange(q_len - 1, -1, -1, device=seen.device)
    # A token that sees nothing asks for no length.
    return torch.where(after_last > 0, after_last + room, 0).amax(dim=-1)


def causal(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """What no mask means, as bool [1,1,S,T]: one new token sees everything, several from the upper left."""
    ones = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return (ones if q_len == 1 else ones.tril())[None, None]


def without_empty_end(
    key: torch.Tensor, value: torch.Tensor, mask: Any, q_len: int, selection: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """``key`` and ``value`` [B,1,T,·] of a cache that hands out its capacity, up to where the S tokens may see.

    A ``selection`` [B,S,K] stands in for the mask. With neither, S positions count.
    """
    kv_len = key.shape[2]
    if selection is not None:
        stop = end_of_choice(selection, kv_len)
    elif mask is not None:
        stop = end_of(mask, kv_len)
    else:
        stop = q_len if 1 < q_len < kv_len else kv_len
    if stop == kv_len:
        return key, value, mask
    return key[:, :, :stop], value[:, :, :stop], None if mask is None else mask[..., :stop]


def end_of(mask: Any, kv_len: int) -> int:
    """One past the last position that a boolean mask [B,1,S,≥T] shows to any token; T where that is not known.

    The mask is read where that costs no synchronisation, and not in compiled code.
    """
    boolean = isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool
    if not boolean or mask.device.type != "cpu" or being_traced():
        return kv_len
    seen = mask[..., :kv_len].flatten(0, 2).any(dim=0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else kv_len


def end_of_choice(selection: torch.Tensor, kv_len: int) -> int:
    """The same for positions [B,S,K] that alone say what is visible."""
    if selection.device.type != "cpu" or being_traced() or not selection.numel():
        return kv_len
    return min(kv_len, max(1, int(selection.max()) + 1))


def additive(
    mask: torch.Tensor | None, query: torch.Tensor, kv_len: int, *, ahead: bool = False
) -> torch.Tensor | None:
    """``mask`` as numbers to add to the logits; without one, :func:`implied`."""
    mask = implied(query, kv_len, ahead=ahead) if mask is None else mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, lowest)


def implied(query: torch.Tensor, kv_len: int, *, ahead: bool) -> torch.Tensor | None:
    """What no mask means, as bool [1,1,S,T]: causal from the upper left; None where everything is visible."""
    q_len = query.shape[2]
    return None if ahead or q_len == 1 else causal(q_len, kv_len, query.device)
