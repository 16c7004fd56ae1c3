"""Weights that torchao and bitsandbytes have saved, read by these libraries; values from the formats' definitions."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch
from coded import integers, pack_bits, scales
from safetensors.torch import save_file
from spoiling import edit
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert import readers
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import FormatError

MODULE = "model.layers.0.self_attn.kv_b_proj"
KV_B = f"{MODULE}.weight"
SHAPE = (28, 12)

# NF4: the quantiles of a normal distribution, as its paper lists them.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def as_bytes(what: dict[str, object]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(what).encode()), dtype=torch.uint8)


def write_nf4(folder: pathlib.Path, *, nested: bool) -> torch.Tensor:
    """kv_b in NF4: blocks of 64 along the rows put one after the other, the first code in the high half of a byte."""
    codes, largest = integers(SHAPE, 0, 15, 0).reshape(-1), scales((6,), 1, size=1.0)
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(SHAPE)}
    tensors = {"": (16 * codes[::2] + codes[1::2]).to(torch.uint8).reshape(-1, 1), ".quant_map": torch.tensor(NF4)}
    if nested:
        # The blocks' magnitudes in codes of their own: an offset, and 256 numbers times a magnitude for each 256.
        numbers, overall = torch.linspace(-1, 1, 256), torch.tensor([0.5])
        places = integers((6,), 0, 255, 2)
        largest = numbers[places] * overall + 0.75
        tensors |= {".absmax": places.to(torch.uint8), ".nested_absmax": overall, ".nested_quant_map": numbers}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
    else:
        tensors[".absmax"] = largest
    tensors[".quant_state.bitsandbytes__nf4"] = as_bytes(state)
    config = config_v3(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    stored = attention_weights(config)
    del stored[KV_B]
    write_checkpoint(folder, config, stored | {f"{KV_B}{suffix}": tensor for suffix, tensor in tensors.items()})
    blocks = torch.arange(codes.numel()) // 64
    return (torch.tensor(NF4).double()[codes] * largest.double()[blocks]).reshape(SHAPE)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(nested: bool, tmp_path: pathlib.Path) -> None:
    values = write_nf4(tmp_path / "source", nested=nested)
    checkpoint = Checkpoint.open(tmp_path / "source")
    weight = checkpoint.weight(KV_B, torch.float32)
    # The product rounds once; a nested magnitude is a product and a sum in float32 itself.
    assert ((weight.double() - values).abs() <= (4 if nested else 1) * 2.0**-24 * values.abs().max()).all()
    assert checkpoint.info(KV_B).shape == SHAPE and len(checkpoint.companions(KV_B)) == (5 if nested else 3)
    convert(checkpoint, tmp_path / "out")
    edit(tmp_path / "source", lambda t: t.update({f"{KV_B}.quant_state.bitsandbytes__nf4": as_bytes({"a": 1})}))
    with pytest.raises(FormatError, match="kv_b_proj.weight cannot be read by bitsandbytes .*another version"):
        Checkpoint.open(tmp_path / "source").weight(KV_B)


def test_bitsandbytes_of_another_shape(tmp_path: pathlib.Path) -> None:
    write_nf4(tmp_path, nested=False)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [12, 28]}
    edit(tmp_path, lambda t: t.update({f"{KV_B}.quant_state.bitsandbytes__nf4": as_bytes(state)}))
    with pytest.raises(FormatError, match=r"stored as a weight of shape \[12, 28\]; expected is \[28, 12\]"):
        Checkpoint.open(tmp_path).weight(KV_B)


def write_torchao(folder: pathlib.Path, kind: str) -> torch.Tensor:
    """kv_b as torchao takes apart a weight with codes in ``_weight_qdata`` and a scale per row, in two shards."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, PerRow, quantize_

    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    quantize_(linear, {"int8": Int8WeightOnlyConfig(granularity=PerRow()), "fp8": Float8WeightOnlyConfig()}[kind])
    tensors, metadata = flatten_tensor_state_dict({KV_B: linear.weight})
    config = config_v3(quantization_config={"quant_method": "torchao", "quant_type": {}, "quant_type_kwargs": {}})
    stored = attention_weights(config)
    del stored[KV_B]
    write_checkpoint(folder, config, stored, tensors)
    save_file(tensors, folder / "model-00002-of-00002.safetensors", metadata=metadata)
    codes, scale = tensors[f"{MODULE}._weight_qdata"], tensors[f"{MODULE}._weight_scale"]
    return codes.double() * scale.double()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_torchao(kind: str, tmp_path: pathlib.Path) -> None:
    values = write_torchao(tmp_path / "source", kind)
    checkpoint = Checkpoint.open(tmp_path / "source")
    weight = checkpoint.weight(KV_B, torch.float32)
    assert ((weight.double() - values).abs() <= 2.0**-24 * values.abs()).all()
    digests = checkpoint.companion_digests(KV_B)
    assert {f"{MODULE}._weight_scale", f"{KV_B} (metadata)"} <= set(digests)
    convert(checkpoint, tmp_path / "out")
    file = tmp_path / "source" / "model-00002-of-00002.safetensors"
    edit(tmp_path / "source", lambda tensors: None, file.name)  # rewrites it without its metadata
    with pytest.raises(FormatError, match="says nothing of it in its metadata"):
        Checkpoint.open(tmp_path / "source").weight(KV_B)


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao", "compressed_tensors"])
def test_a_library_that_is_not_there(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error, and only where its form is met."""
    monkeypatch.setitem(sys.modules, f"{package}.functional", None)
    name = package.replace("_", "-")
    with pytest.raises(FormatError, match=f"{name} has stored are read by {name} itself.*pip install {name}"):
        readers.library(f"{package}.functional")


def test_the_packing_of_the_tests() -> None:
    """The writer of the other tests, on codes whose words are plain: 0x87654321, and 1 and 2 in three bits."""
    assert pack_bits([[1, 2, 3, 4, 5, 6, 7, 8]], 4).tolist() == [[0x87654321 - (1 << 32)]]
    assert pack_bits([[1, 2]], 3).tolist() == [[0b010001]]
