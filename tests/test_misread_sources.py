"""Weights that transformers dequantized otherwise than they were meant are refused, and the message says what to do."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import models
import pytest
import torch
import variants
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import mla_convert
from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import MismatchError
from mla_convert.patches.loading import load_original

NAME = "model.layers.{}.self_attn.kv_b_proj.weight"
NAMED = "FP8 blocks, and transformers .* misreads.*mla_convert.load"
#: W_UKV [5·(16 + 16), 192]: neither its rows nor its columns are whole blocks of 128.
PARTIAL: dict[str, Any] = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 192,
    "dtype": torch.bfloat16,
}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["re:.*kv_b_proj"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}


def rewrite(source: pathlib.Path, target: pathlib.Path, coded: variants.Tensors, config: dict[str, Any]) -> None:
    """``source`` with its kv_b_proj in codes."""
    plain = {name: tensor for name, tensor in variants.load_all(source).items() if "kv_b_proj" not in name}
    given = json.loads((source / "config.json").read_text())
    variants.write_checkpoint(target, given | {"quantization_config": config}, plain | coded)


def projections(source: pathlib.Path) -> variants.Tensors:
    return {name: tensor for name, tensor in variants.load_all(source).items() if "kv_b_proj" in name}


@pytest.fixture(scope="module")
def partial_blocks(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose kv_b_proj alone is in FP8, in partial blocks."""
    folder = tmp_path_factory.mktemp("partial")
    models.deepseek_v3(**PARTIAL).save_pretrained(folder / "plain")
    coded = variants.quantize_all(projections(folder / "plain"))
    plain = {
        name.removesuffix(".weight")
        for name, tensor in variants.load_all(folder / "plain").items()
        if tensor.dim() == 2 and "kv_b_proj" not in name
    }
    config = variants.fp8_config(modules_to_not_convert=sorted(plain))
    rewrite(folder / "plain", folder / "source", coded, config)
    return folder / "source"


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_partial_blocks_as_transformers_loads_them(
    partial_blocks: pathlib.Path, form: str, tmp_path: pathlib.Path
) -> None:
    config = json.loads((partial_blocks / "config.json").read_text())["quantization_config"]
    options = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=config["modules_to_not_convert"])
    model = AutoModelForCausalLM.from_pretrained(partial_blocks, quantization_config=options, dtype=torch.bfloat16)
    meant = Checkpoint.open(partial_blocks).weight(NAME.format(0))
    found = model.model.layers[0].self_attn.kv_b_proj.weight
    assert found.shape == meant.shape == (160, 192)
    assert models.relative(found.detach(), meant) > 0.02  # rounding would be 2 ** -9; a wrong scale is as wrong as this
    mla_convert.convert(partial_blocks, tmp_path / "out", form=form)
    with pytest.raises(MismatchError, match=f"layer 0: .*{NAMED}"):
        mla_convert.patch(model, tmp_path / "out")
    mla_convert.patch(load_original(partial_blocks, dtype=torch.bfloat16), tmp_path / "out")  # as the message says


def test_blocks_taken_to_be_of_another_size(fp8_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Blocks taken to be as large as rows over grid rows, which is what transformers does on a CPU."""
    mla_convert.convert(fp8_path, tmp_path / "out")
    model = load_original(fp8_path, dtype=torch.bfloat16)
    mla_convert.patch(model, tmp_path / "out").unpatch()
    checkpoint = Checkpoint.open(fp8_path)
    name = NAME.format(0)
    codes, scale = checkpoint.read(name).float(), checkpoint.read(name + "_scale_inv")
    wrong = scale.flip(0).repeat_interleave(codes.shape[0] // scale.shape[0], 0)
    wrong = wrong.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    model.model.layers[0].self_attn.kv_b_proj.weight.data = (codes * wrong).bfloat16()
    with pytest.raises(MismatchError, match=f"layer 0: .*{NAMED}"):
        mla_convert.patch(model, tmp_path / "out")


def test_other_codes_are_called_by_their_own_name(tmp_path: pathlib.Path) -> None:
    models.deepseek_v3(dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    coded: variants.Tensors = {}
    for name, weight in projections(tmp_path / "plain").items():
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        coded |= {name: (weight.float() / scale).round().to(torch.int8), f"{name}_scale": scale}
    rewrite(tmp_path / "plain", tmp_path / "source", coded, INT8)
    mla_convert.convert(tmp_path / "source", tmp_path / "out")
    model = load_original(tmp_path / "source", dtype=torch.bfloat16)
    mla_convert.patch(model, tmp_path / "out").unpatch()
    model.model.layers[1].self_attn.kv_b_proj.weight.data[:16] *= 1.05
    said = r"layer 1: .*stored in codes \(int-quantized, 8 bits, a scale per row\): load it with mla_convert.load"
    with pytest.raises(MismatchError, match=said) as refused:
        mla_convert.patch(model, tmp_path / "out")
    assert "FP8" not in str(refused.value) and "misreads" not in str(refused.value)
