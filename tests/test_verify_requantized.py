"""Verification of quantized sidecars: held to the same bits spent on kv_b_proj."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch

import mla_convert
from mla_convert.schemes import INT8, int4
from mla_convert.subject import Subject
from mla_convert.verification import verify

WIDE: dict[str, Any] = {"prefill": 8, "decode": 8, "batch": 512}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requantized") / "model"
    models.deepseek_v3(kv_lora_rank=32, num_hidden_layers=2).save_pretrained(folder)
    return folder


def test_codes_are_as_good_as_their_bits(source: Path, tmp_path: Path) -> None:
    mla_convert.convert(source, tmp_path / "out", form="factored", quantize="int4")
    report = verify(source, tmp_path / "out", **WIDE)
    assert report.passed, report.failures
    assert (report.rule, report.floor_dtype) == ("requantized", "float32")
    assert "with the same bits on kv_b_proj" in report.bound and "requantized, and as close" in str(report)
    decode = next(stage for stage in report.stages if stage.name == "decode")
    assert decode.floor is not None and 1e-6 < decode.patched.median_kl < 2 * decode.floor.median_kl


@pytest.mark.slow
def test_fewer_bits_than_they_say_are_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 held to what int8 costs."""
    mla_convert.convert(source, tmp_path / "out", form="factored", quantize="int4")
    monkeypatch.setattr(Subject, "schemes", property(lambda self: (INT8, INT8)))
    report = verify(source, tmp_path / "out", **WIDE)
    assert not report.passed and any("that of the same bits on kv_b_proj" in failure for failure in report.failures)


def test_the_schemes_of_each_side(source: Path, tmp_path: Path) -> None:
    for name, options, expected in (
        ("both", {"quantize": "int8", "form": "fused"}, (INT8, INT8)),
        ("values", {"vo_bits": 4}, (None, int4(32))),
        ("none", {}, None),
    ):
        mla_convert.convert(source, tmp_path / name, **options)
        subject = Subject(source, tmp_path / name, "float32")
        assert subject.schemes == expected
        assert subject.floor_dtype() == (None if expected is None else torch.float32)
