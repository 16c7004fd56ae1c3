"""What the tests of ``generate()`` share: two models, and one run of each, unpatched and patched."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import models
import torch
from patching import BOUND
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import mla_convert

TEXTS = ["def", "import os\n\nclass Reader:\n    def __init__(self", "    for name in names:\n", "# A comment\nx = ["]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model in float32 and prompts for it.

    Attributes:
        ids: [B, S] without padding.
        padded, mask: [B, S], padded on the left, with their attention mask.
        draft: a model that agrees with it now and then.
    """

    model: PreTrainedModel
    ids: torch.Tensor
    padded: torch.Tensor
    mask: torch.Tensor
    draft: PreTrainedModel


@functools.cache
def small() -> Subject:
    """Random weights, three heads, unequal widths."""
    ids = models.tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model = models.deepseek_v3()
    return Subject(model, ids, ids.masked_fill(mask == 0, 2), mask, _draft(model))


@functools.cache
def trained(path: pathlib.Path) -> Subject:
    """The example checkpoint, which writes Python."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    whole = tokenizer("".join(TEXTS) * 2, return_tensors="pt").input_ids[:, :24]
    return Subject(model, torch.cat((whole, whole.flip(1))), batch.input_ids, batch.attention_mask, _draft(model))


def _draft(model: PreTrainedModel) -> PreTrainedModel:
    """A model that agrees with ``model`` now and then, set to propose four tokens at a time."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Ids [B, S + new], and the logits [new, B or beams, vocabulary] before any processor touched them."""

    tokens: torch.Tensor
    logits: torch.Tensor


def generated(model: PreTrainedModel, ids: torch.Tensor, *, seed: int = 3, **options: Any) -> Outcome:
    """``model.generate`` for exactly 10 new tokens unless told otherwise; greedy unless told otherwise."""
    torch.manual_seed(seed)
    usual = {"max_new_tokens": 10, "min_new_tokens": options.get("max_new_tokens", 10), "do_sample": False}
    options = {"attention_mask": torch.ones_like(ids)} | usual | options
    out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    return Outcome(out.sequences, torch.stack(out.logits))


def check_same(found: Outcome, expected: Outcome) -> None:
    """The same tokens, and logits within the bound of their range."""
    assert torch.equal(found.tokens, expected.tokens)
    assert found.logits.shape == expected.logits.shape
    assert models.relative(found.logits, expected.logits) <= BOUND


def check_patched(model: PreTrainedModel, run: Callable[[PreTrainedModel], Outcome], **patching: Any) -> Outcome:
    """Run unpatched, then patched, and compare; the patched outcome."""
    expected = run(model)
    with mla_convert.patched(model, **patching):
        found = run(model)
    check_same(found, expected)
    return found
