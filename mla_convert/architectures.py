"""Model families as data: from a config to the geometry and tensor names of each layer.

A family is one row of :data:`FAMILIES`; nothing below branches on a model's name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from mla_convert import native
from mla_convert.errors import UnsupportedModelError
from mla_convert.geometry import MLAGeometry, softmax_scale


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells one model family from another.

    ``prefix`` is where a layer's attention tensors stand, with ``{layer}`` for its number. ``query`` says which query
    paths exist: through a query latent (``"latent"``), straight from the hidden state (``"direct"``), or either, as
    ``q_lora_rank`` says. ``mscale``: YaRN's ``mscale_all_dim`` enters the softmax scale. ``fuse_qk`` and ``fuse_vo``:
    nothing happens between the two projections of that side, so that they may be multiplied in advance.
    """

    model_type: str
    attention_class: str
    aliases: tuple[str, ...] = ()
    prefix: str = "model.layers.{layer}.self_attn"
    query: Literal["latent", "direct", "either"] = "either"
    mscale: bool = True
    fuse_qk: bool = True
    fuse_vo: bool = True


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("deepseek_v2", "DeepseekV2Attention"),
        Family("deepseek_v3", "DeepseekV3Attention"),
    )
}
_MOST_LAYERS = 10_000
# Where wrappers (vision, audio) keep their text model's config.
_INNER = ("text_config", "language_config")
_BY_TYPE = {name: family for family in FAMILIES.values() for name in (family.model_type, *family.aliases)}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One attention layer of a checkpoint: its number, where its tensors stand, and their dimensions."""

    index: int
    prefix: str
    geometry: MLAGeometry
    family: Family

    @property
    def kv_b(self) -> str:
        """Name of W_UK and W_UV, ``[H·(N + V), C]``."""
        return f"{self.prefix}.kv_b_proj.weight"

    @property
    def query(self) -> str:
        """Name of W_UQ and W_QR, ``[H·(N + R), Q]``: ``q_b_proj``, or ``q_proj`` without a query latent."""
        return f"{self.prefix}.{'q_proj' if self.geometry.q_lora_rank is None else 'q_b_proj'}.weight"

    @property
    def o(self) -> str:
        """Name of W_O, ``[D, H·V]``."""
        return f"{self.prefix}.o_proj.weight"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that the layer must have, with its shape."""
        g = self.geometry
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.prefix}.kv_a_proj_with_mqa.weight": (g.latent_width, g.hidden_size),
            f"{self.prefix}.kv_a_layernorm.weight": (g.kv_lora_rank,),
            self.kv_b: g.kv_b_shape,
            self.query: g.q_b_shape,
            self.o: g.o_shape,
        }
        if g.q_lora_rank is not None:
            shapes[f"{self.prefix}.q_a_proj.weight"] = (g.q_lora_rank, g.hidden_size)
            shapes[f"{self.prefix}.q_a_layernorm.weight"] = (g.q_lora_rank,)
        return shapes


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config (as :func:`normalize_config` gives it); UnsupportedModelError where there is none."""
    family = _BY_TYPE.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModelError(f"{_describe(config)}. Supported are: {', '.join(sorted(_BY_TYPE))}")
    return family


def layer_specs(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """One spec for each of the ``num_hidden_layers`` layers of a config as :func:`normalize_config` gives it.

    A multi-token-prediction layer is not among them; :func:`layer_spec` gives it under its own number.
    """
    find_family(config)
    count = _whole(config, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise UnsupportedModelError(
            f"the config gives num_hidden_layers = {count}; supported are up to {_MOST_LAYERS}: take the config.json "
            "that belongs to the checkpoint"
        )
    return tuple(layer_spec(config, index) for index in range(count))


def layer_spec(config: Mapping[str, Any], index: int) -> LayerSpec:
    """The spec of layer ``index``; numbers from ``num_hidden_layers`` on are multi-token-prediction layers."""
    family = find_family(config)
    return LayerSpec(index, family.prefix.format(layer=index), _geometry(config, family), family)


def normalize_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face config in today's style, from any of the three styles in use.

    Taken are DeepSeek's own keys (see :func:`mla_convert.native.hf_config`), ``rope_scaling`` with ``rope_theta``, and
    ``rope_parameters``. The result has ``rope_parameters`` (with ``rope_type`` and ``rope_theta``), ``dtype`` without
    ``torch.`` before it, and everything else as it was. ``raw`` is left alone.
    """
    if native.is_native_config(raw):
        return native.hf_config(raw)
    config = dict(raw)
    torch_dtype = config.pop("torch_dtype", None)
    dtype = config.get("dtype") or torch_dtype
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    config["rope_parameters"] = _rope_parameters(config)
    for key in ("rope_scaling", "rope_theta"):
        config.pop(key, None)
    return config


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    found = [_one_rope_style(config, key) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if len(found) == 2 and found[0] != found[1]:
        raise UnsupportedModelError(
            f"the config has both rope_scaling ({found[0]}) and rope_parameters ({found[1]}), and they differ; "
            "transformers would use rope_scaling: remove the one that is wrong"
        )
    return found[0] if found else {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0}


def _one_rope_style(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    given = config[key]
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"the config gives {key} = {given!r}; supported is one set of parameters for all layers, such as "
            "{'rope_type': 'yarn', 'factor': 40, …}"
        )
    rope = {name: value for name, value in given.items() if name != "type"}
    rope.setdefault("rope_type", given.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    _positive(rope, "rope_theta")
    return rope


def _geometry(config: Mapping[str, Any], family: Family) -> MLAGeometry:
    nope, rope = _whole(config, "qk_nope_head_dim"), _whole(config, "qk_rope_head_dim", least=0)
    return MLAGeometry(
        hidden_size=_whole(config, "hidden_size"),
        num_heads=_whole(config, "num_attention_heads"),
        kv_lora_rank=_whole(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=_whole(config, "v_head_dim"),
        q_lora_rank=_query_rank(config, family),
        scale=_scale(config, family, nope + rope),
    )


def _query_rank(config: Mapping[str, Any], family: Family) -> int | None:
    if "q_lora_rank" in config and config["q_lora_rank"] is None and family.query != "latent":
        return None
    rank = _whole(config, "q_lora_rank", hint=" (or null, for a query straight from the hidden state)")
    if family.query == "direct":
        raise UnsupportedModelError(f"the config gives q_lora_rank = {rank}; {family.model_type} has no query latent")
    return rank


def _scale(config: Mapping[str, Any], family: Family, width: int) -> float:
    """The softmax scale as transformers computes it: mscale enters for every rope type but the default one."""
    rope = config.get("rope_parameters") or {}
    mscale = rope.get("mscale_all_dim") or 0.0
    if not family.mscale or not mscale or rope.get("rope_type", "default") == "default":
        return softmax_scale(width)
    return softmax_scale(width, factor=_positive(rope, "factor"), mscale_all_dim=_positive(rope, "mscale_all_dim"))


def _positive(rope: Mapping[str, Any], key: str) -> float:
    value = rope.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModelError(
            f"the config's rope parameters give {key} = {value!r}; needed is a positive number: take the config.json "
            "that belongs to the checkpoint"
        )
    return float(value)


def _whole(config: Mapping[str, Any], key: str, *, least: int = 1, hint: str = "") -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = f"gives {key} = {value!r}" if key in config else f"has no {key}"
        raise UnsupportedModelError(
            f"the config {found}; an MLA model ({config.get('model_type')}) needs a whole number of at least {least} "
            f"there{hint}: take the config.json that belongs to the checkpoint"
        )
    return value


def _describe(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        return "the config names no model_type, so it cannot be told which model it describes"
    if "kv_lora_rank" in config:
        return f"the config describes a {model_type!r} model, an MLA family that this version does not know"
    for key in _INNER:
        inner = config.get(key)
        if isinstance(inner, Mapping) and "kv_lora_rank" in inner:
            return (
                f"the config describes a {model_type!r} model that wraps a text model of type "
                f"{inner.get('model_type')!r} in its {key}; this version reads text models that stand alone"
            )
    return f"the config describes a {model_type!r} model without kv_lora_rank: it does not use MLA"
