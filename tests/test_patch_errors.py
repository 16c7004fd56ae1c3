"""What patching refuses, and in which words."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from patching import BOUND, state_of, steps
from transformers import DynamicCache

import mla_convert
from mla_convert.errors import PatchError, UnsupportedModelError, UsageError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "folded"}, "form='folded' is not known; supported are factored, fused and auto"),
        ({"qk": "both"}, "qk='both' is not known"),
        ({"vo": ""}, "vo='' is not known"),
        ({"form": "fused", "qk": "factored", "vo": "factored"}, "form='fused' was asked for, and qk='factored'"),
        ({"form": "factored", "qk": "auto", "vo": "auto"}, "which leave no side to it"),
        ({"backend": "cuda"}, "choose one of"),
        ({"prefill_threshold": -1}, "number of tokens"),
        ({"prefill_threshold": "never"}, "number of tokens"),
        ({"prefill_threshold": True}, "number of tokens"),
        ({"codes": "kept"}, "codes='kept' is not known; supported are auto, keep"),
        ({"codes": True}, "codes=True is not known"),
        ({"codes": "keep"}, "no folder of absorbed weights was given"),
        ({"cache": "paged"}, "choose .latent"),
    ],
)
def test_refuses_options(options: dict[str, Any], words: str) -> None:
    model = models.deepseek_v3()
    before = state_of(model)
    with pytest.raises(UsageError, match=words):
        mla_convert.patch(model, **options)
    assert state_of(model) == before


def test_refuses_models() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = models.deepseek_v3()
    with pytest.raises(PatchError, match="not patched"):
        mla_convert.unpatch(model)
    handle = mla_convert.patch(model)
    with pytest.raises(PatchError, match="patched already"):
        mla_convert.patch(model)
    handle.unpatch()
    with pytest.raises(PatchError, match="not patched"):
        handle.describe()
    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with pytest.raises(UnsupportedModelError, match="'llama'.*deepseek_v3"):
        mla_convert.patch(LlamaForCausalLM(small))
    with pytest.raises(UsageError, match="Linear"):
        mla_convert.patch(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(PatchError, match="meta device"):
        mla_convert.patch(empty)
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises((PatchError, AttributeError), match="Sequential"):
        mla_convert.patch(model)


def test_refuses_attention_without_a_mask_function() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("maskless", lambda *args, **kwargs: None)
    model = models.deepseek_v3()
    model.set_attn_implementation("maskless")
    try:
        with pytest.raises(PatchError, match="no mask function"):
            mla_convert.patch(model)
    finally:
        del AttentionInterface._global_mapping["maskless"]


@torch.inference_mode()
def test_an_unknown_family_with_the_same_seam(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = models.deepseek_v3(), models.tokens(1, 8)
    expected = model(ids).logits
    attention = type(model.model.layers[0].self_attn)
    stranger = type("StrangerAttention", (attention,), {"__module__": attention.__module__})
    for layer in model.model.layers:
        layer.self_attn.__class__ = stranger
    with pytest.raises(UnsupportedModelError, match="StrangerAttention.*allow_unknown=True"):
        mla_convert.patch(model)
    with pytest.raises(UsageError, match="cannot be fused"):
        mla_convert.patch(model, allow_unknown=True, form="fused")
    with mla_convert.patched(model, allow_unknown=True) as handle:
        assert handle.describe().family == "unknown" and "StrangerAttention" in caplog.text
        assert "not a known family" in str(handle.describe())
        assert models.relative(steps(model, ids, DynamicCache(), [4, 1, 1, 1, 1]), expected) <= BOUND
