"""What conversion of DeepSeek-V3 reads and writes, from a checkpoint of its dimensions whose files are holes."""

from __future__ import annotations

import collections
import json
import pathlib

import pytest
import torch

from mla_convert import destination, disk
from mla_convert.conversion import convert
from mla_convert.errors import UsageError
from mla_convert.shard_plan import FileTensor, PlannedFile

HEADS, NOPE, ROPE, VALUE, LATENT, QUERY, HIDDEN = 128, 128, 64, 128, 512, 1536, 7168
LAYERS = 61  # and one more for multi-token prediction
PROJECTIONS = {
    "q_a_proj": (QUERY, HIDDEN),
    "q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
    "kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
    "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
    "o_proj": (HIDDEN, HEADS * VALUE),
}


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Attention of DeepSeek-V3 in FP8 blocks; no byte of data is on the disk."""
    folder = tmp_path_factory.mktemp("v3") / "v3"
    folder.mkdir()
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "kv_lora_rank": LATENT,
        "q_lora_rank": QUERY,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}.self_attn."
        tensors = [
            FileTensor(prefix + "q_a_layernorm.weight", (QUERY,), torch.bfloat16),
            FileTensor(prefix + "kv_a_layernorm.weight", (LATENT,), torch.bfloat16),
        ]
        for word, (rows, columns) in PROJECTIONS.items():
            grid = -(-rows // 128), -(-columns // 128)
            tensors.append(FileTensor(f"{prefix}{word}.weight", (rows, columns), torch.float8_e4m3fn))
            tensors.append(FileTensor(f"{prefix}{word}.weight_scale_inv", grid, torch.float32))
        file = PlannedFile(f"model-{layer + 1:05d}-of-{LAYERS + 1:05d}.safetensors", tensors)
        disk.make_file(folder / file.name, file.nbytes)
        disk.write_at(folder / file.name, 0, [file.header])
        where |= dict.fromkeys((tensor.name for tensor in tensors), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def scaled(shape: tuple[int, int]) -> int:
    """Bytes of a weight in FP8 blocks with its scales."""
    return shape[0] * shape[1] + 4 * -(-shape[0] // 128) * -(-shape[1] // 128)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage(10**12, 0, 10**12))


def test_factored(v3: pathlib.Path, tmp_path: pathlib.Path, room: None) -> None:
    """About 1 GB of the 688 is read, and 2 GB are written."""
    plan = convert(v3, tmp_path / "out", form="factored", dry_run=True)
    assert plan.bytes_in == 62 * scaled(PROJECTIONS["kv_b_proj"]) == 1_040_441_344
    assert plan.bytes_out == 62 * 2 * HEADS * (NOPE + VALUE) * LATENT == 2_080_374_784
    assert (plan.layers, plan.bytes_free, plan.dtype) == (62, 10**12, "bfloat16")
    auto = convert(v3, tmp_path / "out", dry_run=True)
    assert auto.bytes_out == plan.bytes_out  # auto takes the factored form of both sides


def test_fused(v3: pathlib.Path, tmp_path: pathlib.Path, room: None) -> None:
    """About 10.6 GB are read, and 72 GB written in bfloat16."""
    plan = convert(v3, tmp_path / "out", form="fused", dry_run=True)
    assert plan.bytes_in == 62 * sum(scaled(PROJECTIONS[word]) for word in ("q_b_proj", "kv_b_proj", "o_proj"))
    numbers = HEADS * (LATENT + ROPE) * QUERY + HIDDEN * HEADS * LATENT
    assert plan.bytes_out == 62 * 2 * numbers
    assert (round(plan.bytes_in / 1e9, 1), round(plan.bytes_out / 1e9, 1)) == (10.7, 72.3)


def test_too_little_space(v3: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage(10**12, 0, 30 * 10**9))
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"needs 72\.3 GB and its disk has 30 GB free"):
            convert(v3, tmp_path / "out", form="fused", dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []
