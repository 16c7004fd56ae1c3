"""Every way to decode that ``generate()`` has, against the unpatched model: the same tokens and logits."""

from __future__ import annotations

import contextlib
import math
import pathlib
from typing import Any

import models
import older
import pytest
import torch
from generation import TEXTS, Subject, check_patched, check_same, generated, small, trained
from patching import BOUND
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache, pipeline

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.patches.latent_layer import LatentLayer

PATCHINGS = [{}, {"form": "fused"}]


@pytest.fixture(params=["small", "trained"])
def subject(request: pytest.FixtureRequest, example_path: pathlib.Path) -> Subject:
    return small() if request.param == "small" else trained(example_path)


@pytest.mark.parametrize("patching", PATCHINGS, ids=str)
def test_greedy(subject: Subject, patching: dict[str, Any], runs: list[int]) -> None:
    check_patched(subject.model, lambda m: generated(m, subject.ids), **patching)
    layers = subject.model.config.num_hidden_layers
    assert runs == [1] * 9 * layers  # the prefill is expanded, each later token absorbed


@pytest.mark.parametrize("patching", PATCHINGS, ids=str)
def test_left_padded_batch(subject: Subject, patching: dict[str, Any]) -> None:
    check_patched(subject.model, lambda m: generated(m, subject.padded, attention_mask=subject.mask), **patching)


def test_padding_changes_nothing_for_a_sequence(example_path: pathlib.Path) -> None:
    """A sequence decodes in a padded batch as it does alone."""
    subject = trained(example_path)
    with mla_convert.patched(subject.model):
        batch = generated(subject.model, subject.padded, attention_mask=subject.mask)
        for row, mask in enumerate(subject.mask.bool()):
            alone = generated(subject.model, subject.padded[row : row + 1, mask])
            assert torch.equal(alone.tokens[0, -10:], batch.tokens[row, -10:])


def test_sampling_with_a_seed(subject: Subject) -> None:
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
    outcomes = [
        check_patched(subject.model, lambda m, s=s: generated(m, subject.ids, seed=s, **options)) for s in (3, 4)
    ]
    assert not torch.equal(outcomes[0].tokens, outcomes[1].tokens)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
def test_beam_search(subject: Subject, options: dict[str, Any]) -> None:
    """The cache is reordered at every step."""
    beams = {"num_beams": 3, "num_return_sequences": 2} | options
    run = check_patched(subject.model, lambda m: generated(m, subject.padded, attention_mask=subject.mask, **beams))
    assert len(run.tokens) == 2 * len(subject.padded)


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens removed from each latent layer, in order."""
    seen: list[int] = []
    crop = LatentLayer.crop

    def noting(self: LatentLayer, tokens_to_remove: int) -> None:
        seen.append(-tokens_to_remove)
        crop(self, tokens_to_remove)

    monkeypatch.setattr(LatentLayer, "crop", noting)
    return seen


@pytest.mark.parametrize("draft_patched", [False, True])
def test_assisted_by_a_draft_model(subject: Subject, draft_patched: bool, runs: list[int], crops: list[int]) -> None:
    """Several new tokens a step, and the rejected ones cropped from the cache."""
    ids = subject.ids[:1]
    plain = generated(subject.model, ids)
    with mla_convert.patched(subject.draft) if draft_patched else contextlib.nullcontext():
        found = check_patched(subject.model, lambda m: generated(m, ids, assistant_model=subject.draft))
    check_same(found, plain)
    assert max(runs) > 2 and max(crops) > 0 and min(crops) < 4  # some rejected, some taken


def test_assisted_by_prompt_lookup(subject: Subject, runs: list[int], crops: list[int]) -> None:
    """Proposals copied from the prompt: right now and then, wrong mostly."""
    ids = torch.cat((subject.ids[:1], subject.ids[:1]), dim=1)
    options = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "max_new_tokens": 20}
    found = check_patched(subject.model, lambda m: generated(m, ids, **options))
    check_same(found, generated(subject.model, ids, max_new_tokens=20))
    assert max(runs) > 2 and 0 < max(crops)


def test_assisted_by_early_exit(subject: Subject, runs: list[int]) -> None:
    """The draft is the patched model itself, with its first layer alone."""
    ids = subject.ids[:1]
    found = check_patched(subject.model, lambda m: generated(m, ids, assistant_early_exit=1))
    check_same(found, generated(subject.model, ids))
    assert max(runs) > 1


class Contrast(LogitsProcessor):
    """Logits of a model against those of a weaker one that runs beside it: contrastive decoding."""

    def __init__(self, amateur: PreTrainedModel) -> None:
        self.amateur = amateur

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        weaker = self.amateur(input_ids).logits[:, -1].log_softmax(-1)
        expert = scores.log_softmax(-1)
        plausible = expert >= expert.max(-1, keepdim=True).values + math.log(0.1)
        return (expert - weaker).masked_fill(~plausible, -torch.inf)  # type: ignore[return-value]


@pytest.mark.parametrize("patched_amateur", [False, True])
def test_contrastive_and_custom_processors(subject: Subject, patched_amateur: bool) -> None:
    processors = LogitsProcessorList([Contrast(subject.draft)])
    plain = generated(subject.model, subject.ids)
    with mla_convert.patched(subject.draft, prefill_threshold=50) if patched_amateur else contextlib.nullcontext():
        found = check_patched(subject.model, lambda m: generated(m, subject.ids, logits_processor=processors))
    assert not torch.equal(found.tokens, plain.tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]]},
        {"guidance_scale": 1.5},
        {"use_cache": False},
        {"output_hidden_states": True},
    ],
    ids=["penalties", "guidance", "no-cache", "hidden-states"],
)
def test_processors_and_outputs_of_transformers(subject: Subject, options: dict[str, Any]) -> None:
    """Guidance runs a second, unconditional sequence through the same model with a cache of its own."""
    check_patched(subject.model, lambda m: generated(m, subject.ids, **options))


@pytest.mark.parametrize("how", ["generate_batch", "paged", "manager"])
def test_continuous_batching_is_refused_at_the_call(how: str) -> None:
    """transformers itself cannot do it for latents, and fails in a thread of its own."""
    model = models.deepseek_v3()
    ids = models.tokens(2, 6)
    with mla_convert.patched(model), pytest.raises(PatchError, match="continuous batching.*left-padded batch"):
        if how == "generate_batch":
            model.generate_batch([row.tolist() for row in ids], max_new_tokens=3)
        elif how == "paged":
            model.generate(ids, cache_implementation="paged", max_new_tokens=3)
        else:
            model.init_continuous_batching()
    assert "init_continuous_batching" not in vars(model)


def test_a_patched_inner_model_generates_in_the_outer_one(runs: list[int]) -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 6)
    expected = generated(model, ids)
    with mla_convert.patched(model.model):
        check_same(generated(model, ids), expected)
    assert runs.count(1) == 18 and model.config._attn_implementation == "sdpa"


@older.lacks("a check of the attention implementation before continuous batching")
def test_continuous_batching_over_a_patched_inner_model_is_refused() -> None:
    """It does not reach our refusal: transformers refuses what it does not know, at the call."""
    model, ids = models.deepseek_v3(), models.tokens(2, 6)
    with (
        mla_convert.patched(model.model),
        pytest.raises(ValueError, match=r"(?s)mla_latent_over_sd.*continuous batching"),
    ):
        model.generate_batch([row.tolist() for row in ids], max_new_tokens=3)


def test_attention_weights_run_expanded_and_say_so(runs: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 8)
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    with mla_convert.patched(model, prefill_threshold=50):
        found = model.generate(ids, **options)
        said = [record for record in caplog.records if record.name.startswith("mla_convert")]
        assert [record.levelname for record in said] == ["WARNING"] and "expanded" in said[0].getMessage()
        assert not runs
        model.generate(ids, max_new_tokens=2)
        assert runs
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert len(ours) == 2
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and float((a - b).abs().max()) <= BOUND


@torch.no_grad()
def test_attention_weights_over_a_static_cache() -> None:
    """As wide as the cache has room for, as the original's, prefill and step."""
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 8)

    def weights() -> tuple[torch.Tensor, ...]:
        cache, found = StaticCache(config=model.config, max_cache_len=20), []
        for part in (ids[:, :7], ids[:, 7:]):
            found += model(part, cache=cache, output_attentions=True).attentions
        return tuple(found)

    expected = weights()
    with mla_convert.patched(model):
        found = weights()
    assert models.worst(found, expected) <= BOUND and expected[0].shape[-1] == 20


def test_pipeline(example_path: pathlib.Path) -> None:
    model = trained(example_path).model
    tokenizer = AutoTokenizer.from_pretrained(example_path, padding_side="left")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 3}
    expected = generator(TEXTS, **options)
    with mla_convert.patched(model):
        assert generator(TEXTS, **options) == expected
    assert len({str(answer) for answer in expected}) == len(TEXTS)


def test_streaming(example_path: pathlib.Path) -> None:
    """Tokens come out one by one, as they are made."""
    subject = trained(example_path)
    found: list[int] = []
    streamer = type("", (), {"put": lambda _, ids: found.extend(ids.flatten().tolist()), "end": lambda _: None})()
    plain = generated(subject.model, subject.ids[:1])
    with mla_convert.patched(subject.model):
        generated(subject.model, subject.ids[:1], streamer=streamer)
    assert found == plain.tokens[0].tolist()
