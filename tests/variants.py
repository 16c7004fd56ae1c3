"""Write checkpoints in the forms in which DeepSeek models are found, from the example or from nothing."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
LARGEST_CODE = 448.0

# Last word of a module's name -> DeepSeek's word, and the axis along which parts share it.
NATIVE_WORDS: dict[str, tuple[str, int | None]] = {
    "embed_tokens": ("embed", 0),
    "lm_head": ("head", 0),
    "norm": ("norm", None),
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0),
    "q_a_proj": ("wq_a", None),
    "q_a_layernorm": ("q_norm", None),
    "q_b_proj": ("wq_b", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None),
    "kv_a_layernorm": ("kv_norm", None),
    "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1),
    "gate": ("gate", None),
    "gate_proj": ("w1", 0),
    "down_proj": ("w2", 1),
    "up_proj": ("w3", 0),
}
NATIVE_CONFIG = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "first_k_dense_replace": "n_dense_layers",
    "num_attention_heads": "n_heads",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "n_group": "n_expert_groups",
    "topk_group": "n_limited_groups",
    "routed_scaling_factor": "route_scale",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
NATIVE_ROPE = {
    "original_max_position_embeddings": "original_seq_len",
    "rope_theta": "rope_theta",
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
}

Tensors = dict[str, torch.Tensor]


def config_v3(**changes: Any) -> dict[str, Any]:
    """A deepseek_v3 config of one dense layer, whose sizes all differ."""
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 40,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
    }
    return config | changes


def attention_weights(config: dict[str, Any], layer: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random attention weights of one layer, in the shapes that the config gives."""
    heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    hidden, rank, latent, value = (config[key] for key in ("hidden_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    if rank is None:
        shapes["q_proj"] = (heads * (nope + rope), hidden)
    else:
        shapes |= {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (heads * (nope + rope), rank)}
    generator = torch.Generator().manual_seed(layer)
    return {
        f"model.layers.{layer}.self_attn.{word}.weight": torch.randn(shape, generator=generator).to(dtype)
        for word, shape in shapes.items()
    }


def write_checkpoint(folder: pathlib.Path, config: dict[str, Any], *shards: Tensors) -> pathlib.Path:
    """One ``model.safetensors``, or shards with an index where several are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def load_all(folder: pathlib.Path) -> Tensors:
    """Every tensor of a folder, through safetensors' own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, columns] and float32 scales, one for each block, partial blocks at the edges included."""
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(down * block[0], across * block[1])
    padded[:rows, :columns] = weight
    tiles = padded.view(down, block[0], across, block[1])
    scale = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-12) / LARGEST_CODE
    codes = (tiles / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def quantize_all(tensors: Tensors, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensors:
    """Every projection in FP8 with its scale beside it, as in DeepSeek-V3; norms, router and embeddings as they are."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("proj.weight", "proj_with_mqa.weight")):
            out[name], out[f"{name}_scale_inv"] = quantize_fp8(tensor, block)
        else:
            out[name] = tensor
    return out


def fp8_config(block: tuple[int, int] = (BLOCK, BLOCK), **changes: Any) -> dict[str, Any]:
    """The ``quantization_config`` of public FP8 checkpoints."""
    given = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return given | changes


def write_fp8(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """``source`` in FP8 blocks, over three shards; every other scale stands in another shard than its weight."""
    shards: list[Tensors] = [{}, {}, {}]
    for number, (name, tensor) in enumerate(sorted(quantize_all(load_all(source)).items())):
        shards[number % 3][name] = tensor
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(target, config | {"quantization_config": fp8_config()}, *shards)
    return _copy_tokenizer(source, target)


def native_name(name: str) -> tuple[str, int | None]:
    """DeepSeek's name of an HF tensor, and the axis along which parts share it."""
    if name.endswith("e_score_correction_bias"):
        return name.removeprefix("model.").replace("mlp.gate.e_score_correction_bias", "ffn.gate.bias"), None
    *path, word, parameter = name.removeprefix("model.").split(".")
    new, axis = NATIVE_WORDS[word]
    parameter = {"weight": "weight", "weight_scale_inv": "scale"}[parameter]
    path = [{"self_attn": "attn", "mlp": "ffn"}.get(step, step) for step in path]
    return ".".join([*path, new, parameter]), axis


def split_native(tensors: Tensors, parts: int, experts: int) -> list[Tensors]:
    """Shares of each part: heads and columns, whole experts, and copies of the rest."""
    split: list[Tensors] = [{} for _ in range(parts)]
    for name, tensor in tensors.items():
        new, axis = native_name(name)
        if ".experts." in new:
            expert = int(new.split(".experts.")[1].split(".")[0])
            split[expert * parts // experts][new] = tensor
            continue
        shares = [tensor] * parts if axis is None else tensor.chunk(parts, axis)
        for part, share in zip(split, shares, strict=True):
            part[new] = share.contiguous()
    return split


def native_config(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """DeepSeek's own keys for an HF config."""
    native = {new: config[old] or 0 for old, new in NATIVE_CONFIG.items()}
    rope = config["rope_parameters"]
    native |= {new: rope[old] for old, new in NATIVE_ROPE.items() if old in rope}
    native["dtype"] = "bf16"
    if config["model_type"] == "deepseek_v3":
        native["score_func"] = "sigmoid"
    return native | changes


def write_parts(folder: pathlib.Path, config: dict[str, Any], parts: list[Tensors]) -> pathlib.Path:
    """DeepSeek's parts and config in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        save_file(part, folder / f"model{number}-mp{len(parts)}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_native(source: pathlib.Path, target: pathlib.Path, parts: int) -> pathlib.Path:
    """``source`` in DeepSeek's own layout."""
    config = json.loads((source / "config.json").read_text())
    write_parts(target, native_config(config), split_native(load_all(source), parts, config["n_routed_experts"]))
    return _copy_tokenizer(source, target)


def _copy_tokenizer(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, target / file)
    return target


def small_checkpoint(folder: pathlib.Path, extra: dict[str, torch.Tensor] | None = None, **config: Any) -> pathlib.Path:
    full = config_v3(**{"dtype": "bfloat16"} | config)
    dtype = getattr(torch, full["dtype"])
    return write_checkpoint(folder, full, attention_weights(full, dtype=dtype) | (extra or {}))
