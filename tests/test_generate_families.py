"""What every family does in ``generate()``: padded batches, static caches and chunked prefill, tokens and logits."""

from __future__ import annotations

from typing import Any

import family_models
import models
import pytest
import torch
from generation import check_patched, generated

IDS = models.tokens(2, 12)
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
PADDED = IDS.masked_fill(MASK == 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}],
    ids=["greedy", "static", "chunked"],
)
@pytest.mark.parametrize("model_type", family_models.AVAILABLE)
def test_a_left_padded_batch(model_type: str, options: dict[str, Any]) -> None:
    model = family_models.make(model_type)
    check_patched(model, lambda m: generated(m, PADDED, attention_mask=MASK, max_new_tokens=6, **options))
