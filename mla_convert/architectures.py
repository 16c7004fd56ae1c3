"""From a config to the geometry and the tensor names of each MLA module; nothing below branches on a model's name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from mla_convert.config_styles import INNER, normalize_config
from mla_convert.config_values import positive, whole
from mla_convert.errors import UnsupportedModelError
from mla_convert.families import FAMILIES, Family, Spelling
from mla_convert.geometry import MLAGeometry, softmax_scale
from mla_convert.schedules import Place, every_layer

__all__ = [
    "FAMILIES",
    "Family",
    "LayerSpec",
    "extra_layers",
    "find_family",
    "layer_specs",
    "normalize_config",
    "projection_of",
    "text_config",
]

_BY_TYPE = {name: family for family in FAMILIES.values() for name in (family.model_type, *family.aliases)}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One MLA module of a checkpoint: its number, where its tensors stand, and their dimensions.

    ``index`` is transformers' ``layer_idx``. ``own_latent`` is False where it uses the latents of an earlier layer.
    """

    index: int
    prefix: str
    geometry: MLAGeometry
    family: Family
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_latent: bool = True

    def name(self, module: str) -> str:
        """Name of the weight of a submodule that transformers calls ``module``."""
        return f"{self.prefix}.{self.words.get(module, module)}.weight"

    @property
    def kv_b(self) -> str:
        """Name of W_UK and W_UV, ``[H·(N + V), C]``."""
        return self.name("kv_b_proj")

    @property
    def query(self) -> str:
        """Name of W_UQ and W_QR, ``[H·(N + R), Q]``: ``q_b_proj``, or ``q_proj`` without a query latent."""
        return self.name("q_proj" if self.geometry.q_lora_rank is None else self.family.query_projection)

    @property
    def o(self) -> str:
        """Name of W_O, ``[D, H·V]``."""
        return self.name("o_proj")

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the weights of its norms: of the latents, where it has them."""
        return tuple(name for name, shape in self.shapes().items() if len(shape) == 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight that the module must have for its attention, with its shape."""
        g = self.geometry
        rows, rank = g.q_b_shape
        if self.family.query_gates:
            rows, rank = rows + g.num_heads * g.v_head_dim, rank // 2
        shapes: dict[str, tuple[int, ...]] = {
            self.kv_b: g.kv_b_shape,
            self.query: (rows, g.query_rank),
            self.o: g.o_shape,
        }
        if self.own_latent:
            shapes[self.name("kv_a_proj_with_mqa")] = (g.latent_width, g.hidden_size)
            shapes[self.name("kv_a_layernorm")] = (g.kv_lora_rank,)
        if g.q_lora_rank is not None:
            shapes[self.name("q_a_proj")] = (rank, g.hidden_size)
            shapes[self.name("q_a_layernorm")] = (rank,)
        return shapes


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config (as :func:`normalize_config` gives it); UnsupportedModelError where there is none."""
    family = _BY_TYPE.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModelError(f"{_describe(config)}. Supported are: {', '.join(sorted(_BY_TYPE))}")
    return family


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config: the wrapper's inner one, or the config itself."""
    inner = config.get(find_family(config).inner or "")
    return inner if isinstance(inner, Mapping) else config


def layer_specs(config: Mapping[str, Any], modules: Container[str] | None = None) -> tuple[LayerSpec, ...]:
    """One spec for each MLA module of a config as :func:`normalize_config` gives it.

    ``modules`` are the names of the checkpoint's modules (of its tensors, without their last word); they decide among
    the spellings that a family has. Without them, or where none fits, the first is taken.
    A multi-token-prediction layer is not among the specs; :func:`extra_layers` gives those.
    """
    family = find_family(config)
    places = tuple(family.places(text_config(config)))
    if not places:
        raise UnsupportedModelError(
            f"the config describes a {family.model_type} model none of whose layers has MLA: there is nothing to absorb"
        )
    found = (spelling for spelling in family.spellings if modules is not None and _spells(spelling, places, modules))
    spelling = next(found, family.spellings[0])
    return tuple(_spec(config, family, place, spelling) for place in places)


def extra_layers(specs: tuple[LayerSpec, ...], modules: Iterable[str]) -> tuple[LayerSpec, ...]:
    """Multi-token-prediction layers: those among ``modules`` with numbers beyond the model's own layers.

    Where layers differ from each other nothing says what these are like; they are left out, as transformers does.
    """
    first = specs[0]
    if first.family.places is not every_layer:
        return ()
    pattern = re.escape(first.kv_b.removesuffix(".weight")).replace(r"\.0\.", r"\.(\d+)\.")
    numbers = sorted(int(match.group(1)) for name in modules if (match := re.fullmatch(pattern, name)))
    return tuple(
        dataclasses.replace(first, index=number, prefix=first.prefix.replace(".0.", f".{number}."))
        for number in numbers
        if number >= len(specs)
    )


def projection_of(name: str) -> str:
    """What a source tensor is, by the last word of its name: ``kv_b_proj``, ``o_proj`` or ``query``."""
    word = name.split(".")[-2] if name.count(".") else name
    module = _MODULE_OF.get(word, word)
    return "query" if module in ("q_proj", "q_b_proj", "q_gate_proj") else module


_MODULE_OF = {
    word: module
    for family in FAMILIES.values()
    for spelling in family.spellings
    for module, word in spelling.words.items()
}


def _spells(spelling: Spelling, places: Iterable[Place], modules: Container[str]) -> bool:
    word = spelling.words.get("kv_b_proj", "kv_b_proj")
    return any(f"{_prefix(spelling, place)}.{word}" in modules for place in places)


def _prefix(spelling: Spelling, place: Place) -> str:
    return spelling.prefix.format(layer=place.layer, attention=place.attention)


def _spec(config: Mapping[str, Any], family: Family, place: Place, spelling: Spelling) -> LayerSpec:
    values = {**family.defaults, **text_config(config), **place.changes}
    geometry = _geometry(values, family)
    return LayerSpec(place.index, _prefix(spelling, place), geometry, family, spelling.words, place.own_latent)


def _geometry(config: Mapping[str, Any], family: Family) -> MLAGeometry:
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    nope, rope = whole(config, "qk_nope_head_dim"), whole(config, "qk_rope_head_dim", least=0)
    if config.get("v_head_dim") is None and "v_head_dim" in family.defaults:
        config = {**config, "v_head_dim": hidden // heads}
    return MLAGeometry(
        hidden_size=hidden,
        num_heads=heads,
        kv_lora_rank=whole(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=whole(config, "v_head_dim"),
        q_lora_rank=_query_rank(config, family),
        scale=_scale(config, family, nope + rope),
    )


def _query_rank(config: Mapping[str, Any], family: Family) -> int | None:
    """The width that the query's up-projection reads; None where that is the hidden state."""
    silent = "q_lora_rank" not in config and family.query == "direct"
    if silent or ("q_lora_rank" in config and config["q_lora_rank"] is None and family.query != "latent"):
        return None
    hint = "" if family.query == "latent" else " (or null, for a query straight from the hidden state)"
    rank = whole(config, "q_lora_rank", hint=hint)
    if family.query == "direct":
        raise UnsupportedModelError(f"the config gives q_lora_rank = {rank}; {family.model_type} has no query latent")
    return 2 * rank if family.query_gates else rank


def _scale(config: Mapping[str, Any], family: Family, width: int) -> float:
    """The softmax scale as transformers computes it: mscale enters for every rope type but the default one."""
    rope = config.get("rope_parameters") or {}
    mscale = rope.get("mscale_all_dim") or 0.0
    if not family.mscale or not mscale or rope.get("rope_type", "default") == "default":
        return softmax_scale(width)
    return softmax_scale(width, factor=positive(rope, "factor"), mscale_all_dim=positive(rope, "mscale_all_dim"))


def _describe(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        return "the config names no model_type, so it cannot be told which model it describes"
    if "kv_lora_rank" in config:
        return (
            f"the config describes a {model_type!r} model, an MLA family that this version does not know; a model in "
            "memory can be tried with patch(model, allow_unknown=True)"
        )
    for key in INNER:
        inner = config.get(key)
        if isinstance(inner, Mapping) and "kv_lora_rank" in inner:
            return (
                f"the config describes a {model_type!r} model that wraps a text model of type "
                f"{inner.get('model_type')!r} in its {key}; this version does not know that wrapper"
            )
    return f"the config describes a {model_type!r} model without kv_lora_rank: it does not use MLA"
