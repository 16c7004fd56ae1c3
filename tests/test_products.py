"""Blocks: they cover every stored row once, and joined they are the products of the whole tensors."""

from __future__ import annotations

import pathlib

import pytest
import torch
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert.absorption import fuse_ov, fuse_qk, slice_rows, split_kv_b
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import UsageError
from mla_convert.geometry import MLAGeometry
from mla_convert.products import block_ranges, make_block, make_whole, read_operands
from mla_convert.recipe import PlannedLayer, plan_layers
from mla_convert.rounding import Rounding

KEYS = {"factored": ("k_b", "v_b"), "fused": ("qk", "ov")}


def planned(
    folder: pathlib.Path, form: str, dtype: torch.dtype = torch.bfloat16, **config: object
) -> tuple[Checkpoint, PlannedLayer]:
    full = config_v3(dtype="bfloat16", hidden_size=200, num_attention_heads=5, **config)
    checkpoint = Checkpoint.open(write_checkpoint(folder, full, attention_weights(full, dtype=dtype)))
    return checkpoint, plan_layers(checkpoint, {"qk": form, "vo": form}, None)[0]


@pytest.mark.parametrize("block_bytes", [1, 400, 3000, 1 << 25])
@pytest.mark.parametrize("key", ["k_b", "v_b", "qk", "ov"])
def test_blocks_cover_the_rows_in_order(tmp_path: pathlib.Path, key: str, block_bytes: int) -> None:
    form = "factored" if key in KEYS["factored"] else "fused"
    _, layer = planned(tmp_path, form)
    tensor = layer.tensors[key]
    row = tensor.nbytes // tensor.shape[0]
    ranges = block_ranges(key, layer.spec.geometry, row, block_bytes)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(tensor.shape[0]))
    per_unit = {"k_b": 8, "v_b": 6, "qk": 16, "ov": 1}[key]
    assert all((stop - start) * row <= max(block_bytes, per_unit * row) for start, stop in ranges)
    assert all(start % per_unit == 0 for start, _ in ranges)


@pytest.mark.parametrize("hidden", [128, 256, 512, 1024, 2048, 7168])
def test_a_block_is_a_small_part_of_a_large_tensor(hidden: int) -> None:
    """With 16 threads, so many blocks are in memory: within three times the tensor, and what is spare."""
    g = MLAGeometry(hidden, 128, 512, 128, 64, 128, 1536, 1.0)
    for key, row in (("qk", 2 * g.query_rank), ("ov", 2 * g.num_heads * g.kv_lora_rank)):
        ranges = block_ranges(key, g, row)
        largest, whole = max(stop - start for start, stop in ranges) * row, ranges[-1][1] * row
        assert largest <= 1 << 25
        assert 20 * min(largest, whole) <= 3 * whole + 400_000_000 and len(ranges) <= 64


@pytest.mark.parametrize("q_lora_rank", [20, None])
@pytest.mark.parametrize("form", KEYS)
def test_blocks_joined_are_the_whole(tmp_path: pathlib.Path, form: str, q_lora_rank: int | None) -> None:
    checkpoint, layer = planned(tmp_path, form, q_lora_rank=q_lora_rank)
    g = layer.spec.geometry
    operands = read_operands(checkpoint, layer, torch.device("cpu"))
    assert tuple(operands.sources()) == layer.sources
    w_uk, w_uv = split_kv_b(checkpoint.weight(layer.spec.kv_b), g)
    for key, tensor in layer.tensors.items():
        row = tensor.nbytes // tensor.shape[0]
        whole, parts = Rounding(), Rounding()
        blocks = [make_block(operands, g, key, rows, tensor.dtype, parts) for rows in block_ranges(key, g, row, 500)]
        assert len(blocks) > 1
        if key == "qk":
            expected = fuse_qk(w_uk, checkpoint.weight(layer.spec.query), g, tensor.dtype, whole)
        elif key == "ov":
            expected = fuse_ov(w_uv, checkpoint.weight(layer.spec.o), g, tensor.dtype, whole)
        else:
            expected = slice_rows(w_uk if key == "k_b" else w_uv, tensor.dtype, whole)
        assert torch.equal(make_whole(operands, g, key, tensor.dtype), expected)
        # One term more or less in a processor's registers may change the last bit of a float32 sum of six, which
        # the rounding to bfloat16 then shows at most as one unit in its last place.
        torch.testing.assert_close(torch.cat(blocks), expected, rtol=2**-7, atol=1e-5)
        assert parts.largest == pytest.approx(whole.largest, rel=1e-2)


@pytest.mark.parametrize("key", KEYS["fused"])
def test_no_number_exceeds_the_limit(tmp_path: pathlib.Path, key: str) -> None:
    checkpoint, layer = planned(tmp_path, "fused")
    operands = read_operands(checkpoint, layer, torch.device("cpu"))
    rounding = Rounding()
    largest = float(make_whole(operands, layer.spec.geometry, key, torch.float32, rounding).abs().max())
    assert largest <= rounding.at_most < 100 * largest


@pytest.mark.parametrize(("side", "value"), [("qk", 100.0), ("vo", 110.0)])
def test_sums_that_leave_float16_although_their_terms_do_not(tmp_path: pathlib.Path, side: str, value: float) -> None:
    """Of eight (N), or six (V), equal terms: what is known of the factors has to count them."""
    config = config_v3()
    tensors = {name: torch.full_like(t, value) for name, t in attention_weights(config).items()}
    path = write_checkpoint(tmp_path / "source", config, tensors)
    other = {"qk": "vo", "vo": "qk"}[side]
    assert value**2 < torch.finfo(torch.float16).max / 2
    with pytest.raises(UsageError, match=rf"{'qk' if side == 'qk' else 'ov'}_absorbed.* float16 ends at"):
        convert(path, tmp_path / "out", dtype="float16", **{side: "fused", other: "factored"})
