"""``mla-convert bench``: its options reach the library, its results come out, its faults are one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_convert
from mla_convert import benchmark
from mla_convert.errors import UsageError

Invoke = Callable[..., Any]
QUICK = ["--repetitions", "3"]


def test_it_says_what_it_measured(invoke: Invoke, example_path: Path) -> None:
    result = invoke("bench", example_path, "--context", "8, 64", *QUICK)
    assert result.exit_code == 0 and result.stderr == ""
    assert "\n  key side " in result.stdout and "\\n" not in result.stdout  # the description keeps its lines
    cells = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in cells] == ["8", "64"] and all(len(row) == 5 for row in cells)
    for words in ("batch 1", "bfloat16", "weights from the model itself", "3 repetitions", torch.__version__):
        assert words in " ".join(result.stdout.split())  # lines break where the path's length has them break


def test_its_options_reach_the_library(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    mla_convert.convert(example_path, tmp_path / "out", qk="fused", dtype="float32")
    options = ["--context", "16", "--dtype", "float32", "--batch", "2", "--qk", "fused", "--backend", "torch"]
    result = invoke(
        "bench", example_path, tmp_path / "out", *options, "--json", "-", "--plot", tmp_path / "p.svg", *QUICK
    )
    read = json.loads(result.stdout)
    assert (read["dtype"], read["batch"], read["repetitions"]) == ("float32", 2, 3)
    assert (read["patch"]["weights_from"], read["patch"]["qk_form"]) == (str(tmp_path / "out"), "fused")
    assert [row["context"] for row in read["contexts"]] == [16]
    assert "One decode step" in result.stderr and f"wrote {tmp_path / 'p.svg'}" in result.stderr
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")


def test_every_option_has_its_own_place(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(*places: str, **options: Any) -> None:
        seen.update(options, places=places)
        raise UsageError("seen enough")

    monkeypatch.setattr(benchmark, "bench", record)
    words = "a b --form factored --qk fused --vo auto --dtype float16 --device d --backend e --batch 2 --repetitions 4"
    assert invoke("bench", *words.split(), "--context", "5,6", "--codes", "keep").exit_code == 2
    assert callable(seen.pop("progress"))
    assert seen == {
        "places": ("a", "b"),
        "form": "factored",
        "qk": "fused",
        "vo": "auto",
        "dtype": "float16",
        "device": "d",
        "backend": "e",
        "codes": "keep",
        "batch": 2,
        "repetitions": 4,
        "contexts": [5, 6],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--context", "64,,128"], "--context 64,,128: whole numbers"),
        (["--context", "-64"], "whole numbers"),
        (["--context", "4097"], "this model has 4,096 positions"),
        (["--repetitions", "1"], "take 3 or more"),
        (["--backend", "magic"], "--backend magic is not known"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--codes", "keep"], "--codes keep keeps the codes of a quantized folder, and no folder"),
        (["--plot", "p.bmp"], "supported are .pdf, .png, .svg"),
        (["no/such/folder"], "no/such/folder"),
    ],
    ids=" ".join,
)
def test_faults_are_one_line(
    invoke: Invoke, example_path: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark._Run, "measure", None)  # all of it is refused before anything is measured
    result = invoke("bench", example_path, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and words in result.stderr
