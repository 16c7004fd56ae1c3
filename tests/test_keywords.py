"""Arguments of attention: each is taken as the original takes it, or refused; which way tokens look is one of them."""

from __future__ import annotations

from typing import Any

import family_models
import models
import pytest
import torch
from generation import check_patched, generated, small
from patching import BOUND, steps
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.patches import keywords, originals

THRESHOLDS = pytest.mark.parametrize("threshold", [0, 100], ids=["expanded", "absorbed"])
#: A value for each argument that changes attention; [B,S] of the prompts is [1,6], with three heads.
GIVEN: dict[str, Any] = {
    "cu_seq_lens_k": torch.tensor([0, 3, 6]),
    "cu_seq_lens_q": torch.tensor([0, 3, 6]),
    "indices": torch.zeros(1, 6, 2, dtype=torch.int64),
    "max_length_k": 3,
    "max_length_q": 3,
    "position_bias": torch.full((1, 3, 6, 6), 0.5).tril(-2),
    "s_aux": torch.full((3,), 5.0),
    "sliding_window": 4,
    "softcap": 0.5,
}
#: Of those, what attention by the name takes.
TAKEN = {"eager": set(), "sdpa": {"position_bias"}}

#: Families that are asked to look both ways: attention of two kinds, and sparse where that is to be had.
BOTH_WAYS = ("deepseek_v2", "deepseek_v32", "longcat_flash")


def test_every_name_has_one_meaning() -> None:
    assert set(GIVEN) == keywords.USED | keywords.EXPANDED_ONLY
    assert not keywords.USED & keywords.EXPANDED_ONLY
    assert not keywords.HARMLESS & (keywords.USED | keywords.EXPANDED_ONLY | {keywords.DIRECTION})


@THRESHOLDS
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", sorted(GIVEN))
@torch.inference_mode()
def test_an_argument_that_changes_attention_is_never_ignored(name: str, attn: str, threshold: int) -> None:
    """Neither in a prefill nor in a step after it."""
    model, ids = models.deepseek_v3(attn=attn), models.tokens(1, 6)
    if name in TAKEN[attn]:
        expected, plain = model(ids, **{name: GIVEN[name]}).logits, model(ids).logits
        assert models.relative(expected, plain) > 10 * BOUND
        with mla_convert.patched(model, prefill_threshold=threshold):
            assert models.relative(model(ids, **{name: GIVEN[name]}).logits, expected) <= BOUND
        return
    with mla_convert.patched(model, prefill_threshold=threshold):
        with pytest.raises(PatchError, match=f"{name}, which this layer's '{attn}' attention ignores"):
            model(ids, **{name: GIVEN[name]})
        cache = DynamicCache()
        model(ids, cache=cache, position_ids=torch.arange(6)[None])
        with pytest.raises(PatchError, match=name):
            model(ids[:, :1], cache=cache, **{name: GIVEN[name]})


@torch.inference_mode()
def test_a_bias_over_a_static_cache() -> None:
    """It is as wide as the cache, which is then expanded as a whole."""
    model, ids, bias = models.deepseek_v3(), models.tokens(2, 6), torch.randn(1, 3, 6, 20)
    caches = [StaticCache(config=model.config, max_cache_len=20) for _ in range(2)]
    expected = model(ids, cache=caches[0], position_bias=bias).logits
    with mla_convert.patched(model):
        assert models.relative(model(ids, cache=caches[1], position_bias=bias).logits, expected) <= BOUND


def test_sinks_are_taken_where_the_original_reads_them() -> None:
    """A layer that has them, under its own function, one that takes them and one that does not."""
    module = models.deepseek_v3().model.layers[0].self_attn
    sinks = {"s_aux": GIVEN["s_aux"]}
    for attn, has in (("eager", False), ("eager", True), ("sdpa", True), ("flex_attention", True)):
        if has:
            module.sinks = GIVEN["s_aux"]
        function = originals.function_of(attn, module)
        if (attn, has) in (("eager", False), ("sdpa", True)):
            with pytest.raises(PatchError, match=f"s_aux, which this layer's '{attn}' attention ignores"):
                keywords.check_known("here", module, attn, function, sinks)
        else:
            keywords.check_known("here", module, attn, function, sinks)


def test_flash_attention_takes_what_parts_sequences() -> None:
    """transformers hands it on to the kernels without naming it."""
    function = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    module = models.deepseek_v3().model.layers[0].self_attn
    taken = {name: GIVEN[name] for name in GIVEN if name not in ("indices", "position_bias")}
    keywords.check_known("here", module, "flash_attention_2", function, taken)
    with pytest.raises(PatchError, match="position_bias"):
        keywords.check_known("here", module, "flash_attention_2", function, GIVEN | {"indices": None})


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


@THRESHOLDS
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@torch.inference_mode()
def test_attention_in_both_directions(padded: bool, attn: str, threshold: int, runs: list[int]) -> None:
    """``is_causal=False`` makes an encoder of the model: with no cache, with a growing one and with a static one."""
    model, ids, mask = models.deepseek_v3(attn=attn), models.tokens(2, 9), padding(2, 9)
    masked = {"attention_mask": mask} if padded else {}
    real = mask.bool() if padded else mask >= 0
    causal = model(ids, **masked).logits

    def outputs() -> list[torch.Tensor]:
        static = StaticCache(config=model.config, max_cache_len=20)
        return [
            model(ids, is_causal=False, use_cache=False, **masked).logits,
            steps(model, ids, DynamicCache(), [5, 3, 1], is_causal=False, **masked),
            model(ids, is_causal=False, cache=static, **masked).logits,
        ]

    expected = outputs()
    assert models.relative(expected[0][real], causal[real]) > 1000 * BOUND
    with mla_convert.patched(model, prefill_threshold=threshold):
        for found, wanted in zip(outputs(), expected, strict=True):
            assert models.relative(found[real], wanted[real]) <= BOUND
    assert not runs


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", [n for n in family_models.AVAILABLE if n in BOTH_WAYS])
@torch.inference_mode()
def test_other_families_in_both_directions(model_type: str, attn: str) -> None:
    """Sparse attention among them, where that is to be had."""
    model, ids = family_models.make(model_type, attn=attn), models.tokens(2, 9)
    expected = model(ids, is_causal=False).logits
    with mla_convert.patched(model, prefill_threshold=100):
        assert models.relative(model(ids, is_causal=False).logits, expected) <= BOUND


@pytest.mark.parametrize("where", ["argument", "config"])
def test_what_models_are_anyway_costs_nothing(where: str, runs: list[int]) -> None:
    """``is_causal=True`` says nothing new: every step of ``generate()`` is absorbed."""
    model, options = models.deepseek_v3(), {}
    if where == "config":
        model.config.is_causal = True
    else:
        options["is_causal"] = True
    subject = small()
    check_patched(model, lambda m: generated(m, subject.padded, attention_mask=subject.mask, **options))
    assert len(runs) == 9 * len(model.model.layers)


@torch.inference_mode()
def test_a_module_that_looks_ahead_by_itself(runs: list[int]) -> None:
    """ "sdpa" reads the module's own attribute where it has no mask."""
    model, ids = models.deepseek_v3(), models.tokens(2, 9)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    expected = model(ids).logits
    with mla_convert.patched(model, prefill_threshold=100):
        assert models.relative(model(ids).logits, expected) <= BOUND
    assert not runs
