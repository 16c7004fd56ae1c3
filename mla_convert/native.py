"""DeepSeek's own checkpoint layout: names, how parts are joined, and config keys, as data.

DeepSeek's inference code reads ``model{part}-mp{parts}.safetensors``: each part holds its share of the
heads, columns and experts, and a whole copy of everything else. Names and config keys are its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from mla_convert.errors import CheckpointError, UnsupportedModelError

#: How the parts of one tensor make the whole: joined along an axis, equal copies, or held by one part alone.
Placement = int | Literal["copies", "one part"]

PART_FILE = re.compile(r"model(\d+)-mp(\d+)\.safetensors")

# Native module -> (HF module, placement); "#" stands for a layer or expert number.
MODULES: dict[str, tuple[str, Placement]] = {
    "embed": ("model.embed_tokens", 0),
    "norm": ("model.norm", "copies"),
    "head": ("lm_head", 0),
    "layers.#.attn_norm": ("model.layers.#.input_layernorm", "copies"),
    "layers.#.ffn_norm": ("model.layers.#.post_attention_layernorm", "copies"),
    "layers.#.attn.wq": ("model.layers.#.self_attn.q_proj", 0),
    "layers.#.attn.wq_a": ("model.layers.#.self_attn.q_a_proj", "copies"),
    "layers.#.attn.q_norm": ("model.layers.#.self_attn.q_a_layernorm", "copies"),
    "layers.#.attn.wq_b": ("model.layers.#.self_attn.q_b_proj", 0),
    "layers.#.attn.wkv_a": ("model.layers.#.self_attn.kv_a_proj_with_mqa", "copies"),
    "layers.#.attn.kv_norm": ("model.layers.#.self_attn.kv_a_layernorm", "copies"),
    "layers.#.attn.wkv_b": ("model.layers.#.self_attn.kv_b_proj", 0),
    "layers.#.attn.wo": ("model.layers.#.self_attn.o_proj", 1),
    "layers.#.ffn.w1": ("model.layers.#.mlp.gate_proj", 0),
    "layers.#.ffn.w2": ("model.layers.#.mlp.down_proj", 1),
    "layers.#.ffn.w3": ("model.layers.#.mlp.up_proj", 0),
    "layers.#.ffn.gate": ("model.layers.#.mlp.gate", "copies"),
    "layers.#.ffn.shared_experts.w1": ("model.layers.#.mlp.shared_experts.gate_proj", 0),
    "layers.#.ffn.shared_experts.w2": ("model.layers.#.mlp.shared_experts.down_proj", 1),
    "layers.#.ffn.shared_experts.w3": ("model.layers.#.mlp.shared_experts.up_proj", 0),
    "layers.#.ffn.experts.#.w1": ("model.layers.#.mlp.experts.#.gate_proj", "one part"),
    "layers.#.ffn.experts.#.w2": ("model.layers.#.mlp.experts.#.down_proj", "one part"),
    "layers.#.ffn.experts.#.w3": ("model.layers.#.mlp.experts.#.up_proj", "one part"),
}
PARAMETERS = {"weight": "weight", "scale": "weight_scale_inv"}


def hf_name(name: str) -> tuple[str, Placement]:
    """HF name of a native tensor, and how its parts are put together; unknown names raise CheckpointError."""
    module, _, parameter = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
    known = MODULES.get(re.sub(r"(?<=\.)\d+(?=\.)", "#", module))
    # The router's only bias has a name of its own in HF form.
    ours = "e_score_correction_bias" if name.endswith(".ffn.gate.bias") else PARAMETERS.get(parameter)
    if known is None or ours is None:
        raise CheckpointError(
            f"tensor {name!r} is not a name of DeepSeek's native layout as this version knows it (DeepSeek-V2 and -V3 "
            "models); if the checkpoint has other layers or another quantization, use its Hugging Face form instead"
        )
    whole, placement = known
    for number in numbers:
        whole = whole.replace("#", number, 1)
    return f"{whole}.{ours}", placement


_MISSING = object()

# Native config key -> (HF key, the native code's own default). Keys without a default must be there.
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", _MISSING),
    "dim": ("hidden_size", _MISSING),
    "inter_dim": ("intermediate_size", _MISSING),
    "moe_inter_dim": ("moe_intermediate_size", _MISSING),
    "n_layers": ("num_hidden_layers", _MISSING),
    "n_dense_layers": ("first_k_dense_replace", _MISSING),
    "n_heads": ("num_attention_heads", _MISSING),
    "n_routed_experts": ("n_routed_experts", _MISSING),
    "n_shared_experts": ("n_shared_experts", _MISSING),
    "n_activated_experts": ("num_experts_per_tok", _MISSING),
    "n_expert_groups": ("n_group", 1),
    "n_limited_groups": ("topk_group", 1),
    "route_scale": ("routed_scaling_factor", 1.0),
    "q_lora_rank": ("q_lora_rank", 0),
    "kv_lora_rank": ("kv_lora_rank", _MISSING),
    "qk_nope_head_dim": ("qk_nope_head_dim", _MISSING),
    "qk_rope_head_dim": ("qk_rope_head_dim", _MISSING),
    "v_head_dim": ("v_head_dim", _MISSING),
}
ROPE = {
    "rope_theta": ("rope_theta", 10000.0),
    "rope_factor": ("factor", 40.0),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "original_seq_len": ("original_max_position_embeddings", 4096),
}
_OTHERS = {"dtype", "score_func", "scale_fmt", "max_seq_len", "max_batch_size"}
SCORES = {"softmax": "deepseek_v2", "sigmoid": "deepseek_v3"}
# The block size is a constant of DeepSeek's code, not a key of its configs.
_NATIVE_BLOCK = [128, 128]


def is_native_config(raw: Mapping[str, Any]) -> bool:
    """Whether a config uses DeepSeek's own keys (``dim``, ``n_layers``) rather than Hugging Face's."""
    return "model_type" not in raw and ("dim" in raw or "n_layers" in raw)


def hf_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A full Hugging Face config from DeepSeek's own keys.

    The router's ``score_func`` tells the model: sigmoid is DeepSeek-V3, softmax or none is DeepSeek-V2 and V2-Lite.
    Absent keys take the defaults of DeepSeek's code. YaRN is on unless ``max_seq_len`` is given and fits
    ``original_seq_len``, and one ``mscale`` serves both as ``mscale`` and ``mscale_all_dim``, as in that code. The
    layout has neither special tokens (none are set) nor a multi-token-prediction layer.
    """
    _check_keys(raw)
    model_type = SCORES[raw.get("score_func", "softmax")]
    config: dict[str, Any] = {ours: _value(raw, key, default) for key, (ours, default) in KEYS.items()}
    config["q_lora_rank"] = config["q_lora_rank"] or None
    rope = {ours: raw.get(key, default) for key, (ours, default) in ROPE.items()}
    length = rope["original_max_position_embeddings"]
    if "max_seq_len" in raw and raw["max_seq_len"] <= length:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    else:
        length = int(length * rope["factor"])
        rope |= {"rope_type": "yarn", "mscale_all_dim": rope["mscale"]}
    config |= {
        "model_type": model_type,
        "architectures": [{"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[model_type]],
        "num_key_value_heads": config["num_attention_heads"],
        "rope_parameters": rope,
        "max_position_embeddings": length,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config |= _router(model_type, config["n_group"])
    if raw.get("dtype", "bf16") == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(_NATIVE_BLOCK),
            "scale_fmt": raw.get("scale_fmt"),
        }
    return config


def _router(model_type: str, groups: int) -> dict[str, Any]:
    if model_type == "deepseek_v3":
        return {"norm_topk_prob": True, "rope_interleave": True, "num_nextn_predict_layers": 0}
    return {"norm_topk_prob": False, "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _value(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key, default)
    if value is _MISSING:
        raise UnsupportedModelError(
            f"the DeepSeek-native config has no {key!r}; it is needed (take the config file that belongs to the model)"
        )
    return value


def _check_keys(raw: Mapping[str, Any]) -> None:
    unknown = sorted(set(raw) - set(KEYS) - set(ROPE) - _OTHERS)
    if unknown:
        raise UnsupportedModelError(
            f"the DeepSeek-native config has keys that DeepSeek-V2 and -V3 do not: {', '.join(unknown)}; supported "
            "native models are DeepSeek-V2, V2-Lite, V3, R1 and V3.1"
        )
    for key in sorted(set(raw) - {"dtype", "score_func", "scale_fmt"}):
        if isinstance(raw[key], bool) or not isinstance(raw[key], int | float) or not 0 <= raw[key] < math.inf:
            raise UnsupportedModelError(
                f"the DeepSeek-native config gives {key} = {raw[key]!r}; needed is a number: take the config file that "
                "belongs to the model"
            )
    for key, known in (("score_func", tuple(SCORES)), ("dtype", ("bf16", "fp8"))):
        if key in raw and raw[key] not in known:
            raise UnsupportedModelError(
                f"the DeepSeek-native config gives {key} = {raw[key]!r}; supported are {', '.join(known)}"
            )
