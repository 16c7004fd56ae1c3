"""Calls that run through the original attention: gradients, dropout, attention weights, long prefills."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache

import mla_convert


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_gradients_go_through_the_original(attn: str, runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attn=attn), models.tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with mla_convert.patched(model, prefill_threshold=100, form="fused"):
        model(ids, labels=ids).loss.backward()
        cache = DynamicCache()
        model(ids[:, :5], cache=cache)
        model(ids[:, 5:6], cache=cache)
    assert not runs
    for name, gradient in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_dropout_runs_expanded(runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attention_dropout=0.5), models.tokens(2, 9)
    with mla_convert.patched(model, prefill_threshold=100):
        model.train()
        model(ids)
        assert not runs
        model.eval()
        model(ids)
        assert runs == [9, 9]


@torch.inference_mode()
def test_prefill_gives_sdpa_values_as_wide_as_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU flash kernel wants one width; otherwise memory grows with the square of the prompt."""
    widths = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        widths.append((query.shape[-1], key.shape[-1], value.shape[-1], kwargs["attn_mask"]))
        return attention(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    model = models.deepseek_v3()
    with mla_convert.patched(model):
        model(models.tokens(2, 9))
    assert widths == [(24, 24, 24, None)] * 2


@torch.inference_mode()
def test_attention_weights_come_from_the_original(runs: list[int]) -> None:
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 9)
    expected = model(ids, output_attentions=True).attentions
    with mla_convert.patched(model, prefill_threshold=100):
        found = model(ids, output_attentions=True).attentions
        assert not runs
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.inference_mode()
def test_a_config_that_asks_for_attention_weights(runs: list[int]) -> None:
    """It does before patching; afterwards transformers refuses to set it, for it knows no name but "eager"."""
    model, ids = models.deepseek_v3(attn="eager"), models.tokens(2, 9)
    with mla_convert.patched(model), pytest.raises(ValueError, match="mla_latent_over_eager"):
        model.config.output_attentions = True
    model.config.output_attentions = True
    expected = model(ids).attentions
    with mla_convert.patched(model, prefill_threshold=100):
        assert all(torch.equal(a, b) for a, b in zip(model(ids).attentions, expected, strict=True))
    assert not runs
