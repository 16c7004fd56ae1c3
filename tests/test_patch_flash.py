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
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal to the lower right; takes the padding mask [B,T], and no other."""
    q_len, kv_len = query.shape[2], key.shape[2]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)[None, None]
    if mask is not None:
        assert mask.dim() == 2 and mask.shape[1] == kv_len
        seen = seen & mask[:, None, None].bool()
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
