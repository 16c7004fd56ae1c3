"""Which form each side takes, when a call is absorbed, and what the handle says of it."""

from __future__ import annotations

import models
import pytest
import torch
from patching import BOUND, FORMS, layers, steps
from transformers import DynamicCache

import mla_convert


@pytest.mark.parametrize(
    ("dims", "forms"),
    [
        (models.KEY_FUSED, ("fused", "factored")),
        (models.VALUE_FUSED, ("factored", "fused")),
        (models.BOTH_FUSED, ("fused", "fused")),
        ({}, ("factored", "factored")),
        ({"qk_rope_head_dim": 4, "num_attention_heads": 1, "num_key_value_heads": 1}, ("factored", "factored")),
        ({"kv_lora_rank": 12, "v_head_dim": 12, "qk_nope_head_dim": 12, "hidden_size": 48}, None),
    ],
    ids=["key", "value", "both", "neither", "one-head", "c-equals-v"],
)
@torch.inference_mode()
def test_auto_picks_the_form_that_reads_fewer(dims: dict[str, int], forms: tuple[str, str] | None) -> None:
    model, ids = models.deepseek_v3(**dims), models.tokens(2, 16)
    expected = model(ids).logits
    for asked in ({}, {"form": "fused"}):
        with mla_convert.patched(model, **asked) as handle:
            described = handle.describe()
            if forms and not asked:
                assert (described.qk_form, described.vo_form) == forms
            found = steps(model, ids, DynamicCache(), [6, 1, 2, 1, 1, 5])
        assert models.relative(found, expected) <= BOUND


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_biased_projections(bias: bool, form: dict[str, str]) -> None:
    model, ids = models.deepseek_v3(attention_bias=bias), models.tokens(2, 10)
    if bias:
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.normal_()
    expected = model(ids).logits
    with mla_convert.patched(model, **form):
        found = steps(model, ids, DynamicCache(), [4] + [1] * 6)
    assert models.relative(found, expected) <= BOUND


def test_cost_decides() -> None:
    """At DeepSeek-V3's dimensions 146.3 new tokens over 1,024 cached break even, 163.8 over 4,096, at most 170.7."""
    model = models.deepseek_v3(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        v_head_dim=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with mla_convert.patched(model):
        layer = layers(model)[0]
        for kv_len, most in ((1024, 146), (4096, 163), (10**9, 170)):
            assert layer.prefers_absorbed(most, kv_len) and not layer.prefers_absorbed(most + 1, kv_len)
        assert layer.prefers_absorbed(1, 1)
    with mla_convert.patched(model, prefill_threshold=7):
        layer = layers(model)[0]
        assert layer.prefers_absorbed(7, 7) and not layer.prefers_absorbed(8, 4096)


def test_describe() -> None:
    model = models.deepseek_v3(attn="eager")
    with mla_convert.patched(model, vo="fused", prefill_threshold=3, cache="dynamic") as handle:
        described = handle.describe()
        handle.warmup()
        assert str(described) in repr(handle)
    assert "unpatched" in repr(handle)
    assert described.to_dict() == {
        "family": "deepseek_v3",
        "qk_form": "factored",
        "vo_form": "fused",
        "weights_from": "the model itself",
        "backend": described.backend,
        "prefill_threshold": 3,
        "products": [],
        "cache": "dynamic",
        "original_attention": "eager",
        "layers": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    }
    assert described.backend.startswith("torch")
    for words in ("deepseek_v3", "value side fused", "eager", "up to 3 new tokens", "dynamic"):
        assert words in str(described)
