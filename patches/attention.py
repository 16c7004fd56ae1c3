"""The attention function of patched models, and the hooks that decide for each call.

Three things are set on a patched attention module *instance*: ``expand_kv`` returns its arguments, so
that the attention function receives latents; a forward pre-hook decides whether the call runs
expanded or absorbed; a forward hook ends the call. The module's own forward is never rewritten.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor, nn

from mla_convert.errors import PatchError
from mla_convert.kernels.tracing import being_traced
from mla_convert.patches.cache import adopt, check_model, handing_layer
from mla_convert.patches.call import Call, Handover
from mla_convert.patches.keywords import MASKED, check_known, looks_ahead, needs_original
from mla_convert.patches.layer import AbsorbedLayer, layer_of, wants_gradients
from mla_convert.patches.masks import end_of, representable, without_empty_end
from mla_convert.patches.originals import KNOWN, PREFIX, function_of, original_of, register, run_original
from mla_convert.patches.seeing import seen_by
from mla_convert.patches.selection import selected

logger = logging.getLogger(__name__)


def registered_name(original: str) -> str:
    """The name under which patched models with attention ``original`` look up their function; registers it."""
    return register(original, latent_attention)


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
    whole = kwargs.get("position_bias") is not None or (attention_mask is None and looks_ahead(kwargs))
    if call is not None and call.expands_capacity and original in MASKED and not whole:
        key, value, attention_mask = without_empty_end(key, value, attention_mask, query.shape[2], call.selection)
    run = functools.partial(
        run_original, original, module, query, mask=attention_mask, scaling=scaling, dropout=dropout, kwargs=kwargs
    )
    if layer is None:  # another model, unpatched, that shares its config with a patched one
        return run(key, value)
    check_known(layer.name, module, original, function_of(original, module), kwargs)
    if call is None or not call.absorbed:
        return run(*_expand(module, key, value), selection=None if call is None else call.selection)
    scale = layer.geometry.scale if scaling is None else scaling
    seen = seen_by(query, key.shape[2], attention_mask, call, kwargs, lower_right="flash" in original)
    return layer.attend(query, key[:, 0], value[:, 0], scale, call, seen), None


def _expand(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, by the model's own function, which the instance hides."""
    keys, values = type(module).expand_kv(module, key, value)
    return keys, values


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
    possible = not weights_asked and not wants_gradients(module, hidden) and not needs_original(module, given)
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
    # Attention weights are asked for over all that the cache has room for, as the original gives them.
    call = Call(absorbed, capacity=bool(getattr(cache, "is_compileable", False)) and not weights_asked)
    if absorbed and stored is not None:
        call.stored = stored
        call.handover = stored.handover = Handover()
    layer.slot.set(call)


def _wants_attention_weights(module: nn.Module, given: dict[str, Any]) -> bool:
    return bool(given.get("output_attentions") or getattr(module.config, "output_attentions", False))


def _packed(module: Any, given: dict[str, Any]) -> bool:
    """Whether positions begin anew inside the call, and the original takes that, without a mask, to part sequences.

    That is how transformers' flash attention tells packed sequences, in a batch of one.
    """
    positions = given.get("position_ids")
    flash = "flash" in original_of(module.config._attn_implementation)
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
        if q_len > 1 and getattr(cache, "is_compileable", False):
            kv_len = end_of(mask, kv_len)
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


for _name in KNOWN:
    registered_name(_name)
