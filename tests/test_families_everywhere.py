"""Every family with every cache, original attention and threshold; and verified from its folder."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import family_models
import pytest
import torch
from family_models import both
from models import worst
from patching import BOUND
from transformers import DynamicCache, StaticCache

import mla_convert

CACHES: dict[str, Any] = {
    "dynamic": DynamicCache,
    "latent": mla_convert.LatentCache,
    "static": functools.partial(StaticCache, max_cache_len=24),
}


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
@torch.inference_mode()
def test_every_cache_and_threshold(model_type: str, attn: str) -> None:
    model: Any = family_models.make(model_type)
    if attn == "sdpa" and not type(model)._supports_sdpa:
        attn = "eager"  # the only one that the family has
    model.set_attn_implementation(attn)
    for name, cache in CACHES.items():
        # The same cache on both sides: indexers of two heads give many scores of exactly zero, and which of equal ones
        # are chosen depends on the length, so that models choose otherwise over a StaticCache, patched or not.
        expected = both(model, DynamicCache if name == "latent" else cache)
        for threshold in ("auto", 0, 100):
            with mla_convert.patched(model, prefill_threshold=threshold):
                found = both(model, cache)
            assert worst(found, expected) <= BOUND, (name, threshold)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
def test_verified_from_its_folder(model_type: str, tmp_path: pathlib.Path) -> None:
    family_models.make(model_type).save_pretrained(tmp_path / "source")
    mla_convert.convert(tmp_path / "source", tmp_path / "out")
    report = mla_convert.verify(tmp_path / "source", tmp_path / "out", prefill=10, decode=6, batch=2)
    assert report.passed and report.rule == "strict", str(report)
