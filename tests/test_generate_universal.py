"""Assisted decoding with a draft of another vocabulary: its text is what the two models have in common."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import models
import pytest
import torch
from generation import check_patched, check_same, generated
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import mla_convert

SPECIAL = ["<s>", "</s>", "<pad>"]
CHARACTERS = [chr(code) for code in range(33, 127)]
#: Pairs that the draft has a token for, and the model two.
PAIRS = [("a", "b"), ("Q", "R")]
PROMPT = "abcabQRabc!abQR"


def tokenizer_of(characters: list[str], pairs: list[tuple[str, str]]) -> Any:
    """One token for each character, in the order given, and one for each pair."""
    words = [*SPECIAL, *characters, *map("".join, pairs)]
    made: Any = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def draft_of(model: PreTrainedModel, rows: torch.Tensor) -> PreTrainedModel:
    """A model that agrees with ``model`` now and then, over a vocabulary whose token i is its ``rows[i]``."""
    draft = models.deepseek_v3(vocab_size=len(rows))
    state = copy.deepcopy(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    for name, weight in state.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = weight[rows]
        elif weight.is_floating_point():
            state[name] = weight * (1 + 0.02 * torch.randn(weight.shape, generator=generator))
    draft.load_state_dict(state)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@pytest.mark.parametrize("draft_patched", [False, True])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_draft_of_another_vocabulary(sampled: bool, draft_patched: bool, runs: list[int]) -> None:
    """Some of its proposals are taken, some are not; sampling prunes the draft's head to what both have."""
    model = models.deepseek_v3()
    ours, other = tokenizer_of(CHARACTERS, []), tokenizer_of(CHARACTERS[::-1], PAIRS)
    rows = torch.tensor([ours.convert_tokens_to_ids(word if len(word) != 2 else word[0]) for word in _words(other)])
    ids = ours(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.shape[1] == len(PROMPT) > other(PROMPT, return_tensors="pt").input_ids.shape[1]

    draft = draft_of(model, rows)
    more = {"assistant_model": draft, "tokenizer": ours, "assistant_tokenizer": other, "do_sample": sampled}
    generated(model, ids, max_new_tokens=1, **more)  # the first run that samples prunes the draft, and draws for that
    with mla_convert.patched(draft) if draft_patched else contextlib.nullcontext():
        found = check_patched(model, lambda m: generated(m, ids, max_new_tokens=20, **more))
    if not sampled:
        check_same(found, generated(model, ids, max_new_tokens=20))
    assert max(runs) > 2


def _words(tokenizer: Any) -> list[str]:
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
