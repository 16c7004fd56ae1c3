"""Options of ``convert`` about fewer bits, through the command line: what they make, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_convert import quality

Invoke = Callable[..., Any]
FACTORED = ["--form", "factored"]


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("--quantize int8", "int8 per row", "int8 per row"),
        ("--quantize fp8 --group-size row", "fp8 per row", "fp8 per row"),
        ("--quantize int4 --group-size 64 --qk-bits 8", "int8 per row", "int4 in groups of 64"),
        ("--quantize fp8 --vo-bits 4", "fp8 in blocks of 128x128", "int4 in groups of 32"),
        ("--qk-bits 4 --vo-bits 16", "int4 in groups of 32", "bfloat16"),
        ("--vo-bits 8", "bfloat16", "int8 per row"),
    ],
)
def test_each_side_is_kept_as_asked(
    options: str, key: str, value: str, invoke: Invoke, example_path: Path, tmp_path: Path
) -> None:
    target = tmp_path / "report.json"
    result = invoke("convert", example_path, tmp_path / "out", *FACTORED, *options.split(), "--json", target)
    assert result.exit_code == 0 and result.stderr == ""
    report = json.loads(target.read_text("utf-8"))
    found = {(tensor["name"].split(".")[-2], tensor["scheme"]) for tensor in report["tensors"]}
    assert found == {(n, s) for n, s in (("k_b_proj", key), ("v_b_proj", value)) if s != "bfloat16"}
    words = key if key == value else f"{key} and {value}"
    assert report["stored_as"] == words and f" in {words}" in " ".join(result.stdout.split())
    assert "was not measured" in result.stdout and "--measure" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--quantize int9", "'int9' is not one of 'int8', 'fp8', 'int4'"),
        ("--qk-bits 5", "--qk-bits 5; supported are 4"),
        ("--vo-bits 0", "--vo-bits 0; supported are 4"),
        ("--qk-bits four", "--qk-bits"),
        ("--quantize int8 --group-size row", "--group-size row; it belongs to int4 and fp8"),
        ("--quantize int4 --group-size 48", "--group-size 48; supported here are 32, 64, 128"),
        ("--quantize int4 --group-size 128", "64 columns, which is no multiple of the group size 128"),
        ("--group-size 32", "--group-size 32; it belongs to int4 and fp8"),
        ("--quantize int8 --qk-bits 16 --vo-bits 16", "--qk-bits 16 and --vo-bits 16 leave no side to --quantize int8"),
        ("--quantize fp8 --qk-bits 4 --vo-bits 4", "leave no side to --quantize fp8: leave it out, or one of them"),
        ("--measure", "nothing is quantized: add --quantize"),
        ("--calibrate no-text", "nothing is quantized: add --quantize"),
        ("--qk-bits 16 --vo-bits 16 --measure", "nothing is quantized: add --quantize"),
        ("--quantize int8 --calibrate no-text", "no-text cannot be read as text"),
        ("--target hf --quantize int8", "--form factored: --target hf keeps every value as it is"),
    ],
)
def test_bad_values_are_one_error(options: str, words: str, invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    result = invoke("convert", example_path, tmp_path / "out", *FACTORED, *options.split())
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_calibrated_and_measured(
    invoke: Invoke, example_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short windows, so that the whole of it takes seconds."""
    monkeypatch.setattr(quality, "WINDOW", quality.PREFILL + 4)
    monkeypatch.setattr(quality, "MOST", 2)
    text = (example_path / "held_out.txt").read_text("utf-8")
    (tmp_path / "text.txt").write_text(text[60000:60700], "utf-8")
    (tmp_path / "copy.txt").write_text(text, "utf-8")
    convert = ["convert", example_path, tmp_path / "out", *FACTORED, "--quantize", "int4"]
    refused = invoke(*convert, "--calibrate", tmp_path / "copy.txt")
    assert refused.exit_code == 2 and "in common with the held-out text" in refused.stderr
    for options in (["--calibrate", tmp_path / "text.txt"], ["--measure"]):
        convert[2] = tmp_path / f"out-{options[0]}"
        result = invoke(*convert, *options, "--json", (report := tmp_path / f"{options[0]}.json"))
        assert result.exit_code == 0 and "On held-out text of" in result.stdout
        assert "same bits on kv_b_proj" in result.stdout and "was not measured" not in result.stdout
        assert "8 decoded positions in 2 windows" in " ".join(result.stdout.split())
        assert json.loads(report.read_text("utf-8"))["quality"]["absorbed"]["perplexity"] > 1
