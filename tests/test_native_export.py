"""The same values in another layout: DeepSeek's own, and back."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from snapshots import same_values
from variants import (
    attention_weights,
    config_v3,
    fp8_config,
    load_all,
    native_config,
    quantize_all,
    small_checkpoint,
    split_native,
    write_checkpoint,
)

from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, FormatError, UsageError
from mla_convert.storage import AbsorbedCheckpoint


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_native_parts_are_those_of_another_writer(
    example_path: pathlib.Path, tmp_path: pathlib.Path, parts: int
) -> None:
    report = convert(example_path, tmp_path / "out", target="native", parts=parts)
    config = json.loads((example_path / "config.json").read_text())
    expected = split_native(load_all(example_path), parts, config["n_routed_experts"])
    for number, part in enumerate(expected):
        assert same_values(load_file(tmp_path / "out" / f"model{number}-mp{parts}.safetensors"), part)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert native_config(config).items() <= written.items()
    assert (tmp_path / "out/tokenizer.json").is_file() and report.qk is None and report.target == "native"
    assert report.bytes_in <= report.bytes_out


@pytest.mark.parametrize("kind", ["example", "fp8"])
def test_there_and_back_every_bit_is_the_same(
    example_path: pathlib.Path, fp8_path: pathlib.Path, tmp_path: pathlib.Path, kind: str
) -> None:
    source = {"example": example_path, "fp8": fp8_path}[kind]
    convert(source, tmp_path / "native", target="native", parts=1 if kind == "fp8" else 4)
    there = Checkpoint.open(tmp_path / "native")
    assert there.layout == "native" and (there.quantization is None) == (kind == "example")
    convert(tmp_path / "native", tmp_path / "back", target="hf", max_shard_bytes=300_000)
    convert(tmp_path / "back", tmp_path / "again", target="native", parts=1)
    convert(tmp_path / "again", tmp_path / "other", target="native", parts=1 if kind == "fp8" else 2)
    convert(tmp_path / "other", tmp_path / "last", target="hf")
    original = load_all(source)
    assert same_values(load_all(tmp_path / "back"), original) and same_values(load_all(tmp_path / "last"), original)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    back = Checkpoint.open(tmp_path / "back")
    assert [spec.geometry for spec in back.layers] == [spec.geometry for spec in Checkpoint.open(source).layers]
    # absorbed weights of one are those of the other
    convert(source, tmp_path / "absorbed")
    AbsorbedCheckpoint.open(tmp_path / "absorbed").check_source(back)


def test_parts_share_codes_and_scales(tmp_path: pathlib.Path) -> None:
    """FP8 blocks in two parts: each has its heads' codes with their own scales, and back it is what it was."""
    sizes = dict(hidden_size=200, num_attention_heads=4, q_lora_rank=130, kv_lora_rank=72, v_head_dim=64)
    config = config_v3(dtype="bfloat16", qk_nope_head_dim=64, qk_rope_head_dim=64, **sizes)
    tensors = quantize_all(attention_weights(config, dtype=torch.bfloat16))
    source = write_checkpoint(tmp_path / "source", config | {"quantization_config": fp8_config()}, tensors)
    convert(source, tmp_path / "native", target="native", parts=2)
    second = load_file(tmp_path / "native/model1-mp2.safetensors")
    rows = tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"]
    columns = tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    assert second["layers.0.attn.wkv_b.weight"].shape == (256, 72)
    assert torch.equal(second["layers.0.attn.wkv_b.scale"], rows[2:])
    assert torch.equal(second["layers.0.attn.wo.scale"], columns[:, 1:])
    convert(tmp_path / "native", tmp_path / "back", target="hf")
    assert same_values(load_all(tmp_path / "back"), tensors)


def test_a_shared_model_computes_the_same(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(example_path, tmp_path / "native", target="native", parts=2)
    convert(tmp_path / "native", tmp_path / "back", target="hf")
    ids = torch.arange(3, 19).view(2, 8)
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (example_path, tmp_path / "back")
        ]
    assert torch.equal(*logits)


def test_what_the_native_layout_leaves_out(tmp_path: pathlib.Path) -> None:
    config = config_v3(
        num_hidden_layers=2, first_k_dense_replace=2, dtype="bfloat16", num_nextn_predict_layers=1, qk_rope_head_dim=4
    )
    tensors = {name: t for layer in range(3) for name, t in attention_weights(config, layer, torch.bfloat16).items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    report = convert(write_checkpoint(tmp_path / "source", config, tensors), tmp_path / "out", target="native")
    left = 2 + len(attention_weights(config))
    assert any(f"{left} tensors were left out" in note for note in report.notes)
    kept = {name for name in tensors if ".layers.2." not in name and "inv_freq" not in name}
    assert set(Checkpoint.open(tmp_path / "out").names()) == kept


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
NOT_NATIVE: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "float32": (
        dict(dtype="float32"),
        {},
        FormatError,
        "SOURCE is in float32; DeepSeek's native layout holds bfloat16",
    ),
    "epsilon": (dict(rms_norm_eps=1e-5), {}, UsageError, "rms_norm_eps = 1e-05, and DeepSeek's .* computes with 1e-06"),
    "rope": (
        dict(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
        {},
        UsageError,
        "config has rope_parameters = .*'mscale_all_dim': 1.0.*, and DeepSeek's native code computes with",
    ),
    # Every projection's rows and columns divide by 4.
    "heads": ({}, dict(parts=4), UsageError, "parts=4: 2 attention heads cannot be shared evenly; .* a divisor of 2"),
    "rows": ({}, dict(parts=5), UsageError, r"parts=5: .*kv_b_proj.weight has 28 rows, .* a divisor of 28"),
    "tied": (dict(tie_word_embeddings=True), {}, UsageError, "tie_word_embeddings = True, and DeepSeek's .* False"),
    "unsaid": (dict(routed_scaling_factor=None), {}, UsageError, "the config has no routed_scaling_factor, for which"),
}


@pytest.mark.parametrize("case", NOT_NATIVE)
def test_what_native_cannot_hold(tmp_path: pathlib.Path, case: str) -> None:
    config, options, error, message = NOT_NATIVE[case]
    source = small_checkpoint(tmp_path / "source", **config)
    with pytest.raises(error, match=message):
        convert(source, tmp_path / "out", target="native", **options)
    assert not (tmp_path / "out").exists()


def test_tensors_without_a_native_name(tmp_path: pathlib.Path) -> None:
    source = small_checkpoint(tmp_path / "source", {"model.layers.0.self_attn.indexer.wk.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"indexer\.wk\.weight has no name in DeepSeek's native layout"):
        convert(source, tmp_path / "out", target="native")


def test_experts_and_blocks_that_cannot_be_shared(
    example_path: pathlib.Path, fp8_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UsageError, match="parts=16: 8 experts cannot be shared evenly; take a divisor of 8"):
        convert(example_path, tmp_path / "out", target="native", parts=16)
    with pytest.raises(UsageError, match=r"parts=4: .* cut through its FP8 blocks of 128"):
        convert(fp8_path, tmp_path / "out", target="native", parts=4)
