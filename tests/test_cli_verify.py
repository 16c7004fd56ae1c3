"""``mla-convert verify``: its options reach the library, its results come out, and its exit codes say what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mla_convert
from mla_convert import verification
from mla_convert.errors import UsageError
from mla_convert.patches.layer import AbsorbedLayer

Invoke = Callable[..., Any]
SOURCES = ["example_path", "fp8_path", "native_path"]
SMALL = ["--prefill", "16", "--decode", "6", "--batch", "2"]
#: 4,096 positions in fewer calls than by default.
WIDE = ["--prefill", "8", "--decode", "8", "--batch", "512"]
STAGES = ["prefill", "decode", "decode by 3", "padded prefill", "padded decode", "one sequence"]


def test_the_same_model_exits_with_0(invoke: Invoke, example_path: Path) -> None:
    result = invoke("verify", example_path, *SMALL)
    assert result.exit_code == 0 and result.stderr == ""
    cells = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in cells] == STAGES and all(len(row) == 12 for row in cells)
    for words in ("in float32", "held_out.txt", "1e-04", "passed: it is the same model"):
        assert words in result.stdout


def test_another_model_exits_with_1_and_says_why(
    invoke: Invoke, example_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original: Any = AbsorbedLayer.lift_output
    monkeypatch.setattr(AbsorbedLayer, "lift_output", lambda self, out: original(self, out) * 1.01)
    result = invoke("verify", example_path, *SMALL, "--json", tmp_path / "report.json")
    assert result.exit_code == 1 and result.stderr == ""
    assert "decode FAILED" in result.stdout and "decode: a logit differs by" in result.stdout
    assert "FAILED in 4 of 6 stages: decode, decode by 3, padded decode, one sequence" in result.stdout
    read = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert read["passed"] is False and len(read["failures"]) == 4


def test_stored_weights_and_json(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    mla_convert.convert(example_path, tmp_path / "out", qk="fused", dtype="float32")
    result = invoke("verify", example_path, tmp_path / "out", *SMALL, "--json", "-")
    read = json.loads(result.stdout)
    assert result.exit_code == 0 and read["passed"] is True and "passed" in result.stderr
    assert (read["absorbed"], read["qk_form"], read["vo_form"]) == (str(tmp_path / "out"), "fused", "factored")
    assert [stage["name"] for stage in read["stages"]] == STAGES


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_the_same_model_once_converted(
    source: str, dtype: str, invoke: Invoke, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(source)
    assert invoke("convert", folder, tmp_path / "out", "--form", "auto", "--dtype", dtype).exit_code == 0
    result = invoke("verify", folder, tmp_path / "out", *SMALL, "--json", "-")
    read = json.loads(result.stdout)
    assert result.exit_code == 0 and (read["passed"], read["rule"]) == (True, "strict")
    assert (read["source"], read["absorbed"]) == (str(folder), str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("source", SOURCES)
def test_products_rounded_to_16_bits_stay_by_the_floor(
    source: str, dtype: str, invoke: Invoke, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(source)
    assert invoke("convert", folder, tmp_path / "out", "--form", "fused", "--dtype", "bfloat16").exit_code == 0
    sizes = WIDE if dtype == "bfloat16" else []
    result = invoke("verify", folder, tmp_path / "out", "--dtype", dtype, *sizes, "--json", "-")
    read = json.loads(result.stdout)
    assert result.exit_code == 0 and read["passed"] is True
    assert (read["rule"], read["dtype"], read["floor_dtype"]) == ("floor", dtype, "bfloat16")
    assert (read["qk_form"], read["vo_form"]) == ("fused", "fused")
    (note,) = read["notes"]
    assert "rounded to bfloat16" in note and "the original at that precision" in note


def test_weights_of_another_model_exit_with_2(
    invoke: Invoke, example_path: Path, fp8_path: Path, tmp_path: Path
) -> None:
    mla_convert.convert(fp8_path, tmp_path / "out")
    result = invoke("verify", example_path, tmp_path / "out", *SMALL)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: layer 0: ") and "belong to another checkpoint" in result.stderr


def test_every_option_has_its_own_place(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(*places: str, **options: Any) -> None:
        seen.update(options, places=places)
        raise UsageError("seen enough")

    monkeypatch.setattr(verification, "verify", record)
    words = "a b --form factored --qk fused --vo auto --dtype float16 --prompts p --prefill 5 --decode 6 --batch 7"
    assert invoke("verify", *words.split(), "--backend", "e", "--codes", "keep").exit_code == 2
    assert callable(seen.pop("progress"))
    assert seen == {
        "places": ("a", "b"),
        "form": "factored",
        "qk": "fused",
        "vo": "auto",
        "dtype": "float16",
        "prompts": "p",
        "prefill": 5,
        "decode": 6,
        "batch": 7,
        "backend": "e",
        "codes": "keep",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["deepseek-ai/DeepSeek-V3"], "download it first"),
        ([".", "out"], "no config.json"),
        (["EXAMPLE", "no/out"], "no/out"),
        (["EXAMPLE", "--prefill", "1"], "--prefill 1; at least 2"),
        (["EXAMPLE", "--prompts", "no/text"], "no/text cannot be read"),
        (["EXAMPLE", "--dtype", "bfloat16", "--batch", "2"], "needs 4,096"),
        (["EXAMPLE", "--backend", "magic"], "--backend magic is not known"),
        (["EXAMPLE", "--codes", "keep"], "--codes keep keeps the codes of a quantized folder, and no folder"),
    ],
    ids=" ".join,
)
def test_faults_are_one_line(
    invoke: Invoke,
    example_path: Path,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verification, "run", None)  # all of it is refused before anything is compared
    result = invoke("verify", *(str(example_path) if word == "EXAMPLE" else word for word in arguments))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr
