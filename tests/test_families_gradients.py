"""Training through a patched model of every family: the gradients of the unpatched one, for every weight."""

from __future__ import annotations

import family_models
import pytest
import torch
from transformers import PreTrainedModel

import mla_convert

#: Of a tensor's largest gradient, in float64. Values padded for PyTorch's kernel round otherwise, and models amplify
#: that: to 1e-13 at most here (and to 7e-4 in float32, for weights whose gradients nearly cancel). A gradient that is
#: wrong, or went through float32, is off by 1e-7 or more.
SAME = 1e-10


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of the loss over a left-padded batch, by name; the model's own are cleared."""
    ids, mask = family_models.tokens(), torch.ones_like(family_models.tokens())
    mask[0, : family_models.PADDING] = 0
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
def test_gradients_are_the_original_s(model_type: str, runs: list[int]) -> None:
    """Also where calls would run absorbed, and with the cache that models make for themselves."""
    model = family_models.make(model_type).double().train()
    expected = gradients(model)
    with mla_convert.patched(model, prefill_threshold=100):
        found = gradients(model)
    assert not runs and found.keys() == expected.keys()
    assert any("kv_b_proj" in name for name in found)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= SAME * float(gradient.abs().max()), name
