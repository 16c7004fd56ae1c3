"""Statistics of logits against the formulas written out, the prompts, the schedules, and the two rules."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mla_convert import judgement
from mla_convert.divergence import Divergence, compare, kl_divergence, largest, quantile
from mla_convert.errors import UsageError
from mla_convert.jsonable import jsonable
from mla_convert.judgement import judge
from mla_convert.prompts import read_prompts
from mla_convert.stages import Calls, Outputs, Stage, watched_routers

NONE = torch.zeros(1, 1, dtype=torch.bool)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_is_the_largest(place: int) -> None:
    figures = [0.3, 0.1, 0.2]
    assert largest(figures) == 0.3
    figures[place] = math.nan
    assert math.isnan(largest(figures))


def test_kl_is_the_formula() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    expected = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)
    # Logits are free up to a constant per row.
    found = kl_divergence(
        torch.tensor([p], dtype=torch.float64).log() + 7, torch.tensor([q], dtype=torch.float64).log() - 2
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert kl_divergence(torch.tensor([q]).log(), torch.tensor([q]).log() + 1) == pytest.approx(0, abs=1e-7)


def test_a_masked_vocabulary_counts_for_nothing() -> None:
    p = torch.tensor([[1.0, 2.0, -math.inf]])
    found = compare(p[None], p[None] + torch.tensor([0.0, 0.5, 0.0]), ~NONE, NONE)
    assert (float(found.difference), float(found.relative)) == (0.5, 0.5)  # the range is 2 − 1
    shares = torch.tensor([1.0, 2.0]).double().softmax(0), torch.tensor([1.0, 2.5]).double().softmax(0)
    expected = sum(float(a * (a / b).log()) for a, b in zip(*shares, strict=True))
    assert float(found.kl) == pytest.approx(expected, rel=1e-12)


def test_figures_of_each_position() -> None:
    reference = torch.tensor([[[0.0, 1.0, 4.0], [9.0, 9.0, 9.0], [2.0, 0.0, 0.0]]])
    tested = torch.tensor([[[0.0, 1.5, 4.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    real = torch.tensor([[True, False, True]])
    found = compare(reference, tested, real, torch.tensor([[False, True, True]]))
    assert found.difference.tolist() == [0.5, 2.0] and found.relative.tolist() == [0.125, 1.0]
    assert found.agrees.tolist() == [True, False] and found.rerouted.tolist() == [False, True]
    assert found.places.tolist() == [[0, 0], [0, 2]]
    summary = found.summary()
    assert (summary.largest_difference, summary.largest_relative, summary.largest_relative_settled) == (2, 1, 0.125)
    assert (summary.worst_sequence, summary.worst_token) == (0, 2)
    assert (summary.top1_agreement, summary.rerouted) == (0.5, 1)
    # The rerouted position is in the mean and the largest, and not in the quantiles.
    assert summary.median_kl == summary.p99_kl == float(found.kl[0]) < summary.mean_kl < summary.largest_kl
    assert summary.largest_kl == float(found.kl[1])


def test_many_positions_are_worked_on_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, tested = torch.randn(2, 3, 301, 7, generator=generator)
    real = torch.rand(3, 301, generator=generator) < 0.9
    found = compare(reference, tested, real, ~real)
    log_p, log_q = reference[real].double().log_softmax(-1), tested[real].double().log_softmax(-1)
    torch.testing.assert_close(found.kl, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-12, atol=1e-15)
    assert torch.equal(found.places, real.nonzero()) and not found.rerouted.any()


def test_equal_logits_are_no_distance_even_where_all_are_the_same() -> None:
    same = torch.zeros(1, 1, 5)
    found = compare(same, same.clone(), ~NONE, NONE).summary()
    assert (found.largest_relative, found.largest_kl, found.top1_agreement) == (0, 0, 1)
    moved = compare(same, torch.tensor([[[0.0, 0, 1e-9, 0, 0]]]), ~NONE, NONE).summary()
    assert moved.largest_relative == math.inf


def test_quantiles_are_interpolated() -> None:
    values = torch.arange(101).double()[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 0.005)) == (50, 99, 0.5)
    assert (quantile(values, -1), quantile(values, 1.2)) == (0, 100)
    assert math.isnan(quantile(values[:0], 0.5))


def test_text_goes_through_the_tokenizer(example_path: Path) -> None:
    from tokenizers import Tokenizer

    prompts = read_prompts(example_path, 1024)
    first, second = prompts.take(2, 5), prompts.take(1, 5)
    ids = Tokenizer.from_file(str(example_path / "tokenizer.json")).encode(
        (example_path / "held_out.txt").read_text("utf-8"), add_special_tokens=False
    )
    assert torch.cat((first, second)).flatten().tolist() == ids.ids[:15]
    assert prompts.description == f"text of {example_path / 'held_out.txt'} (15 tokens)" and not prompts.random


def test_a_short_text_is_repeated_and_that_is_said(example_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n", "utf-8")
    prompts = read_prompts(example_path, 1024, tmp_path / "text.txt")
    size = len(prompts.stream)
    row = prompts.take(1, 2 * size)[0]
    assert torch.equal(row[:size], row[size:]) and f"repeated: it has {size}" in prompts.description


def test_a_tokenizer_without_text_gets_the_packages_own(example_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((example_path / "tokenizer.json").read_bytes())
    assert str(example_path / "held_out.txt") in read_prompts(tmp_path, 1024).description


def test_without_a_tokenizer_tokens_are_random_and_that_is_said(tmp_path: Path) -> None:
    prompts, again = read_prompts(tmp_path, 50), read_prompts(None, 50)
    row = prompts.take(1, 2000)
    assert torch.equal(row, again.take(1, 2000)) and set(row.flatten().tolist()) == set(range(50))
    assert prompts.random and "random tokens, seed 0" in prompts.description


def test_prompts_that_cannot_be_used(example_path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("", "utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UsageError, match="there is no tokenizer.json"):
        read_prompts(tmp_path, 1024, tmp_path / "empty.txt")
    with pytest.raises(UsageError, match="holds no text"):
        read_prompts(example_path, 1024, tmp_path / "empty.txt")
    with pytest.raises(UsageError, match="cannot be read as text"):
        read_prompts(example_path, 1024, tmp_path / "bytes.txt")
    with pytest.raises(UsageError, match="vocabulary has 20: it is the tokenizer of another model"):
        read_prompts(example_path, 20)


def test_cuts_cover_every_position_once() -> None:
    ids = torch.zeros(2, 11, dtype=torch.int64)
    assert Stage("a", ids, 11).cuts() == [(0, 11)] and not Stage("a", ids, 11).decodes
    assert Stage("a", ids, 4, 3).cuts() == [(0, 4), (4, 7), (7, 10), (10, 11)]
    assert Stage("a", ids, 9).cuts() == [(0, 9), (9, 10), (10, 11)]
    padded = Stage("a", ids, 4, padding=torch.tensor([0, 3]))
    assert padded.real.sum(dim=1).tolist() == [11, 8] and not padded.real[1, :3].any()
    assert padded.parts() == {"a prefill": (0, 4), "a decode": (4, 11)}


class TopkRouter(nn.Module):
    """Returns logits, weights and experts, as transformers' routers do."""

    def forward(self, picked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return picked.double(), picked.double(), picked


def test_routers_are_compared_as_sets() -> None:
    model = nn.Sequential(TopkRouter())
    runs = []
    for picked in ([[0, 1], [2, 3], [4, 5]], [[1, 0], [3, 2], [4, 6]]):
        with watched_routers(model) as routers:
            model[0](torch.tensor(picked))
            routers.cut(1, 3)
        runs.append(Outputs(torch.zeros(1, 3, 2), routers.joined()))
    assert not model[0]._forward_hooks and list(runs[0].routes) == ["0"]
    assert runs[1].rerouted(runs[0]).tolist() == [[False, False, True]]


def test_a_router_that_does_not_see_every_token_is_left_out() -> None:
    model = nn.Sequential(TopkRouter())
    with watched_routers(model) as routers:
        model[0](torch.tensor([[0, 1]]))
        routers.cut(1, 3)
    assert routers.joined() == {}


DECODE = Stage("decode", torch.zeros(1, 8, dtype=torch.int64), 4)
RAN = Calls({"a": 2}, {"a": 1})


def sample(n: int, scale: float = 1.0, rerouted: int = 0, wrong: int = 0, relative: float = 1e-6) -> Divergence:
    """n positions with KL from 0 to ``scale``, evenly; the last ones rerouted, or with another top-1."""
    order = torch.arange(n)
    return Divergence(
        difference=torch.full((n,), relative, dtype=torch.float64),
        relative=torch.full((n,), relative, dtype=torch.float64),
        kl=(order.double() + 0.5) / n * scale,
        agrees=order < n - wrong,
        places=torch.stack((order, order), dim=1),
        rerouted=order >= n - rerouted,
    )


def test_the_strict_rule_and_its_edge() -> None:
    assert judge("decode", DECODE, RAN, sample(9, relative=judgement.STRICT), None).passed
    failed = judge("decode", DECODE, RAN, sample(9, relative=1.01e-4), None)
    assert not failed.passed
    assert "decode: a logit differs by 1.01e-04 of the range, over 1e-04, at sequence 0" in failed.failures[0]


def test_what_is_not_a_number_passes_no_rule() -> None:
    broken = sample(5000)
    broken.relative[7] = math.nan
    failed = judge("decode", DECODE, RAN, broken, None)
    assert not failed.passed and failed.patched.worst_sequence == 7
    broken.kl[7] = math.nan
    assert not judge("decode", DECODE, RAN, broken, sample(5000)).passed
    entry = jsonable(failed)
    assert json.loads(json.dumps(entry, allow_nan=False))["patched"]["largest_relative"] is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (sample(5000, scale=1.24, wrong=20), None),
        (sample(5000, scale=1.26), "decode: the median of the KL to the float32 original is 6.30e-01, over 6.25e-01"),
        (sample(5000, wrong=45), None),  # 25, and three deviations of 45
        (sample(5000, wrong=47), "top-1 agreement with the float32 original is 99.06%"),
        (sample(5000, rerouted=40), "at 40 positions, over 19; the floor, the original's own, has 0"),
        (sample(5000, rerouted=5), None),
    ],
    ids=["within", "median", "edge of top-1", "top-1", "rerouted", "few rerouted"],
)
def test_the_floor_rule(found: Divergence, words: str | None) -> None:
    report = judge("decode", DECODE, RAN, found, sample(5000))
    assert report.passed == (words is None)
    assert words is None or any(words in failure for failure in report.failures)


def test_a_failure_says_whose_the_floor_is() -> None:
    whose = "that of the same bits on kv_b_proj"
    report = judge("decode", DECODE, RAN, sample(5000, 2.0, rerouted=40, wrong=90), sample(5000), whose)
    assert len(report.failures) == 4 and all(whose in failure for failure in report.failures)
    assert not any("original's own" in failure or "original itself" in failure for failure in report.failures)


def test_the_floor_rule_looks_at_the_tail_apart() -> None:
    tail = sample(5000)
    tail.kl[-100:] = 1.6
    (failure,) = judge("decode", DECODE, RAN, tail, sample(5000)).failures
    assert "99th percentile" in failure and "1.5 times" in failure and "sequence 4900" in failure
    tail.rerouted[-100:] = True  # the same positions, rerouted: their number is judged instead
    (failure,) = judge("decode", DECODE, RAN, tail, sample(5000)).failures
    assert "routers picked other experts" in failure


def test_few_positions_are_given_their_sampling_error() -> None:
    """Samples of one distribution differ by chance, and a few positions scatter widely."""
    generator = torch.Generator().manual_seed(0)
    for n in (36, 1000):
        passed, bare = 0, 0
        for _ in range(200):
            pair = [dataclasses.replace(sample(n), kl=torch.randn(n, generator=generator).double().exp()) for _ in "ab"]
            passed += judge("decode", DECODE, RAN, *pair).passed
            bare += quantile(pair[0].kl, 0.5) <= 1.25 * quantile(pair[1].kl, 0.5)
        # Both samples would have to be three deviations off, in opposite directions.
        assert passed == 200
        assert bare < 200 or n > 36  # without that room, correct models would fail
    assert not judge("decode", DECODE, RAN, sample(36, scale=5), sample(36)).passed


def test_agreement_is_given_its_sampling_error() -> None:
    """Two roundings of one model lose a few near ties each, and partly the same; a worse model loses more of them."""
    generator = torch.Generator().manual_seed(0)

    def at(agreement: float, close: torch.Tensor) -> Divergence:
        lost = torch.rand(4096, generator=generator) < (1 - agreement) / 0.04
        return dataclasses.replace(sample(4096), agrees=~(close & lost))

    passed = bare = noticed = 0
    for _ in range(200):
        close = torch.rand(4096, generator=generator) < 0.04  # positions at which the two largest logits nearly tie
        found, own, worse = at(0.98, close), at(0.98, close), at(0.96, close)
        passed += judge("decode", DECODE, RAN, found, own).passed
        bare += bool(found.agrees.double().mean() >= own.agrees.double().mean() - judgement.TOP1)
        noticed += not judge("decode", DECODE, RAN, worse, own).passed
    assert passed == 200 and noticed > 190
    assert bare < 200  # without that room, correct models would fail


def test_absorbed_attention_has_to_have_run_in_every_module() -> None:
    idle = judge("decode", DECODE, Calls({"a": 4, "b": 4}, {"a": 3, "b": 0}), sample(9), None)
    assert (idle.absorbed_calls, idle.expanded_calls) == (3, 5)
    assert "attention never ran absorbed in b" in idle.failures[0]
    assert not judge("decode", DECODE, Calls({}, {}), sample(9), None).passed
    prefill = Stage("prefill", DECODE.ids, 8)
    assert judge("prefill", prefill, Calls({"a": 1}, {"a": 0}), sample(9), None).passed
