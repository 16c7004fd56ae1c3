"""Checkpoints that are refused: each with its class, what was found, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
import torch
from spoiling import (
    INDEX,
    KV_B,
    PART_0,
    PART_1,
    PREFIX,
    SHARD_1,
    SHARD_2,
    cut,
    drop,
    edit,
    entry,
    fp8,
    header,
    native,
    only,
    put,
    reindex,
    remove,
    rename,
    sharded,
    single,
    write,
)
from variants import attention_weights, config_v3, fp8_config, native_config, quantize_all, write_checkpoint

from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import CheckpointError, FormatError, MLAConvertError, UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class Case:
    """``spoil`` changes a sound checkpoint in a folder; ``words`` must stand in the message."""

    spoil: Callable[[pathlib.Path], object]
    words: tuple[str, ...]
    error: type[MLAConvertError] = CheckpointError


SINGLE: dict[str, Case] = {
    "no config": Case(remove("config.json"), ("has no config.json", "take the one that belongs")),
    "empty config": Case(write("config.json", ""), ("config.json is not valid JSON", "line 1", "correct it")),
    "broken config": Case(write("config.json", '{"a": 1,}'), ("config.json is not valid JSON",)),
    "config of another kind": Case(write("config.json", "[1]"), ("holds a JSON list, not an object",)),
    "config in no text": Case(write("config.json", b"\xff\xfe{}"), ("config.json is not valid JSON",)),
    "bottomless config": Case(write("config.json", '{"a":' + "[" * 200_000), ("config.json is not valid JSON",)),
    "config with a key twice": Case(write("config.json", '{"a": 1, "b": 2, "a": 3}'), ("names a twice",)),
    "not MLA": Case(
        write("config.json", '{"model_type": "llama"}'),
        ("'llama'", "does not use MLA", "deepseek_v2, deepseek_v3"),
        UnsupportedModelError,
    ),
    "a wrapper": Case(
        write("config.json", json.dumps({"model_type": "kimi_vl", "text_config": config_v3()})),
        ("'kimi_vl'", "'deepseek_v3'", "text_config"),
        UnsupportedModelError,
    ),
    "unknown quantization": Case(
        lambda folder: (
            single(folder, quantization_config={"quant_method": "vptq"}),
            put(kv_b_proj=torch.ones(28, 12, dtype=torch.int8))(folder),
        ),
        (KV_B, "int8", "'vptq'", "read are fp8", "dequantize the checkpoint with its own tools"),
        FormatError,
    ),
    "ModelOpt's file of another kind": Case(write("hf_quant_config.json", "[]"), ("holds a JSON list",)),
    "ModelOpt without an algorithm": Case(
        write("hf_quant_config.json", '{"quantization": {}}'), ("quant_algo = None (ModelOpt)", "NVFP4"), FormatError
    ),
    "unknown dtype": Case(lambda folder: single(folder, dtype="int4"), ("dtype = 'int4'", "bfloat16"), FormatError),
    "no weights": Case(only(), ("no weights", "model.safetensors, or model.safetensors.index.json")),
    "pickled": Case(only("pytorch_model.bin"), ("pickled", "save_pretrained")),
    "pickled shards": Case(only("pytorch_model-00001-of-00002.bin"), ("pickled", "save_pretrained")),
    "GGUF": Case(only("deepseek.Q4_K_M.gguf"), ("GGUF", "safetensors")),
    "shards without an index": Case(only(SHARD_1, SHARD_2), (SHARD_1, f"needed are model.safetensors, or {INDEX}")),
    "cut in the data": Case(cut("model.safetensors", -1), ("model.safetensors is cut short", "fetch the file again")),
    "cut in the header": Case(cut("model.safetensors", 200), ("is cut short: 200 bytes",)),
    "cut at the start": Case(cut("model.safetensors", 5), ("is cut short: 5 bytes",)),
    "empty file": Case(cut("model.safetensors", 0), ("is cut short: 0 bytes",)),
    "too long": Case(
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes() + b"x"),
        ("is longer", "fetch the file again"),
    ),
    "not safetensors": Case(write("model.safetensors", b"\x80" * 64), ("is not a safetensors file",)),
    "LFS pointer": Case(
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("Git LFS pointer", "git lfs pull"),
    ),
    "broken link": Case(
        lambda f: (remove("model.safetensors")(f), (f / "model.safetensors").symlink_to("../blobs/gone")),
        ("model.safetensors cannot be read", "No such file"),
    ),
    "broken header": Case(header('{"a"'), ("the header of", "is not valid JSON", "fetch the file again")),
    "header of another kind": Case(header("3"), ("holds a JSON int",)),
    "a tensor twice in the header": Case(header('{"a": {}, "a": {}}'), ("names a twice",)),
    "no dtype": Case(header('{"a": {"shape": [], "data_offsets": [0, 4]}}', bytes(4)), ("describes a in a damaged",)),
    "dtype of another kind": Case(entry(dtype=["F32"]), ("describes a in a damaged way",)),
    "unknown tensor dtype": Case(entry(dtype="F4"), ("a in", "dtype 'F4'", "F8_E4M3"), FormatError),
    "negative size": Case(entry(shape=[-2]), ("describes a in a damaged way",)),
    "shape of another kind": Case(entry(shape=None), ("describes a in a damaged way",)),
    "three offsets": Case(entry(data_offsets=[0, 4, 8]), ("describes a in a damaged way",)),
    "shape and bytes differ": Case(entry(shape=[3]), ("a in", "has 8 bytes", "shape [3] in F32 needs 12")),
    "enormous shape": Case(entry(shape=[2**62, 2**62]), ("has 8 bytes",)),
    "empty and enormous": Case(entry(shape=[0, 2**63], data_offsets=[0, 0]), ("a in", "larger than any tensor")),
    "half a character": Case(
        header('{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', bytes(4)), ("in a damaged way",)
    ),
    "a pipe": Case(
        lambda f: (remove("model.safetensors")(f), os.mkfifo(f / "model.safetensors")), ("model.safetensors is not a",)
    ),
    "a gap": Case(entry(data_offsets=[4, 12]), ("leaves a gap or an overlap before a",)),
    "missing tensor": Case(drop(KV_B), ("layer 0 lacks", KV_B, "fetch it again")),
    "missing norm": Case(drop(f"{PREFIX}.kv_a_layernorm.weight"), ("layer 0 lacks", "kv_a_layernorm")),
    "missing query": Case(drop(f"{PREFIX}.q_b_proj.weight"), ("layer 0 lacks", "q_b_proj")),
    "missing layer": Case(
        lambda folder: write_checkpoint(folder, config_v3(num_hidden_layers=2), attention_weights(config_v3())),
        ("layer 1 lacks model.layers.1.self_attn",),
    ),
    "kv_b of another shape": Case(
        put(kv_b_proj=torch.ones(28, 13)), (KV_B, "has shape [28, 13]", "makes it [28, 12]", "config.json")
    ),
    "heads and widths swapped": Case(put(q_b_proj=torch.ones(20, 24)), ("q_b_proj", "[20, 24]", "[24, 20]")),
    "o of another shape": Case(put(o_proj=torch.ones(40, 16)), ("o_proj", "[40, 16]", "[40, 12]")),
    "kv_a without the rotary rows": Case(
        put(kv_a_proj_with_mqa=torch.ones(12, 40)), ("kv_a_proj_with_mqa", "[12, 40]", "[16, 40]")
    ),
    "kv_b as a vector": Case(put(kv_b_proj=torch.ones(336)), ("has shape [336]",)),
    "integer weight": Case(
        put(kv_b_proj=torch.ones(28, 12, dtype=torch.int8)), (KV_B, "int8", "float8_e4m3fn"), FormatError
    ),
    "a bias where none belongs": Case(
        lambda folder: edit(folder, lambda t: t.update({f"{PREFIX}.kv_b_proj.bias": torch.ones(28)})),
        ("has model.layers.0.self_attn.kv_b_proj.bias", "another architecture"),
    ),
    "surplus scale": Case(
        lambda folder: edit(folder, lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(1, 1)})),
        (f"{KV_B}_scale_inv is surplus", "float32", "remove its scale"),
        FormatError,
    ),
    "FP8 without a block size": Case(
        lambda folder: write_checkpoint(folder, config_v3(), quantize_all(attention_weights(config_v3()))),
        ("float8_e4m3fn", "no quantization_config", "weight_block_size"),
        FormatError,
    ),
}

SHARDED: dict[str, Case] = {
    "missing shard": Case(remove(SHARD_2), (f"lacks {SHARD_2}", f"named in {INDEX}", "fetch")),
    "shard in a blob that is gone": Case(
        lambda f: (remove(SHARD_1)(f), (f / SHARD_1).symlink_to("../blobs/gone")), (f"lacks {SHARD_1}",)
    ),
    "cut shard": Case(cut(SHARD_2, -3), (f"{SHARD_2} is cut short",)),
    "indexed tensor not in its file": Case(
        lambda folder: edit(folder, lambda tensors: tensors.pop(f"{PREFIX}.q_b_proj.weight"), SHARD_2),
        (f"places {PREFIX}.q_b_proj.weight in {SHARD_2}", "does not have it"),
    ),
    "index names the other file": Case(
        reindex(lambda where: where.update({KV_B: SHARD_2})), (f"places {KV_B} in {SHARD_2}", "does not have it")
    ),
    "a tensor in two files": Case(
        lambda folder: edit(folder, lambda t: t.update({KV_B: torch.ones(28, 12)}), SHARD_2),
        (f"{KV_B} is in two files", SHARD_1, SHARD_2),
    ),
    "stray single file": Case(
        lambda folder: shutil.copy(folder / SHARD_1, folder / "model.safetensors"),
        ("both model.safetensors and", "transformers uses model.safetensors", "remove"),
    ),
    "broken index": Case(write(INDEX, "{"), (INDEX, "is not valid JSON", "fetch the index again")),
    "index without a map": Case(write(INDEX, '{"metadata": {}}'), ("has no weight_map",)),
    "index with an empty map": Case(write(INDEX, '{"weight_map": {}}'), ("has no weight_map",)),
    "map of another kind": Case(write(INDEX, '{"weight_map": []}'), ("has no weight_map",)),
    "index of another kind": Case(write(INDEX, "[]"), ("holds a JSON list",)),
    "a tensor twice in the index": Case(write(INDEX, '{"weight_map": {"a": "b", "a": "c"}}'), ("names a twice",)),
    "file name of another kind": Case(reindex(lambda where: where.update({KV_B: 3})), ("names the file 3",)),
    "pickled shard": Case(
        reindex(lambda where: where.update({KV_B: "pytorch_model.bin"})), ("'pytorch_model.bin'", "safetensors")
    ),
} | {
    f"outside: {name}": Case(
        reindex(lambda where, name=name: where.update({KV_B: name})),  # type: ignore[misc]
        (repr(name), "outside its own folder"),
    )
    for name in (
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "sub/../../model.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "\\\\host\\share\\model.safetensors",
    )
}

FP8: dict[str, Case] = {
    "missing scale": Case(drop(f"{KV_B}_scale_inv"), (f"its scale {KV_B}_scale_inv is missing",), FormatError),
    "scale of nothing": Case(
        lambda folder: edit(folder, lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1, 1)})),
        ("lm_head.weight_scale_inv has no weight beside it",),
        FormatError,
    ),
    "grid of the wrong size": Case(
        lambda folder: edit(folder, lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(1, 1)})),
        ("_scale_inv has shape [1, 1]", "[28, 12]", "[16, 16]", "needs [2, 1]"),
        FormatError,
    ),
    "grid rounded down": Case(
        lambda folder: edit(folder, lambda t: t.update({f"{PREFIX}.o_proj.weight_scale_inv": torch.ones(2, 1)})),
        ("o_proj.weight_scale_inv has shape [2, 1]", "needs [3, 1]"),
        FormatError,
    ),
    "another block size in the config": Case(
        lambda folder: write("config.json", json.dumps(config_v3(quantization_config=fp8_config((32, 32)))))(folder),
        ("in blocks of [32, 32]",),
        FormatError,
    ),
    "scale of another kind": Case(
        lambda folder: edit(folder, lambda t: t.update({f"{KV_B}_scale_inv": torch.ones(2, 1, dtype=torch.int32)})),
        ("_scale_inv is stored in int32", "float8_e8m0fnu"),
        FormatError,
    ),
    "another FP8": Case(
        put(kv_b_proj=torch.ones(28, 12).to(torch.float8_e5m2)), ("float8_e5m2", "float8_e4m3fn"), FormatError
    ),
    "FP8 norm": Case(
        put(kv_a_layernorm=torch.ones(12).to(torch.float8_e4m3fn)), ("kv_a_layernorm", "is missing"), FormatError
    ),
}

NATIVE: dict[str, Case] = {
    "missing part": Case(remove(PART_1), (f"lacks {PART_1}", "of the 2 parts")),
    "missing first part": Case(remove(PART_0), (f"lacks {PART_0}",)),
    "parts of two splits": Case(rename(PART_0, "model0-mp4.safetensors"), ("several splits (mp2, mp4)",)),
    "one part too many": Case(
        lambda folder: shutil.copy(folder / PART_1, folder / "model2-mp2.safetensors"),
        ("model2-mp2.safetensors", "no part of a split into 2"),
    ),
    "part with a zero before": Case(rename(PART_1, "model01-mp2.safetensors"), ("model01-mp2.safetensors", "remove")),
    "absurd split": Case(
        lambda f: (remove(PART_0)(f), rename(PART_1, f"model1-mp{10**12}.safetensors")(f)), ("1000000000000", "4096")
    ),
    "beside HF weights": Case(rename(PART_1, "model.safetensors"), ("both DeepSeek-native parts", "Hugging Face")),
    "cut part": Case(cut(PART_1, -1), (f"{PART_1} is cut short",)),
    "a tensor missing in one part": Case(
        lambda folder: edit(folder, lambda tensors: tensors.pop("layers.0.attn.wkv_b.weight"), PART_1),
        (f"layers.0.attn.wkv_b.weight is missing in {PART_1}",),
    ),
    "a share of another width": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.attn.wo.weight": torch.ones(39, 6)}), PART_1),
        ("layers.0.attn.wo.weight has shape [40, 6]", "[39, 6]", PART_1),
    ),
    "a share that is too small": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.attn.wo.weight": torch.ones(40, 5)}), PART_1),
        ("o_proj.weight has shape [40, 11]", "makes it [40, 12]"),
    ),
    "a copy of another shape": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.attn.kv_norm.weight": torch.ones(13)}), PART_1),
        ("layers.0.attn.kv_norm.weight has shape [12]", "[13]"),
    ),
    "shares of two dtypes": Case(
        lambda folder: edit(folder, lambda t: t.update({"head.weight": t["head.weight"].half()}), PART_1),
        ("head.weight", "float16", "float32"),
    ),
    "a share without the axis": Case(
        lambda folder: [
            edit(folder, lambda t: t.update({"layers.0.attn.wo.weight": torch.ones(240)}), part)
            for part in (PART_0, PART_1)
        ],
        ("layers.0.attn.wo.weight has shape [240]", "axis 1"),
    ),
    "an expert in both parts": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.ffn.experts.0.w3.weight": torch.ones(2)}), PART_1),
        ("layers.0.ffn.experts.0.w3.weight is in 2 of the parts",),
    ),
    "an unknown tensor": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.attn.indexer.wk.weight": torch.ones(2)}), PART_1),
        ("'layers.0.attn.indexer.wk.weight'", "native layout"),
    ),
    "an unknown parameter": Case(
        lambda folder: edit(folder, lambda t: t.update({"layers.0.attn.wq_b.bias": torch.ones(2)}), PART_1),
        ("'layers.0.attn.wq_b.bias'",),
    ),
    "FP8 blocks across parts": Case(
        lambda folder: (
            write("config.json", json.dumps(native_config(config_v3(), dtype="fp8")))(folder),
            [
                edit(
                    folder,
                    lambda t: t.update(
                        {
                            "layers.0.attn.wkv_b.weight": torch.ones(14, 12).to(torch.float8_e4m3fn),
                            "layers.0.attn.wkv_b.scale": torch.ones(1, 1),
                        }
                    ),
                    part,
                )
                for part in (PART_0, PART_1)
            ],
        ),
        (f"{KV_B} has 14 of its 28 rows in {PART_0}", "no multiple of the block size 128", "Hugging Face form"),
        FormatError,
    ),
}

TABLE = [
    pytest.param(make, case, id=f"{make.__name__}: {name}")
    for make, cases in ((single, SINGLE), (sharded, SHARDED), (fp8, FP8), (native, NATIVE))
    for name, case in cases.items()
]


@pytest.mark.parametrize("make", [single, sharded, fp8, native])
def test_unspoilt_they_open(make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path) -> None:
    make(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.layers[0].shapes()) <= set(checkpoint.state_dict())


@pytest.mark.parametrize(("make", "case"), TABLE)
def test_refused(make: Callable[[pathlib.Path], None], case: Case, tmp_path: pathlib.Path) -> None:
    make(tmp_path)
    case.spoil(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(MLAConvertError) as refused:
        Checkpoint.open(tmp_path)
    assert type(refused.value) is case.error
    for word in case.words:
        assert word in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", ("there is no folder nowhere",)),
        ("/nowhere/at/all", ("there is no folder /nowhere/at/all",)),
        ("./here/not", ("there is no folder /", "/here/not; give the folder")),
    ],
)
def test_paths_that_are_not_there(
    path: str, words: tuple[str, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(path)
    for word in words:
        assert word in str(refused.value)


def test_paths_that_are_no_folders(tmp_path: pathlib.Path) -> None:
    single(tmp_path)
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        Checkpoint.open(tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        Checkpoint.open(tmp_path / "model.gguf")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(CheckpointError, match="the folder is empty"):
        Checkpoint.open(tmp_path / "nothing")


def test_absorbed_weights_in_the_models_place(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mla_manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no config\.json; it holds absorbed weights .* give the checkpoint"):
        Checkpoint.open(tmp_path)
