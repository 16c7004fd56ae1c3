"""Values, names and files that turn out to be wrong only when a tensor is read."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from spoiling import KV_B, PART_0, PART_1, PREFIX, cut, edit, fp8, native, remove, single
from variants import attention_weights, config_v3, write_checkpoint

from mla_convert.checkpoint import Checkpoint
from mla_convert.errors import CheckpointError, FormatError


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_not_finite(bad: float, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    weights = attention_weights(config_v3(), dtype=dtype)
    weights[KV_B][[3, 27], [0, 11]] = bad
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config_v3(), weights))
    for call in (checkpoint.weight, lambda name: checkpoint.weight(name, torch.float32)):
        with pytest.raises(FormatError) as refused:
            call(KV_B)
        assert f"{KV_B} has 2 NaN or infinite values (of 336)" in str(refused.value)
    with pytest.raises(FormatError, match="kv_b_proj"):
        checkpoint.state_dict()
    assert torch.equal(checkpoint.read(KV_B).view(torch.uint8), weights[KV_B].view(torch.uint8))


def test_weights_too_large_for_the_dtype(tmp_path: pathlib.Path) -> None:
    weights = attention_weights(config_v3())
    weights[KV_B][0, 0] = 70000.0
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config_v3(), weights))
    assert checkpoint.weight(KV_B, torch.bfloat16)[0, 0] > 65504
    with pytest.raises(FormatError, match=r"has 1 values \(of 336\) too large for float16; use bfloat16"):
        checkpoint.weight(KV_B, torch.float16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_scales_that_are_not_positive(bad: float, tmp_path: pathlib.Path) -> None:
    fp8(tmp_path)
    edit(tmp_path, lambda tensors: tensors[f"{KV_B}_scale_inv"][1].fill_(bad))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(FormatError, match=r"kv_b_proj.weight_scale_inv has 1 of 2 values"):
        checkpoint.weight(KV_B)


def test_codes_that_are_nan(tmp_path: pathlib.Path) -> None:
    fp8(tmp_path)
    edit(tmp_path, lambda tensors: tensors[KV_B].view(torch.uint8)[20, 5].fill_(0x7F))
    with pytest.raises(FormatError, match=r"kv_b_proj.weight has 1 NaN or infinite values \(of 336\)"):
        Checkpoint.open(tmp_path).weight(KV_B)


def test_copies_that_differ(tmp_path: pathlib.Path) -> None:
    native(tmp_path)
    edit(tmp_path, lambda tensors: tensors["layers.0.attn.kv_norm.weight"][3].add_(1), PART_1)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read(KV_B).shape == (28, 12)
    for call in (checkpoint.read, checkpoint.weight, checkpoint.digest):
        with pytest.raises(CheckpointError, match=f"kv_a_layernorm.weight differs between {PART_0} and {PART_1}"):
            call(f"{PREFIX}.kv_a_layernorm.weight")


def test_names_that_are_not_there(tmp_path: pathlib.Path) -> None:
    fp8(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    for call in (checkpoint.read, checkpoint.info, checkpoint.weight, checkpoint.source_dtype, checkpoint.quantized):
        with pytest.raises(CheckpointError, match="has no tensor .*kv_b_prj.weight; did you mean .*kv_b_proj.weight"):
            call(f"{PREFIX}.kv_b_prj.weight")
    with pytest.raises(FormatError, match="is a scale, not a weight"):
        checkpoint.weight(f"{KV_B}_scale_inv")


def test_a_file_cut_while_open(tmp_path: pathlib.Path) -> None:
    single(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    cut("model.safetensors", 1000)(tmp_path)
    with pytest.raises(CheckpointError, match="ends inside .*: it was cut short while open"):
        checkpoint.state_dict()
    remove("model.safetensors")(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(KV_B)
