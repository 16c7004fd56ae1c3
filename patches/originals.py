"""The attention functions that models had: the names under which patched models stand over them, and their calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.errors import PatchError
from mla_convert.patches.blocks import boolean_mask, in_blocks
from mla_convert.patches.keywords import MASKED, looks_ahead
from mla_convert.patches.masks import additive
from mla_convert.patches.seeing import with_indices
from mla_convert.patches.selection import fold

#: Those that every transformers has.
KNOWN = (*MASKED, "flash_attention_2", "flash_attention_3", "flash_attention_4")
#: Begins the name of every attention implementation that patched models use.
PREFIX = "mla_latent_over_"

#: The original attention that each of our names stands for.
_ORIGINALS: dict[str, str] = {}

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def register(original: str, function: Attention) -> str:
    """Register ``function`` as the attention of patched models whose own is ``original``; its name.

    The name avoids "flash" and "sdpa": transformers draws conclusions from those.

    Raises:
        PatchError: where transformers has no mask function for ``original``.
    """
    name = PREFIX + original.replace("flash", "fl").replace("sdpa", "sd").replace("/", "_")
    _ORIGINALS[name] = original
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if original not in MASKED and original not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise PatchError(
                f"the model's attention implementation {original!r} has no mask function registered with transformers, "
                'so what its tokens may see is not known here: call model.set_attn_implementation("sdpa") first'
            )
        mask = sdpa_mask if original in MASKED else ALL_MASK_ATTENTION_FUNCTIONS[original]
        if original == "flex_attention":
            mask = boolean_mask
        AttentionInterface.register(name, functools.partial(function, original=original))
        AttentionMaskInterface.register(name, mask)
    return name


def original_of(name: str) -> str:
    """The attention implementation that one of our names stands for."""
    return _ORIGINALS[name]


def function_of(original: str, module: nn.Module) -> Attention:
    """A module's attention function ``original``."""
    if original != "eager":
        return ALL_ATTENTION_FUNCTIONS[original]  # type: ignore[no-any-return]
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]


def run_original(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
    selection: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The model's original attention function, with the mask in the form it takes, positions chosen included."""
    kv_len, width, ahead = key.shape[2], value.shape[-1], looks_ahead(kwargs)
    if kwargs.get("indices") is not None:
        mask, kwargs = with_indices(mask, query, key, kwargs["indices"], ahead=ahead), kwargs | {"indices": None}
    if selection is not None:
        mask = fold(None, selection, kv_len)
    if mask is None or isinstance(mask, Tensor):
        if original == "eager":
            mask = additive(mask, query, kv_len, ahead=ahead)
        elif original == "flex_attention":
            mask = in_blocks(mask, query, kv_len, ahead=ahead)
    if original == "sdpa" and query.device.type == "cpu" and width < key.shape[-1]:
        # PyTorch's CPU flash kernel wants one width for keys and values; without it memory grows quadratically.
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    out, weights = function_of(original, module)(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return out[..., :width], weights
