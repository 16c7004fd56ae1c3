"""Distance on held-out text: which positions count, what the figures are, and kv_b_proj with the same bits."""

from __future__ import annotations

import math
import pathlib
import shutil

import models
import pytest
import torch

import mla_convert
from mla_convert import quality
from mla_convert.errors import UsageError
from mla_convert.prompts import Prompts
from mla_convert.quality import PREFILL, WINDOW, Windows, code_rows, coded_projections, cut_windows, measure, perplexity
from mla_convert.quantization import quantize
from mla_convert.schemes import FP8_BLOCKS, INT8, int4
from mla_convert.stages import Outputs


def text(tokens: int) -> Prompts:
    return Prompts(torch.arange(tokens), "numbers", random=False)


def test_every_position_after_the_prefill_counts_once() -> None:
    windows = cut_windows(text(2 * WINDOW + 100))
    assert windows.ids.shape == (3, WINDOW) and windows.ids[2, -1] == 2 * WINDOW + 99
    counted = windows.ids[windows.counted]
    assert len(counted.unique()) == len(counted) == 2 * (WINDOW - PREFILL) + 100
    assert cut_windows(text(2 * WINDOW)).ids.shape[0] == 2
    # A remainder longer than what follows the prefill: only decoded positions count.
    assert int(cut_windows(text(WINDOW + 250)).counted[1].sum()) == WINDOW - PREFILL
    assert len(cut_windows(text(2000), most=2).ids) == 2
    with pytest.raises(UsageError, match="255 tokens, and one window has 256"):
        cut_windows(text(255))


def outputs(logits: torch.Tensor, *, experts: int = 0) -> Outputs:
    routes = {"router": torch.full((*logits.shape[:2], 1), experts)}
    return Outputs(logits, routes)


def test_figures_by_their_definition() -> None:
    ids = torch.tensor([[0, 1, 2, 1]])
    windows = Windows(ids, torch.tensor([[False, True, True, True]]))
    ours = torch.zeros(1, 4, 3)
    theirs = torch.zeros(1, 4, 3)
    theirs[0, 1] = torch.tensor([0.0, 0.0, math.log(2)])
    found = measure([outputs(ours)], [outputs(theirs, experts=1)], windows)
    # Uniform against (1/4, 1/4, 1/2) at one of three positions.
    kl = (2 * math.log(4 / 3) + math.log(2 / 3)) / 3
    assert found.positions == 3 and found.mean_kl == pytest.approx(kl / 3) and found.largest_kl == pytest.approx(kl)
    assert found.median_kl == 0 and found.changed_experts == 3
    # Next tokens of positions 1 and 2: token 2 with probability 1/2, then token 1 with 1/3.
    assert found.perplexity == pytest.approx(math.sqrt(2 * 3))
    assert found.reference_perplexity == perplexity([outputs(ours)], windows) == pytest.approx(3)


def test_kv_b_proj_with_the_same_bits() -> None:
    heads, n, v, c = 2, 128, 128, 64
    kv_b = torch.randn(heads * (n + v), c, generator=torch.Generator().manual_seed(0))
    rows = kv_b.view(heads, n + v, c)
    mixed = code_rows(kv_b, heads, n, INT8, int4(32)).view(rows.shape)
    assert torch.equal(mixed[:, :n].reshape(-1, c), quantize(rows[:, :n].reshape(-1, c), INT8).dequantize())
    assert torch.equal(mixed[:, n:].reshape(-1, c), quantize(rows[:, n:].reshape(-1, c), int4(32)).dequantize())
    assert torch.equal(code_rows(kv_b, heads, n, None, INT8).view(rows.shape)[:, :n], rows[:, :n])
    assert torch.equal(code_rows(kv_b, heads, n, FP8_BLOCKS, FP8_BLOCKS), quantize(kv_b, FP8_BLOCKS).dequantize())


def test_projections_are_given_back() -> None:
    model = models.deepseek_v3()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError), coded_projections(model, INT8, INT8):
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == {f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)}
        raise KeyError
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_report_says_what_was_read(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, with its windows; and random tokens, which nobody could guess, without a perplexity."""
    monkeypatch.setattr(quality, "WINDOW", PREFILL + 4)
    monkeypatch.setattr(quality, "MOST", 2)
    bare = shutil.copytree(example_path, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.txt"))
    for source, title, random in (
        (example_path, f"On held-out text of {example_path / 'held_out.txt'}: 8 decoded positions in 2 windows", False),
        (bare, "On random tokens, seed 0, since there is no tokenizer: 8 decoded positions in 2 windows", True),
    ):
        out = tmp_path / str(random)
        found = mla_convert.convert(source, out, form="factored", quantize="int4", measure=True).quality
        assert found is not None and found.title == title and found.random is random
        columns, rows = found.rows()
        assert ("perplexity" in columns) is not random and all(len(row) == len(columns) for row in rows)
        assert (found.absorbed.perplexity is None) is random and found.absorbed.mean_kl > 0
        assert [row[0] for row in rows][-2:] == ["absorbed weights", "same bits on kv_b_proj"]
