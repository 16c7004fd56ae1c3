"""Configs in every style in use, against transformers' own config classes and attention modules."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import pytest
import torch
from variants import config_v3, native_config

from mla_convert.architectures import FAMILIES, extra_layers, find_family, layer_specs, normalize_config
from mla_convert.errors import UnsupportedModelError
from mla_convert.geometry import MLAGeometry

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "none at all": {"rope_parameters": None},
    "today's, default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "default type with mscale_all_dim": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}
    },
    "today's, yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1}},
    "yarn without mscale_all_dim": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0}},
    "yarn that shrinks": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "mscale_all_dim": 1.0}
    },
    "linear with mscale_all_dim": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0, "mscale_all_dim": 0.7}
    },
    "the original, V3": {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 10000},
    "the original, V2-Lite": {
        "rope_parameters": None,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
    },
    "the original, no scaling": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 50000.0},
}


def attention(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' own attention module for an HF config."""
    model_type = config["model_type"]
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    name = FAMILIES[model_type].attention_class
    made = config_class(model_type)(**json.loads(json.dumps(config)))
    return getattr(module, name)(made, 0)


def config_class(model_type: str) -> Any:
    module = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    return getattr(module, {"deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config"}[model_type])


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("rope", ROPES)
def test_scale_is_that_of_the_module(model_type: str, rope: str) -> None:
    given = config_v3(model_type=model_type, **ROPES[rope])
    scale = layer_specs(normalize_config(given))[0].geometry.scale
    assert scale == attention(given).scaling  # given, not normalised: transformers reads the original style itself
    assert scale == attention(normalize_config(given)).scaling


def test_scales_of_the_table_differ() -> None:
    scales = {layer_specs(normalize_config(config_v3(**rope)))[0].geometry.scale for rope in ROPES.values()}
    assert len(scales) == 5  # plain; factor 4; linear; V3; V2-Lite


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("rank", [20, None])
def test_shapes_are_those_of_the_module(model_type: str, rank: int | None) -> None:
    config = normalize_config(config_v3(model_type=model_type, q_lora_rank=rank))
    spec = layer_specs(config)[0]
    shapes = {f"{spec.prefix}.{name}": tuple(p.shape) for name, p in attention(config).named_parameters()}
    assert spec.shapes() == shapes


def test_layers_and_names() -> None:
    config = normalize_config(config_v3(num_hidden_layers=3))
    specs = layer_specs(config)
    assert [spec.index for spec in specs] == [0, 1, 2]
    assert specs[2].prefix == "model.layers.2.self_attn"
    assert specs[2].kv_b == "model.layers.2.self_attn.kv_b_proj.weight"
    assert specs[2].query == "model.layers.2.self_attn.q_b_proj.weight"
    assert specs[2].o == "model.layers.2.self_attn.o_proj.weight"
    beyond = extra_layers(specs, [f"model.layers.{number}.self_attn.kv_b_proj" for number in (2, 4, 3)])
    assert [(spec.index, spec.prefix) for spec in beyond] == [(n, f"model.layers.{n}.self_attn") for n in (3, 4)]
    direct = layer_specs(normalize_config(config_v3(q_lora_rank=None)))[0]
    assert direct.query == "model.layers.0.self_attn.q_proj.weight"
    assert direct.geometry == MLAGeometry(40, 2, 12, 8, 4, 6, None, 12**-0.5)


def test_normalising_keeps_the_rest_and_leaves_the_original_alone() -> None:
    raw = config_v3(rope_parameters=None, rope_scaling=YARN, rope_theta=5000, torch_dtype="torch.float16", extra=[1])
    del raw["dtype"]
    before = json.dumps(raw)
    config = normalize_config(raw)
    assert json.dumps(raw) == before
    assert config["dtype"] == "float16" and config["extra"] == [1]
    numbers = {key: value for key, value in YARN.items() if key != "type"}
    assert config["rope_parameters"] == numbers | {"rope_type": "yarn", "rope_theta": 5000}
    assert {"rope_scaling", "rope_theta", "torch_dtype"}.isdisjoint(config)
    assert normalize_config(config) == config


def test_both_rope_styles_at_once() -> None:
    new = {key: value for key, value in YARN.items() if key != "type"} | {"rope_type": "yarn", "rope_theta": 1e4}
    both = config_v3(rope_parameters=new, rope_scaling=YARN, rope_theta=1e4)
    assert normalize_config(both)["rope_parameters"] == new
    with pytest.raises(UnsupportedModelError, match="both rope_scaling .* and rope_parameters .* differ"):
        normalize_config(both | {"rope_scaling": YARN | {"factor": 41}})


def test_a_saved_config_without_query_rank_can_be_read(tmp_path: pathlib.Path) -> None:
    """transformers drops some defaults when it writes a config; the null of ``q_lora_rank`` must not be one."""
    config_class("deepseek_v2")(**config_v3(model_type="deepseek_v2", q_lora_rank=None)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert layer_specs(normalize_config(saved))[0].geometry.q_lora_rank is None


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({"model_type": "llama", "hidden_size": 64}, ["'llama'", "not use MLA", "deepseek_v2, deepseek_v3"]),
    "an MLA family that is no row": (
        config_v3(model_type="kimi_k9"),
        ["'kimi_k9'", "allow_unknown=True", "deepseek_v2, deepseek_v3"],
    ),
    "a wrapper": (
        {"model_type": "kimi_vl", "text_config": config_v3()},
        ["'kimi_vl'", "'deepseek_v3'", "text_config", "does not know that wrapper", "deepseek_v2, deepseek_v3"],
    ),
    "another wrapper": (
        {"model_type": "deepseek_vl_v2", "language_config": config_v3(model_type="deepseek_v2")},
        ["'deepseek_vl_v2'", "'deepseek_v2'", "language_config"],
    ),
    "a wrapper of something else": (
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        ["'llava'", "not use MLA"],
    ),
    "no model type": ({"hidden_size": 64}, ["no model_type", "deepseek_v2, deepseek_v3"]),
    "a model type of another kind": ({"model_type": ["deepseek_v3"]}, ["['deepseek_v3']"]),
    "no query rank": (
        {key: value for key, value in config_v3().items() if key != "q_lora_rank"},
        ["has no q_lora_rank", "or null", "config.json"],
    ),
    "query rank zero": (config_v3(q_lora_rank=0), ["q_lora_rank = 0", "or null"]),
    "no latent": (config_v3(kv_lora_rank=None), ["kv_lora_rank = None", "whole number"]),
    "a width in words": (config_v3(v_head_dim="128"), ["v_head_dim = '128'"]),
    "a fraction": (config_v3(hidden_size=40.0), ["hidden_size = 40.0"]),
    "a truth value": (config_v3(num_attention_heads=True), ["num_attention_heads = True"]),
    "a negative width": (config_v3(qk_rope_head_dim=-4), ["qk_rope_head_dim = -4", "at least 0"]),
    "no layers": (config_v3(num_hidden_layers=0), ["num_hidden_layers = 0"]),
    "absurdly many layers": (config_v3(num_hidden_layers=10**12), ["num_hidden_layers = 1000000000000", "10000"]),
    "rope of another kind": (config_v3(rope_parameters="yarn"), ["rope_parameters = 'yarn'"]),
    "rope by layer type": (config_v3(rope_parameters={"full": {"rope_type": "yarn"}}), ["one set of parameters"]),
    "no factor": (
        config_v3(rope_parameters={"rope_type": "yarn", "mscale_all_dim": 1.0}),
        ["factor = None", "positive number"],
    ),
    "a factor in words": (
        config_v3(rope_parameters={"rope_type": "yarn", "mscale_all_dim": 1.0, "factor": "4"}),
        ["factor = '4'"],
    ),
    "an infinite factor": (
        config_v3(rope_parameters={"rope_type": "yarn", "mscale_all_dim": 1.0, "factor": float("inf")}),
        ["factor = inf"],
    ),
    "no theta": (config_v3(rope_parameters={"rope_type": "yarn", "rope_theta": None}), ["rope_theta = None"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configs(case: str) -> None:
    config, fragments = WRONG[case]
    with pytest.raises(UnsupportedModelError) as refused:
        layer_specs(normalize_config(config))
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_rope_width_zero_is_a_geometry() -> None:
    assert layer_specs(normalize_config(config_v3(qk_rope_head_dim=0)))[0].geometry.latent_width == 12


def test_native_config_is_the_example_s(example_path: pathlib.Path) -> None:
    """Each key of the normalised native config has the value that the HF form of the same model has."""
    original = json.loads((example_path / "config.json").read_text())
    config = normalize_config(native_config(original))
    # DeepSeek's layout has no special tokens and no multi-token-prediction layer.
    own = {"bos_token_id": None, "eos_token_id": None, "num_nextn_predict_layers": 0}
    assert config == {key: original[key] for key in config} | own
    assert config_class("deepseek_v3")(**config).rope_parameters == original["rope_parameters"]


V2_LITE = {
    "vocab_size": 102400,
    "dim": 2048,
    "inter_dim": 10944,
    "moe_inter_dim": 1408,
    "n_layers": 27,
    "n_dense_layers": 1,
    "n_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "n_activated_experts": 6,
    "route_scale": 1.0,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mscale": 0.707,
}


def test_native_v2_lite() -> None:
    config = normalize_config(V2_LITE)
    assert find_family(config).model_type == "deepseek_v2"
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert config["q_lora_rank"] is None and config["topk_method"] == "greedy"
    assert config["max_position_embeddings"] == 163840
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 40.0, 4096)
    assert rope["mscale"] == rope["mscale_all_dim"] == 0.707
    specs = layer_specs(config)
    small = attention(config | {"hidden_size": 64, "num_attention_heads": 2})
    assert len(specs) == 27 and specs[0].geometry.scale == small.scaling
    assert "quantization_config" not in config


def test_native_groups_and_scores() -> None:
    grouped = normalize_config(V2_LITE | {"n_expert_groups": 8, "n_limited_groups": 3, "q_lora_rank": 1536})
    assert (grouped["topk_method"], grouped["n_group"], grouped["topk_group"]) == ("group_limited_greedy", 8, 3)
    assert grouped["q_lora_rank"] == 1536
    assert find_family(normalize_config(V2_LITE | {"score_func": "softmax"})).model_type == "deepseek_v2"
    assert find_family(normalize_config(V2_LITE | {"score_func": "sigmoid"})).model_type == "deepseek_v3"


def test_native_yarn_follows_the_length() -> None:
    short = normalize_config(V2_LITE | {"max_seq_len": 4096})
    assert short["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert short["max_position_embeddings"] == 4096
    assert layer_specs(short)[0].geometry.scale == 192**-0.5
    assert normalize_config(V2_LITE | {"max_seq_len": 4097})["rope_parameters"]["rope_type"] == "yarn"


def test_native_fp8_has_blocks_of_128() -> None:
    quantization = normalize_config(V2_LITE | {"dtype": "fp8", "scale_fmt": "ue8m0"})["quantization_config"]
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"index_topk": 2048, "index_n_heads": 64}, ["index_n_heads, index_topk", "V3"]),
        ({"score_func": "sqrtsoftplus"}, ["score_func = 'sqrtsoftplus'", "softmax, sigmoid"]),
        ({"dtype": "int8"}, ["dtype = 'int8'", "bf16, fp8"]),
        ({"n_heads": "16"}, ["n_heads = '16'", "number"]),
        ({"rope_factor": None}, ["rope_factor = None"]),
        ({"max_seq_len": "long"}, ["max_seq_len = 'long'"]),
        ({"n_expert_groups": []}, ["n_expert_groups = []"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank = 0"]),
    ],
)
def test_wrong_native_configs(change: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        layer_specs(normalize_config(V2_LITE | change))
    for fragment in fragments:
        assert fragment in str(refused.value)


@pytest.mark.parametrize("key", [key for key in V2_LITE if key not in ("route_scale", "q_lora_rank", "mscale")])
def test_native_config_without_a_key(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"no '{key}'"):
        layer_specs(normalize_config({name: value for name, value in V2_LITE.items() if name != key}))
