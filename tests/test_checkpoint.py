"""The same model from every layout, bit for bit, and nothing read that was not asked for."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import pickle
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from spoiling import edit, single
from variants import (
    attention_weights,
    config_v3,
    fp8_config,
    load_all,
    native_config,
    quantize_all,
    split_native,
    write_checkpoint,
    write_native,
    write_parts,
)

from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.digest import tensor_digest
from mla_convert.errors import CheckpointError
from mla_convert.source_schemes import SourceScheme

KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def causal_lm(model_type: str) -> Any:
    import transformers

    return {
        "deepseek_v2": transformers.DeepseekV2ForCausalLM,
        "deepseek_v3": transformers.DeepseekV3ForCausalLM,
    }[model_type]


def logits(config: dict[str, Any], state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Float32 logits of random tokens, of a transformers model with these weights."""
    kind = causal_lm(config["model_type"])
    made = kind.config_class(**json.loads(json.dumps(config)))
    model = kind.from_pretrained(None, config=made, state_dict=dict(state), dtype=torch.float32)
    tokens = torch.randint(0, config["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(tokens).logits


def by_formula(folder: pathlib.Path, block: int = 128) -> dict[str, torch.Tensor]:
    """Every weight of an FP8 folder: code times the scale at ``[i // block, j // block]``, read without our reader."""
    stored = load_all(folder)
    weights = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            i, j = (torch.arange(size) // block for size in tensor.shape)
            tensor = tensor.float() * stored[f"{name}_scale_inv"][i[:, None], j[None, :]]
        weights[name] = tensor
    return weights


@pytest.fixture(scope="module")
def small_v2(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random deepseek_v2 model without a query rank, with expert groups, saved by transformers in one file."""
    config = config_v3(
        model_type="deepseek_v2",
        architectures=["DeepseekV2ForCausalLM"],
        q_lora_rank=None,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    kind = causal_lm("deepseek_v2")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small-v2")
    kind(kind.config_class(**config)).save_pretrained(folder)
    return folder


def test_layouts(example_path: pathlib.Path, fp8_path: pathlib.Path, native_path: pathlib.Path) -> None:
    plain, fp8, native = (Checkpoint.open(path) for path in (example_path, fp8_path, native_path))
    assert [checkpoint.layout for checkpoint in (plain, fp8, native)] == ["sharded", "sharded", "native"]
    assert plain.names() == native.names() == [name for name in fp8.names() if not name.endswith("_scale_inv")]
    assert plain.weight_names() == native.weight_names() == fp8.weight_names() == plain.names()
    assert plain.names() == sorted(load_all(example_path))
    assert plain.layers == fp8.layers == native.layers and len(plain.layers) == 4
    assert plain.quantization is None and native.quantization is None
    assert fp8.scheme(KV_B) == SourceScheme("float8", block=(128, 128)) and plain.scheme(KV_B) is None
    assert plain.config == fp8.config and fp8.raw_config["quantization_config"]["quant_method"] == "fp8"
    assert native.raw_config["dim"] == native.config["hidden_size"] == 192


def test_tensors_as_stored(example_path: pathlib.Path, fp8_path: pathlib.Path) -> None:
    for path in (example_path, fp8_path):
        checkpoint, stored = Checkpoint.open(path), load_all(path)
        assert checkpoint.names() == sorted(stored)
        for name, tensor in stored.items():
            read, info = checkpoint.read(name), checkpoint.info(name)
            assert read.dtype == info.dtype == tensor.dtype and read.shape == info.shape == tensor.shape
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))
            digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            assert checkpoint.digest(name) == digest == tensor_digest(read)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_native_is_the_same_tensors(example_path: pathlib.Path, tmp_path: pathlib.Path, parts: int) -> None:
    plain = Checkpoint.open(example_path)
    native = Checkpoint.open(write_native(example_path, tmp_path, parts))
    for name in plain.names():
        assert torch.equal(plain.read(name), native.read(name))
        assert plain.digest(name) == native.digest(name)
        assert plain.info(name).shape == native.info(name).shape
    names = {f"model{part}-mp{parts}.safetensors" for part in range(parts)}
    assert set(native.info(O_PROJ).files) == names
    assert len(native.info("model.layers.1.mlp.experts.3.up_proj.weight").files) == 1


def test_native_gives_the_same_logits(example_path: pathlib.Path, native_path: pathlib.Path) -> None:
    plain, native = Checkpoint.open(example_path), Checkpoint.open(native_path)
    expected = logits(plain.raw_config, load_all(example_path))
    assert torch.equal(logits(plain.config, plain.state_dict(torch.float32)), expected)
    assert torch.equal(logits(native.config, native.state_dict(torch.float32)), expected)


def test_fp8_gives_the_formula_s_logits(fp8_path: pathlib.Path) -> None:
    checkpoint, weights = Checkpoint.open(fp8_path), by_formula(fp8_path)
    state = checkpoint.state_dict(torch.float32)
    assert sorted(state) == sorted(weights)
    assert all(torch.equal(state[name], weight.float()) for name, weight in weights.items())
    assert torch.equal(logits(checkpoint.config, state), logits(checkpoint.config, weights))
    by_default = checkpoint.state_dict()
    assert all(torch.equal(by_default[name], weight.to(by_default[name].dtype)) for name, weight in weights.items())
    assert {tensor.dtype for tensor in by_default.values()} == {torch.bfloat16}


def test_v2_without_a_query_rank(small_v2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(small_v2)
    assert checkpoint.layout == "single"
    assert checkpoint.layers[1].query == "model.layers.1.self_attn.q_proj.weight"
    parts = split_native(load_all(small_v2), 2, 4)
    native = Checkpoint.open(write_parts(tmp_path, native_config(checkpoint.config), parts))
    assert native.family.model_type == "deepseek_v2" and native.layers == checkpoint.layers
    expected = logits(checkpoint.raw_config, load_all(small_v2))
    assert torch.equal(logits(native.config, native.state_dict(torch.float32)), expected)


def test_native_fp8(tmp_path: pathlib.Path) -> None:
    """Scales are joined along the same axis as their weights, where each part has whole blocks."""
    config = config_v3(num_attention_heads=4, qk_nope_head_dim=64, v_head_dim=64, qk_rope_head_dim=64)
    stored = quantize_all(attention_weights(config))
    plain = Checkpoint.open(write_checkpoint(tmp_path / "hf", config | {"quantization_config": fp8_config()}, stored))
    parts = split_native(stored, 2, 2)
    native = Checkpoint.open(write_parts(tmp_path / "native", native_config(config, dtype="fp8"), parts))
    assert native.names() == plain.names() == sorted(stored)
    for name in (KV_B, O_PROJ):
        assert native.companions(name) == plain.companions(name) == (f"{name}_scale_inv",)
        assert len(native.info(f"{name}_scale_inv").files) == 2
        assert native.digest(f"{name}_scale_inv") == plain.digest(f"{name}_scale_inv")
        assert torch.equal(native.weight(name), plain.weight(name, torch.bfloat16))
    assert native.info(KV_B).shape == (512, 12) and native.info(f"{KV_B}_scale_inv").shape == (4, 1)


def test_dtypes(example_path: pathlib.Path, fp8_path: pathlib.Path) -> None:
    plain, fp8 = Checkpoint.open(example_path), Checkpoint.open(fp8_path)
    norm = "model.norm.weight"
    for checkpoint in (plain, fp8):
        assert checkpoint.source_dtype(KV_B) == checkpoint.source_dtype(norm) == torch.bfloat16
        assert checkpoint.weight(KV_B).dtype == torch.bfloat16
        assert checkpoint.weight(KV_B, torch.float32).dtype == torch.float32
    assert (fp8.quantized(KV_B), fp8.companions(KV_B)) == (True, (f"{KV_B}_scale_inv",))
    assert (fp8.quantized(norm), fp8.companions(norm)) == (False, ())
    assert (plain.quantized(KV_B), plain.companions(KV_B)) == (False, ())
    assert fp8.info(KV_B).dtype == torch.float8_e4m3fn


def test_a_tensor_keeps_its_own_dtype(tmp_path: pathlib.Path) -> None:
    config = config_v3(dtype="float16", quantization_config=fp8_config())
    tensors = quantize_all(attention_weights(config, dtype=torch.bfloat16)) | {"bias": torch.ones(3)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, tensors))
    assert checkpoint.source_dtype("bias") == checkpoint.weight("bias").dtype == torch.float32
    norm = "model.layers.0.self_attn.kv_a_layernorm.weight"
    assert checkpoint.source_dtype(norm) == checkpoint.weight(norm).dtype == torch.bfloat16
    assert checkpoint.source_dtype(KV_B) == torch.float16


def test_the_config_s_dtype_is_that_of_codes(tmp_path: pathlib.Path) -> None:
    stored = quantize_all(attention_weights(config_v3()))
    for name in ("float16", "float32"):
        config = config_v3(dtype=name, quantization_config=fp8_config())
        checkpoint = Checkpoint.open(write_checkpoint(tmp_path / name, config, stored))
        assert checkpoint.source_dtype(KV_B) == checkpoint.weight(KV_B).dtype == getattr(torch, name)


def test_scales_of_other_kinds(tmp_path: pathlib.Path) -> None:
    """Power-of-two scales as exponent bytes give what the same scales in float32 give."""
    stored = quantize_all(attention_weights(config_v3()), (16, 16))
    config = config_v3(quantization_config=fp8_config((16, 16), scale_fmt="ue8m0"))
    scales = {name: tensor.log2().round() for name, tensor in stored.items() if name.endswith("_scale_inv")}
    forms = {
        "float32": {name: scale.exp2() for name, scale in scales.items()},
        "uint8": {name: (scale + 127).to(torch.uint8) for name, scale in scales.items()},
        "e8m0": {name: (scale + 127).to(torch.uint8).view(torch.float8_e8m0fnu) for name, scale in scales.items()},
    }
    opened = {
        form: Checkpoint.open(write_checkpoint(tmp_path / form, config, stored | these))
        for form, these in forms.items()
    }
    assert opened["e8m0"].info(f"{KV_B}_scale_inv").dtype == torch.float8_e8m0fnu
    expected = opened["float32"].state_dict()
    for form in ("uint8", "e8m0"):
        state = opened[form].state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())


def test_the_extra_layer_is_found_and_checked(tmp_path: pathlib.Path) -> None:
    """A multi-token-prediction layer stands behind the last one; transformers leaves it out."""
    config = config_v3()
    extra = attention_weights(config, layer=1)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "a", config, attention_weights(config) | extra))
    assert [layer.index for layer in checkpoint.layers] == [0]
    assert [layer.index for layer in checkpoint.extra_layers] == [1]
    assert set(checkpoint.extra_layers[0].shapes()) <= set(checkpoint.names())
    del extra["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match="layer 1 lacks model.layers.1.self_attn.o_proj.weight"):
        Checkpoint.open(write_checkpoint(tmp_path / "b", config, attention_weights(config) | extra))


def test_integers_come_as_they_are(tmp_path: pathlib.Path) -> None:
    config = config_v3()
    tensors = attention_weights(config) | {"count": torch.arange(3), "none": torch.zeros(0, 4)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, tensors))
    assert torch.equal(checkpoint.weight("count", torch.float32), torch.arange(3))
    assert checkpoint.weight("none").shape == (0, 4)


def test_use(example_path: pathlib.Path) -> None:
    with Checkpoint.open(str(example_path)) as checkpoint:
        assert KV_B in checkpoint and "kv_b" not in checkpoint and 3 not in checkpoint
        assert "deepseek_v3" in repr(checkpoint) and "129 tensors" in repr(checkpoint)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again.layers == checkpoint.layers
    assert torch.equal(again.read(KV_B), checkpoint.read(KV_B))


def test_tensors_are_the_caller_s_own(example_path: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(example_path)
    before = checkpoint.digest(KV_B)
    checkpoint.read(KV_B).zero_()
    checkpoint.weight(KV_B).zero_()
    assert checkpoint.digest(KV_B) == before
    assert checkpoint.read(KV_B).untyped_storage().nbytes() == 512 * 64 * 2


def test_many_threads(example_path: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(example_path)
    names = checkpoint.names() * 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(checkpoint.digest, names))
    assert digests == [checkpoint.digest(name) for name in names]


def test_a_hub_cache_keeps_links(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """snapshots/<commit>/file is a link to ../../blobs/<hash>, outside the folder that is opened."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(example_path.iterdir())):
        if file.suffix in (".json", ".safetensors"):
            (blobs / str(number)).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert Checkpoint.open(snapshot).digest(KV_B) == Checkpoint.open(example_path).digest(KV_B)


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for."""
    fields = pathlib.Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


def test_only_the_tensor_asked_for_is_read(tmp_path: pathlib.Path) -> None:
    """Beside a tensor of 64 GB, which would neither fit into memory nor be read in time."""
    config, large = config_v3(), 64 << 30
    weights = attention_weights(config)
    header: dict[str, Any] = {"large": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]}}
    end = large
    for name, tensor in weights.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    write_checkpoint(tmp_path, config, {})
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        os.truncate(stream.fileno(), 8 + len(text) + large)
        stream.seek(0, os.SEEK_END)
        for tensor in weights.values():
            stream.write(tensor.numpy().tobytes())
    before = bytes_read()
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("large").shape == (large,)
    assert torch.equal(checkpoint.read(KV_B), weights[KV_B])
    # Config, a header read with Python's buffer of 8 KiB to 1 MiB, and the tensor.
    assert bytes_read() - before < (2 << 20) + len(text) + weights[KV_B].nbytes


def test_a_shard_may_hold_more_than_the_index_says(tmp_path: pathlib.Path) -> None:
    """transformers loads every tensor of the shards it opens, so these count as there."""
    config = config_v3()
    write_checkpoint(tmp_path, config, attention_weights(config), {"a": torch.ones(1)})
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    assert "b" in Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "a.", "..", "a\nb.weight", "../../a.weight", "weight", "ä b.weight"])
def test_any_name_may_stand_beside_the_model_s(name: str, tmp_path: pathlib.Path) -> None:
    """safetensors names are any text; those that are none of the model's are carried along."""
    single(tmp_path / "source")
    edit(tmp_path / "source", lambda tensors: tensors.update({name: torch.arange(3.0)}))
    assert Checkpoint.open(tmp_path / "source").read(name).tolist() == [0, 1, 2]
    convert(tmp_path / "source", tmp_path / "hf", target="hf")
    assert Checkpoint.open(tmp_path / "hf").read(name).tolist() == [0, 1, 2]
