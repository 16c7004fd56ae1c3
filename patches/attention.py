"""The attention function of patched models, and the hooks that decide for each call.

Three things are set on a patched attention module *instance*: ``expand_kv`` returns its arguments, so
that the attention function receives latents; a forward pre-hook decides whether the call runs
expanded or absorbed; a forward hook ends the call. The module's own forward is never rewritten.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mla_convert.errors import PatchError
from mla_convert.kernels.tracing import being_traced
from mla_convert.patches.cache import adopt, check_model, handing_layer
from mla_convert.patches.call import Call, Handover
from mla_convert.patches.layer import AbsorbedLayer, layer_of, wants_gradients
from mla_convert.patches.masks import (
    additive,
    representable,
    without_empty_end,
)
from mla_convert.patches.seeing import seen_by, with_indices
from mla_convert.patches.selection import fold, selected

logger = logging.getLogger(__name__)

#: Originals whose masks are boolean or absent when this package makes them.
_SDPA_MASKED = ("eager", "sdpa", "flex_attention")
#: Of those, the ones that add their mask, and take none to mean that everything is visible.
_ADDING = ("eager", "flex_attention")
_KNOWN_ORIGINALS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")

#: The original attention that each of our names stands for.
_ORIGINALS: dict[str, str] = {}

#: Begins the name of every attention implementation that patched models use.
PREFIX = "mla_latent_over_"
#: Keywords that models pass on and that do not change attention.
HARMLESS = frozenset(
    "cache_position dropout input_ids inputs_embeds kwargs labels layer_idx logits_to_keep num_items_in_batch "
    "output_attentions output_hidden_states output_router_logits position_embeddings position_ids return_dict "
    "token_type_ids use_cache".split()
)
#: Keywords that change attention, and that the absorbed form takes.
USED = frozenset(("indices", "s_aux", "sliding_window"))
#: Keywords under which only the original function knows what to do.
EXPANDED_ONLY = frozenset(
    "cu_seq_lens_k cu_seq_lens_q is_causal max_length_k max_length_q position_bias softcap".split()
)


def registered_name(original: str) -> str:
    """The name under which patched models with attention ``original`` look up their function; registers it.

    The name avoids "flash" and "sdpa": transformers draws conclusions from those.
    """
    name = PREFIX + original.replace("flash", "fl").replace("sdpa", "sd").replace("/", "_")
    _ORIGINALS[name] = original
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if original not in _SDPA_MASKED and original not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise PatchError(
                f"the model's attention implementation {original!r} has no mask function registered with transformers, "
                'so what its tokens may see is not known here: call model.set_attn_implementation("sdpa") first'
            )
        mask = sdpa_mask if original in _SDPA_MASKED else ALL_MASK_ATTENTION_FUNCTIONS[original]
        AttentionInterface.register(name, functools.partial(latent_attention, original=original))
        AttentionMaskInterface.register(name, mask)
    return name


def passed_through(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for a patched module's ``expand_kv``: latents reach the attention function as they are."""
    return kv_nope, k_rot


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    original: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: expanded or absorbed, as the pre-hook decided.

    ``query`` is [B,H,S,N+R]; ``key`` and ``value`` are the cached [B,1,T,C] and [B,1,T,R]. Returns
    [B,S,H,V] (or [B,S,H,C], where the value side is fused and absorbed) and the attention weights, if
    the original gave any.
    """
    layer = layer_of(module)
    call = None if layer is None else layer.slot.get()
    chooses = kwargs.get("indices") is not None or (call is not None and call.selection is not None)
    if call is not None and call.expands_capacity and original in _SDPA_MASKED and not chooses:
        key, value, attention_mask = without_empty_end(key, value, attention_mask, query.shape[2])
    run = functools.partial(
        _run_original, original, module, query, mask=attention_mask, scaling=scaling, dropout=dropout, kwargs=kwargs
    )
    if layer is None:  # another model, unpatched, that shares its config with a patched one
        return run(key, value)
    _check_known(layer.name, module, original, kwargs)
    if call is None or not call.absorbed:
        return run(*_expand(module, key, value), selection=None if call is None else call.selection)
    scale = layer.geometry.scale if scaling is None else scaling
    seen = seen_by(query, key.shape[2], attention_mask, call, kwargs, lower_right="flash" in original)
    return layer.attend(query, key[:, 0], value[:, 0], scale, call, seen), None


def _check_known(name: str, module: nn.Module, original: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that may mean something, and that would be ignored in one form or in both."""
    unknown = [k for k, v in kwargs.items() if v is not None and k not in HARMLESS | USED | EXPANDED_ONLY]
    # A layer's own window is in its mask; one that a caller gives is not, and these originals read masks only.
    window = kwargs.get("sliding_window")
    if original in _SDPA_MASKED and window is not None and window != getattr(module, "sliding_window", None):
        unknown.append("sliding_window")
    if unknown:
        raise PatchError(
            f"{name}: the attention function was called with {', '.join(sorted(unknown))}, which is not known here; "
            "call the model without, or unpatch it and report the model"
        )


def _expand(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, by the model's own function, which the instance hides."""
    keys, values = type(module).expand_kv(module, key, value)
    return keys, values


def _run_original(
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
    function = _original_function(original, module)
    if kwargs.get("indices") is not None:
        mask, kwargs = with_indices(mask, query, key, kwargs["indices"]), kwargs | {"indices": None}
    if selection is not None:
        mask = fold(None, selection, key.shape[2])
    if original == "sdpa" and kwargs.get("s_aux") is not None:
        raise PatchError('attention sinks are ignored by "sdpa": call model.set_attn_implementation("eager") first')
    width = value.shape[-1]
    if original in _ADDING and (mask is None or isinstance(mask, Tensor)):
        mask = additive(mask, query, key.shape[2])
    elif original == "sdpa" and query.device.type == "cpu" and width < key.shape[-1]:
        # PyTorch's CPU flash kernel wants one width for keys and values; without it memory grows quadratically.
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    out, weights = function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return out[..., :width], weights


def _original_function(original: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if original != "eager":
        return ALL_ATTENTION_FUNCTIONS[original]  # type: ignore[no-any-return]
    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[no-any-return]


def begin_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: adopt the cache, follow changed weights, and decide how this call runs."""
    layer = layer_of(module)
    assert layer is not None
    present, tracing = module.config._attn_implementation, being_traced()
    if not present.startswith(PREFIX):
        raise PatchError(
            f"the attention implementation was changed to {present!r} while the model is "
            "patched: unpatch it, set the implementation, and patch it again"
        )
    given = dict(zip(layer.positional, args, strict=False)) | kwargs
    hidden = given["hidden_states"]
    cache = given.get("cache", given.get("past_key_values"))
    check_model(cache, layer.model_layers)
    form = layer.options.cache_format
    if cache is not None and form is not None and not getattr(cache, "offloading", False):
        adopt(cache, module.layer_idx, form)
    weights_asked = _wants_attention_weights(module, given)
    if weights_asked and not tracing:
        layer.options.say_once(
            "output_attentions: calls that ask for attention weights run expanded, through the model's original "
            "attention; the absorbed form has none"
        )
    possible = not weights_asked and not wants_gradients(module, hidden) and not _needs_original(module, given)
    if possible and not tracing:
        possible = not layer.needs_projections(module)
    stored = handing_layer(cache, module.layer_idx)
    absorbed = possible and (
        (stored is not None and stored.only_absorbed)
        or (_cheaper_absorbed(module, layer, hidden.shape[-2], cache, given) and not _packed(module, given))
    )
    prefill = hidden.shape[-2] > 1
    if not tracing and (absorbed or (possible and prefill and hidden.device.type != "cpu")):
        layer.follow_weights(module, decoding=not prefill)
    call = Call(absorbed, capacity=bool(getattr(cache, "is_compileable", False)))
    if absorbed and stored is not None:
        call.stored = stored
        call.handover = stored.handover = Handover()
    layer.slot.set(call)


def _wants_attention_weights(module: nn.Module, given: dict[str, Any]) -> bool:
    return bool(given.get("output_attentions") or getattr(module.config, "output_attentions", False))


def _needs_original(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether the call asks for something that only the original attention function does."""
    if module.training and getattr(module, "attention_dropout", False):
        return True
    return any(given.get(name) is not None for name in EXPANDED_ONLY)


def _packed(module: Any, given: dict[str, Any]) -> bool:
    """Whether positions begin anew inside the call, and the original takes that, without a mask, to part sequences.

    That is how transformers' flash attention tells packed sequences, in a batch of one.
    """
    positions = given.get("position_ids")
    flash = "flash" in _ORIGINALS[module.config._attn_implementation]
    if not flash or given.get("attention_mask") is not None or positions is None:
        return False
    if positions.shape[-2] != 1 or positions.shape[-1] == 1:
        return False
    return being_traced() or bool((positions.diff(dim=-1) != 1).any())


def _cheaper_absorbed(module: nn.Module, layer: AbsorbedLayer, q_len: int, cache: Any, given: dict[str, Any]) -> bool:
    """Whether latent space costs less than expanding, and can express the mask."""
    kv_len, mask = q_len, given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4:
        kv_len = mask.shape[-1]
    elif cache is not None and q_len > 1 and not (mask is None and getattr(cache, "is_compileable", False)):
        kv_len = cache.get_mask_sizes(q_len, module.layer_idx)[0]
    cheaper = layer.prefers_absorbed(q_len, kv_len, selected(module, given))
    return cheaper and representable(mask, layer.geometry.num_heads)


def end_call(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, called even after an exception: nothing of a call outlives it."""
    layer = layer_of(module)
    if layer is not None:
        if call := layer.slot.get():
            call.close()
        layer.slot.set(None)
        layer.release()


for _name in _KNOWN_ORIGINALS:
    registered_name(_name)
