"""What a latent cache takes: new tokens that are of its kind, and lengths that can be."""

from __future__ import annotations

from torch import Tensor

from mla_convert.errors import ArgumentError, MismatchError, UsageError
from mla_convert.patches.cache_formats import CacheFormat
from mla_convert.patches.cache_rows import RowLayout


def refuse_length(tokens_to_remove: int) -> None:
    """ArgumentError for what ``crop`` does not take: a positive number, or one that is not whole."""
    if tokens_to_remove > 0 or tokens_to_remove != int(tokens_to_remove):
        raise ArgumentError(f"crop takes minus the number of tokens to remove, found {tokens_to_remove}")


def fitting_layout(
    key_states: Tensor,
    value_states: Tensor,
    form: CacheFormat,
    expected: tuple[int, int] | None,
    stored: tuple[int, RowLayout] | None,
) -> RowLayout:
    """How new tokens are laid out in rows: as those that are stored, of which there are so many sequences.

    Raises:
        UsageError: when they are not latents, or differ in batch, width or dtype from what is stored or expected.
    """
    if key_states.shape[1] != 1 or value_states.shape[:3] != key_states.shape[:3]:
        raise UsageError(
            f"LatentCache stores [B, 1, S, C] latents and [B, 1, S, R] rotary keys; found "
            f"{list(key_states.shape)} and {list(value_states.shape)}. Use DynamicCache for models without latents."
        )
    batch, found = key_states.shape[0], (key_states.shape[3], value_states.shape[3])
    if expected not in (None, found):
        raise UsageError(
            f"this LatentCache was made for a model with (C, R) = {expected}, the new tokens have {found}: "
            "make it from the config of the model it is used with"
        )
    if stored is None:
        return RowLayout(form, *found, key_states.dtype)
    layout = stored[1]
    held = (stored[0], layout.latent, layout.rope, layout.dtype)
    if held != (batch, *found, key_states.dtype):
        raise UsageError(
            f"this LatentCache holds (batch, C, R, dtype) = {held}, the new tokens have "
            f"{(batch, *found, key_states.dtype)}: a cache belongs to one model and one batch"
        )
    return layout


def check_room(length: int, tokens: int, capacity: int | None) -> None:
    """UsageError where ``length`` tokens are stored, and ``tokens`` would be more than a fixed capacity."""
    if capacity is not None and tokens > capacity:
        raise UsageError(
            f"this LatentCache holds {length} of {capacity} tokens, its fixed capacity, and was given "
            f"{tokens - length} more: make it larger, or leave capacity out and it grows"
        )


def check_widths(layout: RowLayout | None, expected: tuple[int, int] | None, where: str) -> None:
    """MismatchError where what is stored, ``where`` it says, is of another model than expected."""
    if layout is not None and expected not in (None, (layout.latent, layout.rope)):
        raise MismatchError(
            f"{where} holds latents with (C, R) = {(layout.latent, layout.rope)}, the model's are {expected}: it was "
            "saved with another model"
        )
