"""Small random models with unusual dimensions, made from configs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "q_lora_rank": 28,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

#: Dimensions under which each side alone, or both, read fewer numbers when fused.
KEY_FUSED = {"kv_lora_rank": 16, "qk_nope_head_dim": 32, "v_head_dim": 8, "q_lora_rank": 64, "hidden_size": 64}
VALUE_FUSED = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 32, "q_lora_rank": 24, "hidden_size": 64}
BOTH_FUSED = {"kv_lora_rank": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64, "hidden_size": 64}


def deepseek_v3(
    *, seed: int = 0, attn: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A DeepSeek-V3 model with YaRN and mscale, in evaluation mode."""
    config = DeepseekV3Config(**COMMON | {"rope_parameters": dict(YARN)} | changes)
    return _make(DeepseekV3ForCausalLM, config, seed, attn, dtype)


def deepseek_v2(
    *, seed: int = 0, attn: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A DeepSeek-V2-Lite-like model: no query rank, unless ``changes`` gives one."""
    more = {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False, "rope_parameters": dict(YARN)}
    config = DeepseekV2Config(**COMMON | more | changes)
    return _make(DeepseekV2ForCausalLM, config, seed, attn, dtype)


def _make(kind: Any, config: Any, seed: int, attn: str, dtype: torch.dtype) -> PreTrainedModel:
    config._attn_implementation = attn
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        # Larger than the initialisation, so that attention is not uniform and a fault in it shows.
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.dim() == 2:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids [batch, length] without special tokens."""
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the range of ``b``."""
    return float((a - b).abs().max() / (b.max() - b.min()))


def worst(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest :func:`relative` of several pairs. NaN fails here: Python's ``max`` would pass over it."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and bool(a.isfinite().all()) and bool(b.isfinite().all())
    return float(torch.tensor([relative(a, b) for a, b in zip(found, expected, strict=True)]).max())
