"""Which layers have MLA and how checkpoints spell them, in configs as they are published."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import family_models
import models
import pytest
import torch
from models import relative
from patching import BOUND, steps
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from variants import config_v3

import mla_convert
from mla_convert.architectures import FAMILIES, extra_layers, layer_specs, normalize_config, projection_of
from mla_convert.errors import UnsupportedModelError
from mla_convert.families import Spelling


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A family's config with a text part in the style of ``config_v3``."""
    text = config_v3(model_type=f"{model_type}_text" if FAMILIES[model_type].inner else model_type, num_hidden_layers=8)
    text |= changes
    if FAMILIES[model_type].query == "direct":
        text.pop("q_lora_rank", None)
    return {"model_type": model_type, "text_config": text} if FAMILIES[model_type].inner else text


def indices(config: dict[str, Any]) -> list[int]:
    return [spec.index for spec in layer_specs(normalize_config(config))]


def test_full_attention_layers() -> None:
    published = {"kda_layers": [1, 3], "full_attn_layers": [2, 8], "head_dim": 8}
    assert indices(config_of("kimi_linear", linear_attn_config=published)) == [1, 7]
    assert indices(config_of("kimi_linear")) == [4]
    assert indices(config_of("kimi_linear", layer_types=["full_attention"] + ["linear_attention"] * 7)) == [0]
    assert indices(config_of("bailing_hybrid", layer_group_size=3)) == [2, 5]
    assert indices(config_of("glm5_next", qk_rope_head_dim=0)) == [3, 7]
    assert indices(config_of("longcat_flash", num_layers=2)) == [0, 1, 2, 3]


def test_sliding_layers_of_the_published_style() -> None:
    """The text model's values at the top, sliding ones with a prefix, against transformers' own reading."""
    flat = family_models.MODELS["dots3_note"][1]["text_config"]
    by_rule = {key: value for key, value in flat.items() if key != "layer_types"}
    for raw in (flat, by_rule | {"num_hidden_layers": 5}, by_rule | {"use_sliding_window": False}):
        made = CONFIG_MAPPING["dots3_note_text"](**json.loads(json.dumps(raw)))
        for spec in layer_specs(normalize_config({"model_type": "dots3_note", **raw})):
            g, wanted = spec.geometry, made.per_layer_config[spec.index]
            assert (g.num_heads, g.v_head_dim) == (wanted.num_attention_heads, wanted.v_head_dim)
            assert (g.kv_lora_rank, g.q_lora_rank) == (wanted.kv_lora_rank, wanted.q_lora_rank)
            assert (g.qk_nope_head_dim, g.qk_rope_head_dim) == (wanted.qk_nope_head_dim, wanted.qk_rope_head_dim)


def test_sarvam_s_yarn_is_yarn() -> None:
    yarn = {"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    raw = config_of("sarvam_mla", rope_parameters=None, rope_scaling=yarn, q_lora_rank=None)
    made = CONFIG_MAPPING["sarvam_mla"](**json.loads(json.dumps(raw)))
    assert made.rope_parameters["rope_type"] == "yarn"
    (spec, *_) = layer_specs(normalize_config(raw))
    assert spec.geometry.scale == DeepseekV3Attention(made, 0).scaling != 12**-0.5


def test_shared_latents() -> None:
    specs = layer_specs(normalize_config(config_of("mistral_large4", kv_source_layers=[0, 1, 0, 1, 4, 4, 4, 4])))
    assert [spec.own_latent for spec in specs] == [True, True, False, False, True, False, False, False]
    assert [spec.geometry.qk_rope_head_dim for spec in specs] == [4, 4, 4, 0, 4, 4, 4, 0]
    assert [spec.geometry.qk_nope_head_dim for spec in specs] == [8, 8, 8, 12, 8, 8, 8, 12]
    assert "layers.2.attention.wkv_a_with_mqa.weight" not in specs[2].shapes()
    assert specs[1].shapes()["layers.1.attention.wkv_a_with_mqa.weight"] == (16, 40)


@pytest.mark.parametrize(
    ("model_type", "spelling"), [(family.model_type, s) for family in FAMILIES.values() for s in family.spellings]
)
def test_the_checkpoint_s_names_decide(model_type: str, spelling: Spelling) -> None:
    config = normalize_config(config_of(model_type, num_layers=4, qk_rope_head_dim=0))
    first = layer_specs(config)[0]
    prefix = spelling.prefix.format(layer=first.index, attention=0)
    found = layer_specs(config, {f"{prefix}.{spelling.words.get('kv_b_proj', 'kv_b_proj')}"})[0]
    assert found.prefix == prefix
    assert projection_of(found.kv_b) == "kv_b_proj" and projection_of(found.o) == "o_proj"
    assert projection_of(found.query) == "query"


def test_extra_layers_only_where_all_are_alike() -> None:
    config = normalize_config(config_of("kimi_linear"))
    specs = layer_specs(config)
    assert extra_layers(specs, ["model.layers.8.self_attn.kv_b_proj"]) == ()
    wrapped = layer_specs(normalize_config(config_of("kimi_k25")))
    (extra,) = extra_layers(wrapped, ["language_model.model.layers.8.self_attn.kv_b_proj"])
    assert (extra.index, extra.prefix) == (8, "language_model.model.layers.8.self_attn")


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("kimi_linear", {"layer_types": ["full_attention"]}, "1 entries under layer_types.*8 layers"),
        ("glm5_next", {"layer_types": "all"}, "'all' under layer_types"),
        ("kimi_linear", {"layer_types": ["linear_attention"] * 8}, "none of whose layers has MLA"),
        ("mistral_large4", {"kv_source_layers": [0, 5, 2, 3, 4, 5, 6, 7]}, "give 5 for layer 1"),
        ("mistral_large4", {"kv_source_layers": ["0"] * 8}, "give '0' for layer 0"),
        ("axk1", {"q_lora_rank": None}, "q_lora_rank = None"),
        ("bailing_hybrid", {"layer_group_size": 0}, "layer_group_size = 0"),
    ],
)
def test_schedules_that_cannot_be(model_type: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        layer_specs(normalize_config(config_of(model_type, **changes)))


def test_a_query_latent_that_the_family_has_not() -> None:
    config = config_of("mistral_large4")
    config["text_config"]["q_lora_rank"] = 8
    with pytest.raises(UnsupportedModelError, match="mistral_large4 has no query latent"):
        layer_specs(normalize_config(config))


def test_a_wrapper_lends_its_text_model_s_dtype_and_quantization() -> None:
    config = config_of("kimi_k25", dtype="bfloat16", quantization_config={"quant_method": "fp8"})
    normal = normalize_config(config)
    assert normal["dtype"] == "bfloat16" and normal["quantization_config"] == {"quant_method": "fp8"}
    assert "quantization_config" not in normal["text_config"] and "quantization_config" in config["text_config"]


@torch.inference_mode()
def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "its_own.Config"}}
    file.write_text(json.dumps(config))
    mla_convert.convert(tmp_path / "source", tmp_path / "out")
    loaded = mla_convert.load(tmp_path / "source", tmp_path / "out")
    ids, sizes = models.tokens(1, 8), [5, 1, 1, 1]
    expected = steps(model, ids, DynamicCache(), sizes)
    assert relative(steps(loaded, ids, DynamicCache(), sizes), expected) <= BOUND
