"""Decode steps timed side by side: who runs when, over what history, what is timed, what is refused, the results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import mla_convert
from mla_convert import benchmark, report
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError
from mla_convert.machine import describe_machine, device_name
from mla_convert.patches.latent_layer import LatentLayer
from mla_convert.patches.layer import AbsorbedLayer
from mla_convert.report import BenchmarkReport, ContextTiming, Spread

#: Largest logit difference over the range in float32, from the design.
BOUND = 1e-4


class Watch:
    """A clock that moves only while attention is computed, and a record of who computed over how many tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        expand, attend, crop = DeepseekV3Attention.expand_kv, AbsorbedLayer.attend, LatentLayer.crop

        def expanding(module: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
            self.take("original", kv_nope.shape[2], 1.5)
            return expand(module, kv_nope, k_rot)

        def attending(layer: Any, query: torch.Tensor, latent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.take("patched", latent.shape[1], 0.25)
            return attend(layer, query, latent, *args, **kwargs)

        def cropping(layer: Any, tokens: int) -> None:
            self.now += 1000.0  # must not be timed
            crop(layer, tokens)

        monkeypatch.setattr(DeepseekV3Attention, "expand_kv", expanding)
        monkeypatch.setattr(AbsorbedLayer, "attend", attending)
        monkeypatch.setattr(LatentLayer, "crop", cropping)
        monkeypatch.setattr(benchmark, "perf_counter", lambda: self.now)

    def take(self, who: str, tokens: int, seconds: float) -> None:
        self.now += seconds
        self.calls.append((who, tokens))


@pytest.fixture
def model() -> PreTrainedModel:
    return models.deepseek_v3()


def test_the_two_take_turns_over_equal_lengths(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    result = mla_convert.bench(model, contexts=[7, 33], repetitions=3, batch=2)
    one = [("original", 7)] * 2 + [("patched", 7)] * 2  # two layers
    two = [("original", 33)] * 2 + [("patched", 33)] * 2
    trial = [("original", 2)] * 2
    assert watch.calls == trial + one * 4 + two * 4  # a step of each that is not timed, then three that are
    for row in result.contexts:
        assert row.original == Spread(3.0, 3.0, 3.0, (3.0, 3.0, 3.0))
        assert row.patched == Spread(0.5, 0.5, 0.5, (0.5, 0.5, 0.5))
        assert row.ratio.median == 6.0
    assert result.notes == []


def test_a_real_run(model: PreTrainedModel) -> None:
    ticks: list[tuple[int, int]] = []
    result = mla_convert.bench(model, contexts=[1, 64], repetitions=4, progress=lambda *tick: ticks.append(tick))
    assert ticks == [(done, 10) for done in range(1, 11)]
    assert [row.context for row in result.contexts] == [1, 64]
    for row in result.contexts:
        assert len(row.original.values) == len(row.patched.values) == len(row.ratio.values) == 4
        for figure in (row.original, row.patched, row.ratio):
            assert 0 < figure.low <= figure.median <= figure.high
        assert 0 <= row.logit_difference < BOUND
    # over one token attention has nothing to weigh, over 64 it has: equal logits say that the histories are equal
    assert (result.dtype, result.batch, result.repetitions) == ("float32", 1, 4)
    assert result.machine == describe_machine(torch.device("cpu"))


def test_histories_that_differ_would_show(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = benchmark.fill

    def fill_otherwise(caches: Any, *args: Any) -> None:
        fill(caches, *args)
        caches[1].layers[0].rows[:, 3] *= -1

    monkeypatch.setattr(benchmark, "fill", fill_otherwise)
    result = mla_convert.bench(model, contexts=[64], repetitions=3)
    assert result.contexts[0].logit_difference > BOUND


def test_the_history_is_what_the_layer_would_cache(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.fill_(3.0)
        caches = DynamicCache(config=model.config), mla_convert.LatentCache(model.config)
        benchmark.fill(caches, model, 2, 50)
    for plain, latent in zip(caches[0].layers, caches[1].layers, strict=True):
        assert (plain.keys.shape, plain.values.shape) == ((2, 1, 50, 40), (2, 1, 50, 8))
        assert torch.equal(plain.keys, latent.keys) and torch.equal(plain.values, latent.values)
        torch.testing.assert_close(plain.keys.square().mean(dim=-1).sqrt(), torch.full((2, 1, 50), 3.0))
    assert not torch.equal(caches[0].layers[0].keys, caches[0].layers[1].keys)


def test_a_twin_has_the_same_weights_and_other_modules(model: PreTrainedModel) -> None:
    twin = benchmark.twin(model.train())
    pairs = list(zip(model.named_parameters(), twin.named_parameters(), strict=True))
    assert pairs and all(a is b and one == other for (one, a), (other, b) in pairs)
    assert not set(map(id, model.modules())) & set(map(id, twin.modules()))
    assert twin.config is not model.config
    assert model.training and not twin.training


def test_the_model_that_was_given_stays_as_it_is(model: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    mla_convert.bench(model.train(), form="fused", contexts=[8], repetitions=3)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_checkpoint_folder(example_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = mla_convert.bench(example_path, form="fused", vo="factored", contexts=[64], dtype="float32", repetitions=3)
    assert (result.patch.qk_form, result.patch.vo_form) == ("fused", "factored")
    assert str(example_path) in result.model and result.dtype == "float32"
    assert result.contexts[0].logit_difference < BOUND
    assert capfd.readouterr() == ("", "")  # no bars of transformers either


def test_a_folder_brings_its_absorbed_weights_along(example_path: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(example_path, tmp_path / "model")
    mla_convert.convert(folder, folder, form="fused")
    own = mla_convert.bench(folder, contexts=[8], repetitions=3)
    assert own.dtype == "bfloat16"
    assert (own.patch.weights_from, own.patch.qk_form, own.patch.vo_form) == (str(folder), "fused", "fused")
    chosen = mla_convert.bench(folder, form="factored", contexts=[8], repetitions=3)
    assert (chosen.patch.weights_from, chosen.patch.qk_form) == ("the model itself", "factored")


def test_the_contexts_by_default_fit_the_model(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Watch(monkeypatch)
    assert [row.context for row in mla_convert.bench(model, repetitions=3).contexts] == [64]
    small = models.deepseek_v3(max_position_embeddings=48)
    assert [row.context for row in mla_convert.bench(small, repetitions=3).contexts] == [48]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"contexts": [64, 513, 1024]}, r"contexts=\[513, 1024\]: this model has 512 positions"),
        ({"contexts": [0]}, "from 1 to 512"),
        ({"contexts": []}, r"contexts=\[\]: this model has"),
        ({"contexts": [64.5]}, r"contexts=\[64.5\]; a list of whole numbers"),
        ({"contexts": [True]}, "a list of whole numbers"),
        ({"contexts": 64}, "contexts=64; a list of whole numbers"),
        ({"contexts": "64"}, "contexts='64'; a list of whole numbers"),
        ({"repetitions": "3"}, "repetitions='3'; a whole number"),
        ({"repetitions": None}, "repetitions=None; a whole number"),
        ({"batch": 1.5}, "batch=1.5; a whole number"),
        ({"repetitions": 2}, "take 3 or more"),
        ({"batch": 0}, "take 1 or more"),
        ({"dtype": "bfloat16"}, "for a checkpoint folder"),
        ({"device": "cpu"}, "for a checkpoint folder"),
        ({"backend": "magic"}, "backend='magic' is not known"),
        ({"form": "melted"}, "form='melted' is not known"),
    ],
    ids=str,
)
def test_refused_calls(
    model: PreTrainedModel, given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    with pytest.raises(UsageError, match=words):
        mla_convert.bench(model, **given)
    assert not watch.calls


def test_refused_models(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found Linear"):
        mla_convert.bench(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with mla_convert.patched(model), pytest.raises(PatchError, match="patched already"):
        mla_convert.bench(model, contexts=[8])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    with pytest.raises(UnsupportedModelError, match="llama"):
        mla_convert.bench(tmp_path)
    with pytest.raises(UsageError, match="device='nowhere' cannot be used here"):
        mla_convert.bench(tmp_path, device="nowhere")


def test_a_spread() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert spread.values == (5.0, 1.0, 2.0, 4.0, 3.0) and spread.width == pytest.approx(2 / 3)


@pytest.fixture
def made() -> BenchmarkReport:
    """A report with known figures: at 64 a calm run, at 4,096 a disturbed one."""
    model = models.deepseek_v3()
    handle = mla_convert.patch(model)
    calm, restless = Spread.of([1.0, 1.0, 1.02]), Spread.of([0.1, 0.2, 0.3])
    rows = (
        ContextTiming(64, calm, Spread.of([0.5, 0.5, 0.5]), Spread.of([2.0, 2.0, 2.04]), 1e-7),
        ContextTiming(4096, calm, restless, Spread.of([3.4, 5.0, 10.0]), 2e-7),
    )
    return BenchmarkReport("m", "float32", 1, 3, rows, handle.describe(), describe_machine(torch.device("cpu")))


def test_the_report_in_words(made: BenchmarkReport) -> None:
    text = str(made)
    assert "1,000 (1,000 … 1,010)" in text and "4,096" in text and "5.00 (4.20 … 7.50)" in text
    assert f"3 repetitions in turns, {torch.get_num_threads()} thread" in text and torch.__version__ in text
    assert device_name(torch.device("cpu")) in text and "(sdpa)" in text
    assert made.notes == [text.splitlines()[-1]]
    assert "the quartiles at 4,096 lie up to 50% of the median apart" in made.notes[0]


def test_the_report_as_json(made: BenchmarkReport) -> None:
    read = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert read["contexts"][1]["ratio"]["median"] == 5.0
    assert read["contexts"][0]["original"]["values"] == [1.0, 1.0, 1.02]
    assert read["machine"]["torch"] == torch.__version__ and read["patch"]["qk_form"] == "factored"
    assert read["notes"] == made.notes


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")])
def test_a_plot(made: BenchmarkReport, tmp_path: Path, name: str, start: bytes) -> None:
    report.save_plot(made, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_refused_plots(made: BenchmarkReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.png").write_text("mine", "utf-8")
    for name, words in [("there.png", "overwritten"), ("a.txt", "supported are .pdf"), ("no/a.png", "no folder")]:
        with pytest.raises(UsageError, match=words):
            report.save_plot(made, tmp_path / name)
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        report.save_plot(made, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]
