"""Which layers of a model have MLA, and what differs from layer to layer: one rule a kind of model.

A rule takes the text model's config and gives a :class:`Place` for each MLA module. Where a config is
silent the rule says what transformers' config class would (the defaults stand beside each rule).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mla_convert.config_values import layer_count, one_per_layer, whole
from mla_convert.errors import UnsupportedModelError

_NOTHING: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Place:
    """One MLA module: its number in the cache, where its names stand, and the config values of its own.

    ``index`` is transformers' ``layer_idx``, ``layer`` the number of its decoder layer, ``attention`` its number within
    that. ``own_latent`` is False where the layer attends to another layer's latents and makes none.
    """

    index: int
    layer: int
    attention: int = 0
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own_latent: bool = True


Schedule = Callable[[Mapping[str, Any]], Iterable[Place]]


def every_layer(config: Mapping[str, Any]) -> Iterable[Place]:
    """One in each layer, all alike."""
    return (Place(index, index) for index in range(layer_count(config)))


def two_a_layer(config: Mapping[str, Any]) -> Iterable[Place]:
    """Two in each of ``num_layers`` layers (LongCat-Flash)."""
    return (Place(index, index // 2, index % 2) for index in range(2 * layer_count(config, "num_layers")))


def kimi_linear(config: Mapping[str, Any]) -> Iterable[Place]:
    """The full-attention layers: ``layer_types``, ``linear_attn_config`` (counted from 1), or every fourth but the
    first."""
    linear = config.get("linear_attn_config") or {}
    full = linear.get("full_attn_layers") if isinstance(linear, Mapping) and "kda_layers" in linear else None
    if full is not None:
        return _chosen(config, lambda index: index + 1 in full)
    return _chosen(config, lambda index: index > 0 and index % 4 == 0)


def last_of_group(config: Mapping[str, Any]) -> Iterable[Place]:
    """The full-attention layers, the last of every ``layer_group_size`` (6), of Bailing's hybrids."""
    size = whole({"layer_group_size": 6, **config}, "layer_group_size")
    return _chosen(config, lambda index: (index + 1) % size == 0)


def every_fourth(config: Mapping[str, Any]) -> Iterable[Place]:
    """The attention layers, the last of every four, of GLM-5.3-Flash."""
    return _chosen(config, lambda index: index % 4 == 3)


def _chosen(config: Mapping[str, Any], by_default: Callable[[int], bool]) -> Iterable[Place]:
    count = layer_count(config)
    types = one_per_layer(config, "layer_types", count)
    for index in range(count):
        if by_default(index) if types is None else types[index] in ("full_attention", "indexed_attention"):
            yield Place(index, index)


#: What Dots3-Note's sliding layers have where the config does not say (``swa_…`` in published checkpoints).
_SLIDING = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


def sliding_apart(config: Mapping[str, Any]) -> Iterable[Place]:
    """Sliding layers with dimensions of their own (Dots3-Note): ``per_layer_config``, or ``swa_…`` keys."""
    count = layer_count(config)
    types = one_per_layer(config, "layer_types", count)
    listed = config.get("per_layer_config")
    sliding = {key: config.get(f"swa_{key}", value) for key, value in _SLIDING.items()}
    rope = config.get("swa_qk_rope_head_dim")
    sliding["qk_rope_head_dim"] = rope if rope is not None else sliding["head_dim"] - sliding["qk_nope_head_dim"]
    for index in range(count):
        if isinstance(listed, Mapping):
            changes = listed.get(str(index), listed.get(index)) or _NOTHING
            if not isinstance(changes, Mapping):
                raise UnsupportedModelError(
                    f"the config's per_layer_config gives {changes!r:.80} for layer {index}; needed is an object: take "
                    "the config.json that belongs to the checkpoint"
                )
        elif types is None:
            slides = bool(config.get("use_sliding_window", True)) and index >= 2 and index % 4 != 1
            changes = sliding if slides else _NOTHING
        else:
            changes = sliding if types[index] == "sliding_attention" else _NOTHING
        yield Place(index, index, changes=changes)


def shared_latents(config: Mapping[str, Any]) -> Iterable[Place]:
    """Layers that use an earlier one's latents, and layers without rotation, whose width is all content.

    ``kv_source_layers`` (each its own) and ``no_rope_layers`` (0 at every fourth) of Mistral Large 4.
    """
    count = layer_count(config)
    sources = one_per_layer(config, "kv_source_layers", count) or range(count)
    rotated = one_per_layer(config, "no_rope_layers", count)
    interval = whole({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
    nope, rope = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim", least=0)
    still = {"qk_nope_head_dim": nope + rope, "qk_rope_head_dim": 0}
    for index in range(count):
        if sources[index] not in range(index + 1):
            raise UnsupportedModelError(
                f"the config's kv_source_layers give {sources[index]!r} for layer {index}; needed is the number of an "
                "earlier layer, or its own: take the config.json that belongs to the checkpoint"
            )
        rotates = (index + 1) % interval != 0 if rotated is None else bool(rotated[index])
        own = sources[index] == index
        yield Place(index, index, changes=_NOTHING if rotates else still, own_latent=own)
