"""Verification: what passes, what the report says, and that the model is given back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import mla_convert
from mla_convert.errors import CheckpointError, MLAConvertError, PatchError, UsageError
from mla_convert.judgement import STRICT, VerificationReport
from mla_convert.patches.loading import load_original
from mla_convert.verification import verify

#: A few calls per stage; the rules do not depend on how many there are.
SMALL: dict[str, Any] = {"prefill": 16, "decode": 9, "batch": 3}
#: 4,096 positions in few calls.
WIDE: dict[str, Any] = {"prefill": 8, "decode": 8, "batch": 512}
STAGES = ["prefill", "decode", "decode by 3", "padded prefill", "padded decode", "one sequence"]
SOURCES = ("example_path", "fp8_path", "native_path")


@pytest.fixture(scope="module")
def report(example_path: Path) -> VerificationReport:
    return verify(example_path, **SMALL)


def test_the_example_is_the_same_model(report: VerificationReport) -> None:
    assert report.passed and report.failures == ()
    assert (report.rule, report.dtype, report.floor_dtype, report.absorbed) == ("strict", "float32", None, None)
    assert [stage.name for stage in report.stages] == STAGES
    assert (report.qk_form, report.vo_form, report.routers) == ("factored", "factored", 3)
    assert "held_out.txt" in report.text and not report.random_text
    for stage in report.stages:
        assert stage.floor is None and 0 < stage.patched.largest_relative <= STRICT
        assert stage.patched.top1_agreement == 1 and stage.patched.rerouted == 0


def test_every_call_and_position_is_counted(report: VerificationReport) -> None:
    counts = {stage.name: (stage.positions, stage.absorbed_calls, stage.expanded_calls) for stage in report.stages}
    # 4 layers. Padding 0, 3, 6, 9, 12 and 15 of 16, and half the steps for twice the sequences.
    assert counts == {
        "prefill": (3 * 25, 0, 4),
        "decode": (3 * 9, 4 * 9, 4),
        "decode by 3": (3 * 9, 4 * 3, 4),
        "padded prefill": (6 * 16 - 45, 4 * 5, 4),
        "padded decode": (6 * 5, 4 * 5, 4),
        "one sequence": (6, 4 * 6, 4),
    }


def test_the_report_is_json_and_complete(report: VerificationReport) -> None:
    read = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert read["passed"] is True and read["failures"] == [] and read["rule"] == "strict"
    assert set(read) == {*VerificationReport.__dataclass_fields__, "passed", "failures"}
    assert [stage["name"] for stage in read["stages"]] == STAGES and all(stage["passed"] for stage in read["stages"])
    distance = report.stages[0].patched
    assert read["stages"][0]["patched"] == {name: getattr(distance, name) for name in distance.__dataclass_fields__}


def test_the_report_for_people(report: VerificationReport) -> None:
    text = str(report)
    for words in (*STAGES, "in float32", "factored", "held_out.txt", "1e-04", "passed: it is the same model"):
        assert words in text


@pytest.mark.parametrize("form", ["factored", "fused", "auto"])
@pytest.mark.parametrize("source", SOURCES)
def test_absorbed_weights_of_every_layout_in_float32(
    source: str, form: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(source)
    mla_convert.convert(folder, tmp_path / "out", form=form, dtype="float32")
    found = verify(folder, tmp_path / "out", **SMALL)
    assert found.passed and found.rule == "strict" and found.absorbed == str(tmp_path / "out")
    assert found.qk_form == found.vo_form == ("fused" if form == "fused" else "factored")


@pytest.mark.parametrize(("form", "dtype"), [("factored", "source"), ("auto", "bfloat16")])
@pytest.mark.parametrize("source", SOURCES)
def test_exact_slices_stored_in_16_bits_are_held_to_the_strict_rule(
    source: str, form: str, dtype: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(source)
    mla_convert.convert(folder, tmp_path / "out", form=form, dtype=dtype)
    found = verify(folder, tmp_path / "out", **SMALL)
    assert found.passed and found.rule == "strict" and found.notes == ()
    assert (found.qk_form, found.vo_form) == ("factored", "factored")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("factored", "bfloat16"), ("fused", "bfloat16")])
def test_the_example_in_16_bits(example_path: Path, form: str, dtype: str) -> None:
    found = verify(example_path, form=form, dtype=dtype)
    assert found.passed and found.floor_dtype == dtype
    assert {stage.positions >= 4096 for stage in found.stages[:3]} == {True}
    assert all(stage.floor is not None for stage in found.stages)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("fused", "bfloat16"),
        pytest.param("factored", "bfloat16", marks=pytest.mark.slow),
        pytest.param("factored", "float16", marks=pytest.mark.slow),
    ],
)
def test_a_small_model_in_16_bits_is_judged_by_the_floor(form: str, dtype: str) -> None:
    found = verify(models.deepseek_v3(dtype=getattr(torch, dtype)), form=form, **WIDE)
    assert found.passed and (found.rule, found.floor_dtype, found.qk_form) == ("floor", dtype, form)
    decode = found.stages[1]
    assert decode.positions == 4096 and decode.floor is not None
    assert 0 < decode.floor.median_kl < 1e-3 and decode.patched.median_kl > 0


def test_rounded_weights_lower_the_floor_of_a_float32_model(tmp_path: Path) -> None:
    model = models.deepseek_v3()
    model.save_pretrained(tmp_path / "model")
    mla_convert.convert(tmp_path / "model", tmp_path / "out", form="fused", dtype="bfloat16")
    found = verify(model, tmp_path / "out", **WIDE)
    assert found.passed and (found.rule, found.dtype, found.floor_dtype) == ("floor", "float32", "bfloat16")
    assert found.random_text and "random tokens" in found.text
    (note,) = found.notes
    assert "rounded to bfloat16" in note
    # Only the products were rounded, so the logits lie closer to the original's than those of a bfloat16 model.
    assert all(stage.patched.median_kl < stage.floor.median_kl for stage in found.stages[1:3] if stage.floor)


def test_a_model_in_memory_is_given_back_as_it_was() -> None:
    model = models.deepseek_v3()
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert verify(model, **SMALL).passed
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_eager_attention_is_verified_too() -> None:
    assert verify(models.deepseek_v3(attn="eager"), **SMALL).passed


def test_a_model_without_experts_has_no_routers() -> None:
    found = verify(models.deepseek_v3(first_k_dense_replace=2), **SMALL)
    assert found.passed and found.routers == 0


def test_weights_inside_the_source_are_what_is_verified(tmp_path: Path) -> None:
    models.deepseek_v3().save_pretrained(tmp_path)
    mla_convert.convert(tmp_path, tmp_path, qk="fused")
    found = verify(tmp_path, **SMALL)
    assert found.passed and (found.absorbed, found.qk_form) == (str(tmp_path), "fused")
    assert any("mla_absorbed" in note for note in found.notes)


def test_a_patched_model_is_refused() -> None:
    model = models.deepseek_v3()
    with mla_convert.patched(model), pytest.raises(PatchError, match="patched already"):
        verify(model, **SMALL)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    verify(models.deepseek_v3(), **SMALL, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {len(seen)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype='int8'; supported are float32, bfloat16, float16"),
        ({"prefill": 1}, "prefill=1; at least 2"),
        ({"decode": 2}, "decode=2; at least 3"),
        ({"batch": 1}, "batch=1; at least 2 are needed: left padding of different lengths"),
        ({"batch": 2.0}, "batch=2.0; a whole number"),
        ({"prefill": None}, "prefill=None; a whole number"),
        (
            {"prefill": 4090},
            r"prefill=4090 and decode=9 take 4,099 positions, and this model has 4,096 ",
        ),
        ({"decode": 10**9}, "take 1,000,000,016 positions"),
        ({"dtype": "source", "batch": 8, "decode": 8}, "gives 64 positions, and judging a lower precision needs 4,096"),
        ({"prompts": "no/such/file"}, "no/such/file cannot be read as text"),
        ({"backend": "magic"}, "backend='magic' is not known"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(example_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verify(example_path, **SMALL | options)


def test_a_dtype_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype='bfloat16' was asked for, and the model is in float32"):
        verify(models.deepseek_v3(), dtype="bfloat16")


@pytest.mark.parametrize("source", ["deepseek-ai/DeepSeek-V3", ""])
def test_what_is_no_checkpoint_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(MLAConvertError, match="download it first" if source else "config.json"):
        verify(source or tmp_path)


def test_a_source_that_names_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    with pytest.raises(MLAConvertError, match="llama"):
        verify(tmp_path)
    with pytest.raises((CheckpointError, MLAConvertError), match="no_such"):
        verify(tmp_path / "no_such")


def test_fp8_is_read_by_this_package(fp8_path: Path, tmp_path: Path) -> None:
    """The float32 reference is what the absorbed weights were made from, to the last bit."""
    mla_convert.convert(fp8_path, tmp_path / "out", dtype="float32")
    model = load_original(fp8_path, dtype=torch.float32, stored_dtype=torch.float32)
    assert verify(model, tmp_path / "out", **SMALL).passed
    # Rounded to bfloat16 on the way it is another model, which the report explains.
    rounded = load_original(fp8_path, dtype=torch.float32)
    found = verify(rounded, tmp_path / "out", **SMALL)
    assert not found.passed and "verify the folder itself" in found.notes[0]
