"""A small random model of every family, with odd numbers of heads and no two widths alike.

Weights are so large that attention is far from uniform and a fault in it shows; gates, sinks and the scales on the
query are random too. Sparse attention chooses fewer tokens than the tests cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import older
import torch
import transformers
from models import YARN
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

from mla_convert.patches import versions

#: A prefill, then one token and three at a time; more tokens than any indexer chooses and any window holds.
SIZES = [9, 1, 1, 3, 1, 1]
#: So many that fewer tokens are visible at first than an indexer chooses: the mask must hide some of those chosen.
PADDING = 7

VOCABULARY = 97
_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 28,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "rope_parameters": YARN,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MOE = _DENSE | _EXPERTS
#: Tokens that the indexers choose.
CHOSEN = 6
_DSA = _MOE | {"index_topk": CHOSEN, "index_head_dim": 16, "index_n_heads": 2}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def _without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


_LINEAR = _without(_MOE, "n_routed_experts") | {"num_local_experts": 4, "num_hidden_layers": 3}
_SINKS = _DSA | {"indexer_types": ["full", "shared"], "hc_mult": 2}
_DOTS = _without(_DSA, "rope_parameters") | {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 7,
    "shared_experts_intermediate_size": 16,
    "head_dim": 24,
    "swa_num_attention_heads": 5,
    "swa_num_key_value_heads": 5,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 44,
    "swa_head_dim": 30,
    "swa_qk_nope_head_dim": 20,
    "swa_v_head_dim": 14,
}
_POOLED = _without(_DSA, "rope_parameters") | {
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
    "index_topk": 4,
    "index_kpool": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "hc_mult": 2,
}
_SHARED = _without(_DSA, "q_lora_rank", "rope_parameters") | {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1],
    "indexer_types": ["full", "shared", "full", "shared"],
}

#: The class that is made of each family's config, and the config's values.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        _MOE | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _MOE),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        {
            "text_config": _MOE | {"model_type": "kimi_k2"},
            "vision_config": _VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 16,
        },
    ),
    "sarvam_mla": ("DeepseekV3ForCausalLM", _MOE | {"q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", _MOE | {"v_head_dim": 20}),
    "youtu": ("YoutuForCausalLM", _DENSE),
    "axk1": ("AXK1ForCausalLM", _MOE),
    "minicpm3": ("MiniCPM3ForCausalLM", _DENSE | {"qk_nope_head_dim": 20, "v_head_dim": None}),
    "mistral4": (
        "Mistral4ForCausalLM",
        _MOE | {"rope_parameters": YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        _without(_DENSE, "num_hidden_layers", "intermediate_size")
        | {
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 1,
            "head_dim": 8,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        _without(_LINEAR, "rope_parameters")
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        },
    ),
    "bailing_hybrid": ("BailingHybridForCausalLM", _LINEAR | {"layer_group_size": 2, "head_dim": 8}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _DSA),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        _DSA | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    ),
    "axk2": ("AXK2ForCausalLM", _without(_DSA, "n_group", "topk_group") | {"gated_norm_rank": 4}),
    "hy_v4": ("HYV4ForCausalLM", _SINKS),
    "hy_v4_vl": (
        "HYV4VLForConditionalGeneration",
        {
            "text_config": _SINKS | {"rope_parameters": YARN | {"mrope_section": [2, 1, 1]}},
            "vision_config": _VISION,
        },
    ),
    "dots3_note": (
        "Dots3NoteForConditionalGeneration",
        {
            "text_config": _DOTS,
            "vision_config": _VISION
            | {"adapter_in_dim": 16, "adapter_out_dim": 48, "mlp_layer_types": ["dense"], "moe_intermediate_size": 8},
            "audio_config": _VISION
            | {"adapter_input_size": 16, "adapter_out_dim": 48, "downsample_hidden_size": 4, "feature_size": 16},
        },
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        {
            "text_config": _POOLED,
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "intermediate_size": 16,
                "projection_intermediate_size": 16,
            },
        },
    ),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        {
            "text_config": _SHARED,
            "vision_config": _VISION | {"model_type": "pixtral", "patch_size": 4, "image_size": 16},
        },
    ),
}


#: Those that the installed transformers has, and whose indexers read masks rightly; all, in the newest.
AVAILABLE = [
    name
    for name, (_, values) in MODELS.items()
    if name in CONFIG_MAPPING and (older.RELEASE >= versions.SPARSE or "index_topk" not in values)
]


def make(model_type: str, *, attn: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The family's model in float32 and evaluation mode; ``changes`` are of the text model's config."""
    kind, values = MODELS[model_type]
    values = copy.deepcopy(values)
    values.get("text_config", values).update(changes)
    config = CONFIG_MAPPING[model_type](**values)
    if attn is not None:
        config._attn_implementation = attn
    torch.manual_seed(seed)
    model: Any = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
            elif name.endswith(("sinks", "softmax_scaling.scale", "softmax_scaling.bias")):
                parameter.uniform_(0.5, 1.5)
    model.set_experts_implementation("eager")  # the grouped products take no widths like these
    assert isinstance(model, PreTrainedModel)
    return model


def tokens(batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 97, (batch, sum(SIZES)), generator=torch.Generator().manual_seed(5))


def both(model: PreTrainedModel, cache: Callable[..., Any] = DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two whole sequences, and of the real tokens where the first one is padded at its left."""
    ids, real = tokens(), torch.ones_like(tokens())
    real[0, :PADDING] = 0
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    whole, short = cache(config=model.config), cache(config=model.config)
    outs, at = [], 0
    for size in SIZES:
        new = slice(at, at + size)
        masked = {"attention_mask": real[:, : at + size], "position_ids": positions[:, new]}
        a = model(ids[:, new], cache=whole, use_cache=True).logits
        b = model(ids[:, new], cache=short, use_cache=True, **masked).logits
        outs.append((a, b))
        at += size
    a, b = (torch.cat(part, dim=1) for part in zip(*outs, strict=True))
    return a, b[real.bool()]
