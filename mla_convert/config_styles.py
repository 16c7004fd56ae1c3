"""Configs in the styles in which they are found, made into today's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from mla_convert import native
from mla_convert.config_values import positive
from mla_convert.errors import UnsupportedModelError

#: Where wrappers (vision, audio) keep their text model's config.
INNER = ("text_config", "language_config")
_QUANTIZATION = {"quantization_config", "compression_config"}


def normalize_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config in today's style, from any of the three styles in use.

    Taken are DeepSeek's own keys (see :func:`mla_convert.native.hf_config`), ``rope_scaling`` with ``rope_theta``, and
    ``rope_parameters``. The result has ``rope_parameters`` (with ``rope_type`` and ``rope_theta``) unless the config
    says nothing of rotation, ``dtype`` without ``torch.`` before it, and everything else as it was. In a wrapper, the
    text model's config is what is so changed, and its ``dtype`` and quantization stand for the whole where there is no
    other. ``raw`` is left alone.
    """
    if native.is_native_config(raw):
        return native.hf_config(raw)
    config = dict(raw)
    torch_dtype = config.pop("torch_dtype", None)
    dtype = config.get("dtype") or torch_dtype
    wrapped = [key for key in INNER if isinstance(config.get(key), Mapping) and "kv_lora_rank" in config[key]]
    for key in wrapped:
        inner = config[key] = normalize_config(config[key])
        dtype = dtype or inner.get("dtype")
        for name in _QUANTIZATION & inner.keys():
            config.setdefault(name, inner.pop(name))
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if not wrapped:
        rope = _rope_parameters(config)
        for key in ("rope_scaling", "rope_theta", "rope_parameters"):
            config.pop(key, None)
        if rope is not None:
            config["rope_parameters"] = rope
    return config


def without_quantization(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config, and of the text model's in a wrapper, for the same weights in plain numbers."""
    config = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _QUANTIZATION}
    for key in INNER:
        if isinstance(config.get(key), Mapping):
            config[key] = without_quantization(config[key])
    return config


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = [_one_rope_style(config, key) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if len(found) == 2 and found[0] != found[1]:
        raise UnsupportedModelError(
            f"the config has both rope_scaling ({found[0]}) and rope_parameters ({found[1]}), and they differ; "
            "transformers would use rope_scaling: remove the one that is wrong"
        )
    if found:
        return found[0]
    theta = config.get("rope_theta")
    return {"rope_type": "default", "rope_theta": theta} if theta else None


def _one_rope_style(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    given, types = config[key], config.get("layer_types")
    if isinstance(given, Mapping) and isinstance(types, list | tuple) and all(name in types for name in given):
        return dict(given)  # one set for each type of layer
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"the config gives {key} = {given!r}; supported is one set of parameters for all layers, such as "
            "{'rope_type': 'yarn', 'factor': 40, …}, or one for each of the config's layer_types"
        )
    # Sarvam's "deepseek_yarn" is YaRN under another name.
    kind = str(given.get("rope_type", given.get("type", "default"))).replace("deepseek_yarn", "yarn")
    rope = {name: value for name, value in given.items() if name != "type"} | {"rope_type": kind}
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    positive(rope, "rope_theta")
    return rope
