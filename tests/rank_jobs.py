"""A conversion that several processes can share."""

from __future__ import annotations

import pathlib
from typing import Any

from snapshots import snapshot
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert.conversion import convert

LAYERS = 6
#: Two layers in each of three shards.
JOB: dict[str, Any] = {"form": "factored", "max_shard_bytes": 2 * 2 * (8 + 6) * 12 * 4}


def make_source(folder: pathlib.Path) -> pathlib.Path:
    """A checkpoint of so many layers in ``folder``."""
    config = config_v3(num_hidden_layers=LAYERS, first_k_dense_replace=LAYERS)
    tensors = {name: t for layer in range(LAYERS) for name, t in attention_weights(config, layer).items()}
    return write_checkpoint(folder / "source", config, tensors)


def convert_alone(source: pathlib.Path, folder: pathlib.Path) -> dict[str, bytes]:
    """What one process makes of it."""
    convert(source, folder / "out", **JOB)
    assert len(list((folder / "out").glob("*.safetensors"))) == 3
    return snapshot(folder / "out")
