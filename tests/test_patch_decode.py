"""Patched models do what the originals do: prefill, decode, padding, every cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from patching import BOUND, FORMS, steps
from transformers import DynamicCache, PreTrainedModel, StaticCache

import mla_convert
from mla_convert.kernels import dispatch


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("make", [models.deepseek_v3, models.deepseek_v2])
@torch.inference_mode()
def test_decode_equals_the_original(
    make: Callable[..., PreTrainedModel], form: dict[str, str], attn: str, runs: list[int]
) -> None:
    model, ids = make(attn=attn), models.tokens(2, 30)
    whole = model(ids).logits
    for sizes in ([20] + [1] * 10, [9, 3, 3, 1, 14], [1] * 30):
        with mla_convert.patched(model, **form):
            runs.clear()
            logits = steps(model, ids, DynamicCache(), sizes)
        assert models.relative(logits, whole) <= BOUND
        assert runs.count(1) == 2 * sizes.count(1)  # two layers
    with mla_convert.patched(model, prefill_threshold=30, **form):
        runs.clear()
        assert models.relative(model(ids).logits, whole) <= BOUND
        assert runs == [30, 30]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "make_cache",
    [
        lambda config: DynamicCache(config=config),
        lambda config: DynamicCache(),
        lambda config: mla_convert.LatentCache(config),
        lambda config: mla_convert.LatentCache(),
        lambda config: StaticCache(config=config, max_cache_len=40),
    ],
    ids=["dynamic", "dynamic-lazy", "latent", "latent-lazy", "static"],
)
@torch.inference_mode()
def test_left_padding_with_every_cache(make_cache: Callable[[Any], Any], attn: str) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(3, 24)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :1] = 0, 0
    for sizes in ([12] + [1] * 12, [12, 3, 3, 3, 3]):
        expected = steps(model, ids, make_cache(model.config), sizes, attention_mask=mask)
        for form in ({}, {"form": "fused"}, {"cache": "dynamic"}, {"prefill_threshold": 12}):
            with mla_convert.patched(model, **form):
                found = steps(model, ids, make_cache(model.config), sizes, attention_mask=mask)
            real = mask.bool()
            assert models.relative(found[real], expected[real]) <= BOUND


@torch.inference_mode()
def test_right_padding_and_custom_masks() -> None:
    """Patterns that are not causal with a padded front: the causal rule must not hide what the mask shows."""
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    padded = torch.ones_like(ids)
    padded[0, 9:] = 0
    open_prefix = torch.ones(12, 12, dtype=torch.bool).tril()
    open_prefix[:4, :4] = True
    boolean = open_prefix.expand(2, 1, 12, 12)
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~boolean, torch.finfo(torch.float32).min)
    biased = additive - 0.3 * torch.rand(12, generator=torch.Generator().manual_seed(0))
    for mask in (padded, boolean, additive, biased):
        expected = model(ids, attention_mask=mask).logits
        with mla_convert.patched(model, prefill_threshold=12):
            found = model(ids, attention_mask=mask).logits
        real = padded.bool() if mask is padded else torch.ones_like(padded, dtype=torch.bool)
        assert models.relative(found[real], expected[real]) <= BOUND


@torch.inference_mode()
def test_packed_sequences() -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 12)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    expected = model(ids, position_ids=positions, use_cache=False).logits
    for threshold in ("auto", 100):
        with mla_convert.patched(model, prefill_threshold=threshold):
            assert models.relative(model(ids, position_ids=positions, use_cache=False).logits, expected) <= BOUND


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("threshold", [0, 12])
@torch.inference_mode()
def test_first_prefill_into_a_static_cache(attn: str, threshold: int) -> None:
    """Without a mask, the first S keys count, and the empty rest of the cache does not."""
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 12)
    expected = model(ids).logits
    with mla_convert.patched(model, prefill_threshold=threshold):
        found = model(ids, cache=StaticCache(config=model.config, max_cache_len=30)).logits
    assert models.relative(found, expected) <= BOUND


@torch.inference_mode()
def test_static_cache_stops_at_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told where the history ends, so that the rest of the capacity is not read."""
    model, ids = models.deepseek_v3(), models.tokens(2, 9)
    lengths = []

    def noting(args: Any, backend: str) -> Any:
        lengths.append(args.kv_lens.tolist())
        return dispatch.decode(args, backend)

    monkeypatch.setattr("mla_convert.patches.layer.decode", noting)
    with mla_convert.patched(model):
        cache = StaticCache(config=model.config, max_cache_len=64)
        for i in range(9):
            model(ids[:, i : i + 1], cache=cache)
    assert lengths == [[i, i] for i in range(1, 10) for _ in range(2)]


@torch.inference_mode()
def test_generate_gives_the_same_tokens(example_path: Any) -> None:
    """The trained example, a batch of 4 with left padding, 200 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(example_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(example_path, dtype=torch.float32).eval()
    texts = [
        "def",
        "import os\n\nclass Reader:\n    def __init__(self",
        "    for name in names:\n",
        "# A comment\nx = [",
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    expected = model.generate(**batch, **options)
    for form in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **form):
            assert torch.equal(model.generate(**batch, **options), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_half_precision_is_as_close_as_the_original(dtype: torch.dtype) -> None:
    """Distance to the float32 model, in the mean: at most 1.25 times the original's own."""
    exact, ids = models.deepseek_v3(), models.tokens(8, 64)
    reference = exact(ids).logits
    model = models.deepseek_v3(dtype=dtype)
    own = (steps(model, ids, DynamicCache(), [32] + [1] * 32).float() - reference).abs().mean()
    for form in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **form):
            found = (steps(model, ids, DynamicCache(), [32] + [1] * 32).float() - reference).abs().mean()
        assert found <= 1.25 * own
