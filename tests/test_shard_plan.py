"""Planned files: what shares a shard, and that other readers find each tensor where the plan puts it."""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import load_file

from mla_convert import disk
from mla_convert.shard_plan import FileTensor, PlannedFile, plan_shards

SIZES = {
    "full": ([[4], [4], [4]], [[4, 4], [4]]),
    "units stay together": ([[4, 2], [2, 4], [8]], [[4, 2], [2, 4], [8]]),
    "unit of its own": ([[2], [8, 4], [2], [2]], [[2], [8], [4], [2, 2]]),
    "split with room": ([[4, 4, 4], [4]], [[4, 4], [4], [4]]),
    "large first": ([[20], [4], [4]], [[20], [4, 4]]),
    "large between": ([[4], [20], [4]], [[4], [20], [4]]),
    "exact": ([[8]], [[8]]),
    "none": ([], []),
}


@pytest.mark.parametrize("case", SIZES)
def test_shards_are_filled_in_order(case: str) -> None:
    sizes, expected = SIZES[case]
    units = [[FileTensor(f"{i}.{j}", (size,), torch.uint8) for j, size in enumerate(u)] for i, u in enumerate(sizes)]
    shards = plan_shards(units, 8)
    assert [[tensor.nbytes for tensor in shard] for shard in shards] == expected
    assert [tensor for shard in shards for tensor in shard] == [tensor for unit in units for tensor in unit]


def test_tensors_stand_where_the_plan_says(tmp_path: pathlib.Path) -> None:
    tensors = {
        "bf16": torch.arange(12).reshape(3, 4).bfloat16(),
        "f16": torch.arange(6).reshape(3, 2).half(),
        "f32": torch.full((3, 5), 0.1),
        "f64": torch.arange(3, dtype=torch.float64),
        "fp8": torch.arange(7).to(torch.float8_e4m3fn),
        "i8": torch.arange(-3, 4, dtype=torch.int8),
    }
    planned = PlannedFile("x.safetensors", [FileTensor(name, tuple(t.shape), t.dtype) for name, t in tensors.items()])
    file = tmp_path / planned.name
    disk.make_file(file, planned.nbytes)
    disk.write_at(file, 0, [planned.header])
    for name, tensor in reversed(tensors.items()):
        disk.write_at(file, planned.starts[name], [tensor.reshape(-1).view(torch.uint8).numpy().data])
    read = load_file(file)
    assert list(read) == list(tensors) and file.stat().st_size == planned.nbytes
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))


def test_files_keep_their_content_when_made_again(tmp_path: pathlib.Path) -> None:
    disk.make_file(tmp_path / "file", 4)
    disk.write_at(tmp_path / "file", 1, [b"ab"])
    disk.make_file(tmp_path / "file", 4)
    assert (tmp_path / "file").read_bytes() == b"\0ab\0"
    disk.make_file(tmp_path / "file", 3)
    assert (tmp_path / "file").read_bytes() == b"\0ab"
