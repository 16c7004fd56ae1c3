"""Arguments that models hand to their attention function: which of them matter, and which are refused.

None is handed on to a function that would ignore it: a model that is asked for something gets it or says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from mla_convert.errors import PatchError

#: Keywords that models pass on and that do not change attention.
HARMLESS = frozenset(
    "cache_position dropout input_ids inputs_embeds kwargs labels layer_idx logits_to_keep num_items_in_batch "
    "output_attentions output_hidden_states output_router_logits position_embeddings position_ids return_dict "
    "token_type_ids use_cache".split()
)
#: Keywords that change attention, and that the absorbed form takes.
USED = frozenset(("indices", "s_aux", "sliding_window"))
#: Keywords under which only the original function knows what to do, where it has them.
EXPANDED_ONLY = frozenset("cu_seq_lens_k cu_seq_lens_q max_length_k max_length_q position_bias softcap".split())
#: What parts packed sequences for flash attention, which hands it on to its kernels without naming it.
_PACKING = frozenset(name for name in EXPANDED_ONLY if name.startswith(("cu_seq_lens", "max_length")))
#: Whether tokens see what is behind them alone: masks are made by it, and "sdpa" reads it where there is none.
DIRECTION = "is_causal"

#: Originals whose masks are boolean or absent when this package makes them, and which read nothing else.
MASKED = ("eager", "sdpa", "flex_attention")


def looks_ahead(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for attention in both directions: no mask then means that everything is visible."""
    return kwargs.get(DIRECTION) is False


def needs_original(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether the call asks for something that only the original attention function does."""
    if module.training and getattr(module, "attention_dropout", False):
        return True
    causal = given.get(DIRECTION)
    if not (getattr(module, DIRECTION, True) if causal is None else causal):
        return True
    return any(given.get(name) is not None for name in EXPANDED_ONLY)


def check_known(
    name: str, module: nn.Module, original: str, function: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    """Refuse arguments that may mean something, and that would be ignored in one form or in both.

    Args:
        name: of the attention module, for the message.
        function: the module's attention function ``original``.

    Raises:
        PatchError: naming them.
    """
    given = {key: value for key, value in kwargs.items() if value is not None and key not in HARMLESS}
    unknown = sorted(key for key in given if key not in USED | EXPANDED_ONLY | {DIRECTION})
    if unknown:
        raise PatchError(
            f"{name}: the attention function was called with {', '.join(unknown)}, which is not known here; "
            "call the model without, or unpatch it and report the model"
        )
    ignored = sorted(key for key in given if not _takes(module, original, function, key, given[key]))
    if ignored:
        raise PatchError(
            f"{name}: the attention function was called with {', '.join(ignored)}, which this layer's {original!r} "
            "attention ignores: call the model without, or set an attention implementation that takes it before "
            "patching"
        )


def _takes(module: nn.Module, original: str, function: Callable[..., Any], key: str, value: Any) -> bool:
    """Whether an argument counts in the original attention of ``module``."""
    if key == DIRECTION or (key in _PACKING and "flash" in original):
        return True
    if key == "indices":  # handed on as a mask
        return hasattr(module, "indexer")
    if key == "sliding_window":
        # A layer's own window is in its mask; one that a caller gives is not, and some originals read masks only.
        return original not in MASKED or value == getattr(module, "sliding_window", None)
    if key == "s_aux" and original == "eager":  # the modelling file's own function has them from the module
        return hasattr(module, "sinks")
    return key in inspect.signature(function).parameters
