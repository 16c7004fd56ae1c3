"""Models whose original attention is flash attention, acted out in plain PyTorch where its package is not installed."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from patching import BOUND, steps
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

import mla_convert


def flash(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **given: Any
) -> tuple[torch.Tensor, None]:
    """Causal to the lower right; takes the padding mask [B,T], or positions that begin anew, and no other."""
    q_len, kv_len = query.shape[2], key.shape[2]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]
    if mask is not None:
        assert mask.dim() == 2 and mask.shape[1] == kv_len
        seen = seen & mask[:, None, None].bool()
    elif q_len == kv_len > 1 and len(query) == 1:
        sequences = (given["position_ids"] == 0).cumsum(-1)
        seen = seen & (sequences[:, :, None] == sequences[:, None])[:, None]
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -1e9)
    return (logits.softmax(-1) @ value).transpose(1, 2), None


def over_flash(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model that says it uses flash attention; set on the config, since setting it checks for the package."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model = models.deepseek_v3()
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    "patching", [{}, {"form": "fused"}, {"prefill_threshold": 0}, {"prefill_threshold": 50}], ids=str
)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@torch.inference_mode()
def test_over_flash_attention(padded: bool, patching: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, several new tokens and single ones; the mask in the form that flash attention takes."""
    ids, mask = models.tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    sizes = [8, 3, 1, 1, 2, 1]
    expected = steps(models.deepseek_v3(), ids, DynamicCache(), sizes, attention_mask=mask)
    model, real = over_flash(monkeypatch), mask.bool()
    own = steps(model, ids, DynamicCache(), sizes, attention_mask=mask)
    assert models.relative(own[real], expected[real]) <= BOUND
    handle = mla_convert.patch(model, **patching)
    assert handle.describe().original_attention == "flash_attention_2"
    found = steps(model, ids, DynamicCache(), sizes, attention_mask=mask)
    assert models.relative(found[real], expected[real]) <= BOUND


@pytest.mark.parametrize("threshold", ["auto", 50])
@torch.inference_mode()
def test_packed_sequences_over_flash_attention(
    threshold: str | int, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """Flash attention has no mask to part them with: what it reads of the positions is left to it."""
    ids = models.tokens(1, 16)
    packed = torch.cat([torch.arange(9), torch.arange(7)])[None]
    expected = torch.cat([models.deepseek_v3()(part).logits for part in ids.split([9, 7], 1)], 1)
    model = over_flash(monkeypatch)
    assert models.relative(model(ids, position_ids=packed).logits, expected) <= BOUND
    mla_convert.patch(model, prefill_threshold=threshold)
    assert models.relative(model(ids, position_ids=packed).logits, expected) <= BOUND
    assert not runs
    model(ids, position_ids=torch.arange(16)[None])
    assert runs == ([] if threshold == "auto" else [16, 16])
