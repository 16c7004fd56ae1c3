"""Attention over positions that an indexer chose, against the same positions in a mask."""

from __future__ import annotations

import functools
from typing import Any

import family_models
import models
import pytest
import torch
from models import relative
from patching import BOUND, layers, steps
from transformers import DynamicCache

import mla_convert
from mla_convert.errors import PatchError
from mla_convert.kernels import torch_decode
from mla_convert.kernels.selecting import chosen
from mla_convert.patches import layer, originals
from mla_convert.patches.seeing import with_indices
from mla_convert.patches.selection import fold

SPARSE = [
    name
    for name in "deepseek_v32 glm_moe_dsa axk2 hy_v4 hy_v4_vl dots3_note glm5_next mistral_large4".split()
    if name in family_models.AVAILABLE
]
make = functools.cache(family_models.make)


def test_chosen_positions_as_a_mask() -> None:
    indices = torch.tensor([[[0, 3, -1], [2, 9, 5]]])
    expected = [[True, False, False, True, False], [False, False, True, False, False]]
    assert chosen(indices, 5).tolist() == [expected]
    mask = torch.tensor([[True, False, True, True, False, True], [True, True, False, True, True, True]])[None, None]
    both = [[True, False, False, True, False], [False] * 5]
    assert fold(mask, indices, 5).tolist() == [[both]]
    lowest = torch.finfo(torch.float32).min
    added = fold(torch.zeros(1, 1, 2, 5).masked_fill(~mask[..., :5], lowest), indices, 5)
    assert added.eq(0).tolist() == [[both]] and added[~added.eq(0)].eq(lowest).all()
    assert fold(None, indices, 5).tolist() == [[expected]]


def test_positions_chosen_without_a_mask() -> None:
    """None means causal, from the upper left, unless tokens look ahead as well."""
    query, key, indices = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 4, 4), torch.tensor([[[0, 3], [1, 2]]])
    both = [[True, False, False, True], [False, True, True, False]]
    assert with_indices(None, query, key, indices, ahead=True).tolist() == [[both]]
    assert with_indices(None, query, key, indices).tolist() == [[[[True] + [False] * 3, [False, True, False, False]]]]


@pytest.mark.parametrize("threshold", [0, 100])
@pytest.mark.parametrize("model_type", SPARSE)
@torch.inference_mode()
def test_gathered_masked_and_expanded_are_the_same(model_type: str, threshold: int) -> None:
    """Several new tokens at once, absorbed or expanded by force, more cached tokens than are chosen."""
    model, ids = make(model_type), models.tokens(2, 16)
    sizes = [7, 4, 3, 1, 1]
    expected = steps(model, ids, DynamicCache(config=model.config), sizes)
    with mla_convert.patched(model, prefill_threshold=threshold):
        found = steps(model, ids, DynamicCache(config=model.config), sizes)
    assert relative(found, expected) <= BOUND


@pytest.mark.parametrize("model_type", SPARSE)
@torch.inference_mode()
def test_the_work_follows_the_selection(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads as many rows as were chosen, however many are cached; layers with windows read those."""
    most = max(family_models.CHOSEN, getattr(make(model_type).config.get_text_config(), "sliding_window", None) or 0)
    rows: list[int] = []
    attend = torch_decode.attend

    def recorded(q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, *rest: Any) -> Any:
        rows.append(latent.shape[1])
        return attend(q_latent, q_rope, latent, *rest)

    model, ids = make(model_type), models.tokens(1, 40)
    monkeypatch.setattr(torch_decode, "attend", recorded)
    with mla_convert.patched(model):
        steps(model, ids, DynamicCache(config=model.config), [38, 1, 1])
        # The prefill is absorbed as well where an indexer chose: for each of its 38 tokens a few rows are read.
        assert len(rows) == 3 * len(layers(model)) - (model_type == "dots3_note") and max(rows) <= most


@torch.inference_mode()
def test_everything_chosen_is_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    decode = layer.decode
    monkeypatch.setattr(layer, "decode", lambda args, backend: calls.append(args) or decode(args, backend))
    model, ids = make("deepseek_v32"), models.tokens(1, 8)
    with mla_convert.patched(model):
        steps(model, ids, DynamicCache(config=model.config), [3, 1, 1, 1, 1, 1])
    found = [(args.kv_len, None if args.indices is None else args.indices.shape[-1]) for args in calls]
    assert found[::2] == [(4, None), (5, None), (6, None), (7, 6), (8, 6)]


def test_the_decision_counts_what_is_chosen() -> None:
    """V3's dimensions and 2,048 chosen of 131,072: absorbed at any number of new tokens; of 2,048, as without DSA."""
    model = models.deepseek_v3(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    with mla_convert.patched(model):
        (module, *_) = layers(model)
        lift, absorbed, expanded = 512 * 256, 2 * 512 + 64, 192 + 128
        for q_len, kv_len in ((2, 4096), (200, 4096), (4096, 4096), (4096, 8192), (100_000, 131_072)):
            cheaper = q_len * (lift + min(kv_len, 2048) * absorbed) < kv_len * (lift + q_len * expanded)
            assert module.prefers_absorbed(q_len, kv_len, 2048) == cheaper
        assert module.prefers_absorbed(100_000, 131_072, 2048) and not module.prefers_absorbed(100_000, 131_072)
        assert not module.prefers_absorbed(2048, 2048, 2048)


@pytest.mark.parametrize("threshold", [0, 100], ids=["expanded", "absorbed"])
@torch.inference_mode()
def test_an_argument_that_nobody_knows_is_refused(threshold: int) -> None:
    model, ids = make("deepseek_v32"), models.tokens(1, 8)
    with mla_convert.patched(model, prefill_threshold=threshold), pytest.raises(PatchError, match="a_new_bias"):
        model(ids, a_new_bias=torch.ones(1))


@torch.inference_mode()
def test_the_vision_tower_keeps_its_attention() -> None:
    model: Any = family_models.make("kimi_k25")
    tower = model.config.vision_config._attn_implementation
    with mla_convert.patched(model):
        assert model.config.text_config._attn_implementation.startswith(originals.PREFIX)
        assert model.config.vision_config._attn_implementation == tower
        assert model.model.vision_tower.config._attn_implementation == tower
    assert model.config.text_config._attn_implementation == tower
    # The text model alone is a model of its own.
    ids = models.tokens(1, 8)
    expected = steps_of(model.model.language_model, ids)
    with mla_convert.patched(model.model.language_model) as handle:
        assert handle.describe().family == "deepseek_v3"
        assert relative(steps_of(model.model.language_model, ids), expected) <= BOUND


def steps_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    parts = (ids[:, :5], *ids[:, 5:].split(1, dim=1))
    return torch.cat([model(part, cache=cache, use_cache=True).last_hidden_state for part in parts], dim=1)
