"""The benchmark of one attention step: one command writes the file that the README quotes."""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import benchmarking
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

RECORDED = benchmarking.RESULTS / "decode_step.json"


@pytest.fixture(scope="module")
def decode_step() -> ModuleType:
    return benchmarking.script("decode_step")


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_step.py", "--threads", str(torch.get_num_threads()), *arguments])
    module.main()


def test_without_options_it_measures_what_is_recorded(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    recorded = json.loads(RECORDED.read_text("utf-8"))
    rows = [(row["dims"], row["dtype"], row["history"]) for row in recorded["rows"]]

    def compare(dims: str, dtype: torch.dtype, histories: list[int], _: int) -> list[dict[str, object]]:
        return [{"dims": dims, "dtype": str(dtype).removeprefix("torch."), "history": each} for each in histories]

    monkeypatch.setattr(decode_step, "compare", compare)
    run(decode_step, monkeypatch, "--json", str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert [(row["dims"], row["dtype"], row["history"]) for row in written["rows"]] == rows
    assert list(written) == list(recorded) and "threads" in written["machine"]


def test_a_chosen_measurement_has_the_recorded_columns(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    run(
        decode_step,
        monkeypatch,
        *"--dims small --dtype float32 --history 8 --repetitions 3 --json".split(),
        str(target),
    )
    (row,) = json.loads(target.read_text("utf-8"))["rows"]
    assert row.keys() == json.loads(RECORDED.read_text("utf-8"))["rows"][0].keys()
    assert (row["dims"], row["dtype"], row["history"]) == ("small", "float32", 8)
    # float32 products of at most 128 numbers each, in another order: a few hundred roundings of 2 ** -24.
    assert row["relative_difference"] < 1e-4 and "small   float32" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.inference_mode()
def test_a_step_appends_by_the_name_that_the_release_has(
    decode_step: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Attention of transformers before 5.24 takes ``past_key_values``, and passes over other names without a word."""
    ours = inspect.signature(DeepseekV3Attention.forward).parameters
    inner, theirs = DeepseekV3Attention.forward, "cache" if "cache" in ours else "past_key_values"

    def forward(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past: Any = None, **rest: Any
    ) -> Any:
        return inner(self, hidden_states, position_embeddings, attention_mask, **{theirs: rest.pop(name, past)})

    parameters = [p.replace(name=name) if p.name == theirs else p for p in ours.values()]
    monkeypatch.setattr(forward, "__signature__", inspect.Signature(parameters), raising=False)
    monkeypatch.setattr(DeepseekV3Attention, "forward", forward)
    original, patched = decode_step.pair("small", torch.float32)
    for side in (decode_step.Side(original, 8, 1), decode_step.Side(patched, 8, 1)):
        for _ in range(2):
            side.step()
            assert side.cache.get_seq_length() == 9
            side.back()
            assert side.cache.get_seq_length() == 8
        with pytest.raises(AssertionError, match="a step over 8 tokens left 8 in the cache"):
            side.back()


def test_options_are_each_with_each(decode_step: ModuleType) -> None:
    args = argparse.Namespace(dims=["v3", "small"], dtype=None, history=[7])
    assert decode_step.chosen(args) == [
        (dims, dtype, [7]) for dims in ("v3", "small") for dtype in ("bfloat16", "float32")
    ]
