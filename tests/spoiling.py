"""Small sound checkpoints of every layout, and ways to spoil them."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from variants import (
    Tensors,
    attention_weights,
    config_v3,
    fp8_config,
    native_config,
    quantize_all,
    split_native,
    write_checkpoint,
    write_parts,
)

PREFIX = "model.layers.0.self_attn"
KV_B = f"{PREFIX}.kv_b_proj.weight"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PART_0, PART_1 = "model0-mp2.safetensors", "model1-mp2.safetensors"
INDEX = "model.safetensors.index.json"


def single(folder: pathlib.Path, **changes: Any) -> None:
    config = config_v3(**changes)
    write_checkpoint(folder, config, attention_weights(config))


def sharded(folder: pathlib.Path) -> None:
    weights = attention_weights(config_v3())
    names = sorted(weights)
    write_checkpoint(folder, config_v3(), *({name: weights[name] for name in half} for half in (names[:3], names[3:])))


def fp8(folder: pathlib.Path, **config: Any) -> None:
    config = config_v3(**{"quantization_config": fp8_config((16, 16))} | config)
    write_checkpoint(folder, config, quantize_all(attention_weights(config), (16, 16)))


def native(folder: pathlib.Path) -> None:
    config = config_v3()
    expert = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.full((16, 40), float(n)) for n in range(2)}
    tensors = attention_weights(config) | expert | {"lm_head.weight": torch.ones(32, 40)}
    write_parts(folder, native_config(config), split_native(tensors, 2, 2))


def edit(folder: pathlib.Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    """Rewrite one file with some tensors changed."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def put(**named: torch.Tensor) -> Callable[[pathlib.Path], None]:
    """Set weights of the first layer's attention, by the last word of their module."""
    full = {f"{PREFIX}.{word}.weight": tensor for word, tensor in named.items()}
    return lambda folder: edit(folder, lambda tensors: tensors.update(full))


def drop(name: str) -> Callable[[pathlib.Path], None]:
    return lambda folder: edit(folder, lambda tensors: tensors.pop(name))


def write(file: str, text: str | bytes) -> Callable[[pathlib.Path], object]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / file).write_bytes(data)


def remove(file: str) -> Callable[[pathlib.Path], object]:
    return lambda folder: (folder / file).unlink()


def cut(file: str, size: int) -> Callable[[pathlib.Path], object]:
    """Keep the first bytes, or, for a negative number, all but the last."""

    def spoil(folder: pathlib.Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[:size])

    return spoil


def reindex(change: Callable[[dict[str, Any]], object]) -> Callable[[pathlib.Path], object]:
    def spoil(folder: pathlib.Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def header(text: str | bytes, data: bytes = b"") -> Callable[[pathlib.Path], object]:
    raw = text.encode() if isinstance(text, str) else text
    return write("model.safetensors", struct.pack("<Q", len(raw)) + raw + data)


def entry(**changes: Any) -> Callable[[pathlib.Path], object]:
    """A file of one tensor ``a``, whose header entry is changed."""
    return header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}), bytes(8))


def only(*files: str) -> Callable[[pathlib.Path], object]:
    """A folder with a config and these files, of no content."""

    def spoil(folder: pathlib.Path) -> None:
        (folder / "model.safetensors").unlink()
        for file in files:
            (folder / file).touch()

    return spoil


def rename(old: str, new: str) -> Callable[[pathlib.Path], object]:
    return lambda folder: (folder / old).rename(folder / new)
