"""``LatentCache`` against ``DynamicCache``, bit for bit, through random lives."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import models
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.patches.cache import LatentCache, LatentLayer, adopt

C, R = 6, 3


def new_tokens(batch: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, count, C, generator=gen), torch.randn(batch, 1, count, R, generator=gen)


class SameLife(RuleBasedStateMachine):
    """Whatever happens to both caches, they hold the same."""

    @initialize(batch=st.integers(1, 3))
    def begin(self, batch: int) -> None:
        self.batch = batch
        self.latent: Any = LatentCache()
        self.dynamic: Any = DynamicCache()

    @rule(count=st.integers(1, 200), seed=st.integers(0, 10**6))
    def append(self, count: int, seed: int) -> None:
        states = new_tokens(self.batch, count, seed)
        found, expected = self.latent.update(*states, 0), self.dynamic.update(*states, 0)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        remove = int(self.dynamic.get_seq_length() * share)
        for cache in (self.latent, self.dynamic):
            for layer in cache.layers:
                layer.crop(-remove)

    @rule(seed=st.integers(0, 10**6))
    def reorder(self, seed: int) -> None:
        beams = torch.randint(self.batch, (self.batch,), generator=torch.Generator().manual_seed(seed))
        self.latent.reorder_cache(beams)
        self.dynamic.reorder_cache(beams)

    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        if self.dynamic.get_seq_length() and self.batch * repeats <= 6:
            self.batch *= repeats
            self.latent.batch_repeat_interleave(repeats)
            self.dynamic.batch_repeat_interleave(repeats)

    @rule(keep=st.integers(1, 6))
    def select(self, keep: int) -> None:
        if self.dynamic.get_seq_length():
            self.batch = min(keep, self.batch)
            self.latent.batch_select_indices(torch.arange(self.batch))
            self.dynamic.batch_select_indices(torch.arange(self.batch))

    @rule()
    def fork(self) -> None:
        abandoned, self.latent = self.latent, copy.deepcopy(self.latent)
        for layer in abandoned.layers:
            if layer.rows is not None:
                layer.rows.fill_(torch.nan)

    @rule()
    def reset(self) -> None:
        self.latent.reset()
        self.dynamic.reset()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "latent"):
            return
        assert self.latent.get_seq_length() == self.dynamic.get_seq_length()
        assert self.latent.get_mask_sizes(3, 0) == self.dynamic.get_mask_sizes(3, 0)
        if self.dynamic.get_seq_length():
            for a, b in zip(self.latent.layers, self.dynamic.layers, strict=True):
                assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


SameLife.TestCase.settings = hypothesis.settings(max_examples=40, stateful_step_count=25, deadline=None)
TestSameLife = SameLife.TestCase


def test_appending_writes_one_row_and_grows_geometrically() -> None:
    layer = LatentLayer()
    layer.update(*new_tokens(1, 4096, 0))
    pointers = set()
    for i in range(2000):
        layer.update(*new_tokens(1, 1, i))
        assert layer.rows is not None
        pointers.add(layer.rows.data_ptr())
    assert len(pointers) <= 3
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    assert values.data_ptr() == keys.data_ptr() + C * keys.element_size()


def test_inference_mode_and_gradients_may_come_and_go() -> None:
    layer, expected = LatentLayer(), DynamicLayer()
    with torch.inference_mode():
        states = new_tokens(1, 5, 0)
        layer.update(*states)
        expected.update(*states)
    with torch.no_grad():
        for cache in (layer, expected):
            cache.update(*new_tokens(1, 2, 1))
    keys, values = (t.requires_grad_() for t in new_tokens(1, 2, 2))
    found = layer.update(keys, values)
    found[0].square().sum().backward()
    assert keys.grad is not None and torch.equal(keys.grad, 2 * keys.detach())
    expected.update(keys.detach(), values.detach())
    with torch.no_grad():
        for cache in (layer, expected):
            found = cache.update(*new_tokens(1, 1, 3))
    with torch.inference_mode():
        for cache in (layer, expected):
            found = cache.update(*new_tokens(1, 1, 4))
    assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)  # type: ignore[arg-type]


def test_gradients_through_an_earlier_append() -> None:
    """What was handed out before is part of a graph: a later append must not write into it."""
    layer = LatentLayer()
    first, second = ([t.requires_grad_() for t in new_tokens(1, 2, seed)] for seed in (0, 1))
    early = layer.update(*first)[0].square().sum()
    late = layer.update(*second)[0].square().sum()
    (early + late).backward()
    assert torch.equal(first[0].grad, 4 * first[0].detach()) and torch.equal(second[0].grad, 2 * second[0].detach())  # type: ignore[arg-type]


def test_pickle_keeps_what_is_stored() -> None:
    cache = LatentCache()
    cache.update(*new_tokens(2, 7, 0), 0)
    buffer = io.BytesIO()
    pickle.dump(cache, buffer)
    other = pickle.loads(buffer.getvalue())
    assert torch.equal(other.layers[0].keys, cache.layers[0].keys)


def test_only_plain_empty_layers_are_adopted() -> None:
    cache = DynamicCache()
    adopt(cache, 2)
    assert [type(layer) for layer in cache.layers] == [DynamicLayer, DynamicLayer, LatentLayer]
    filled = DynamicCache()
    filled.update(*new_tokens(1, 2, 0), 0)
    adopt(filled, 0)
    assert type(filled.layers[0]) is DynamicLayer
    sliding = DynamicCache()
    sliding.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    adopt(sliding, 0)
    assert type(sliding.layers[0]) is DynamicSlidingWindowLayer


def test_a_cache_of_the_model_takes_the_layers_of_its_config() -> None:
    cache = mla_convert.LatentCache(models.deepseek_v3().config)
    assert isinstance(cache, DynamicCache) and [type(layer) for layer in cache.layers] == [LatentLayer] * 2


@torch.inference_mode()
def test_a_cache_filled_patched_goes_on_unpatched_and_back() -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    expected = model(ids).logits
    cache = DynamicCache()
    with mla_convert.patched(model):
        first = model(ids[:, :6], cache=cache).logits
    second = model(ids[:, 6:9], cache=cache).logits
    with mla_convert.patched(model):
        third = model(ids[:, 9:], cache=cache).logits
    assert models.relative(torch.cat((first, second, third), 1), expected) <= 1e-4


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((torch.zeros(1, 2, 1, C), torch.zeros(1, 2, 1, R)), "latents"),
        ((torch.zeros(2, 1, 1, C), torch.zeros(2, 1, 1, R)), "one model and one batch"),
        ((torch.zeros(1, 1, 1, C + 1), torch.zeros(1, 1, 1, R)), "one model and one batch"),
        ((torch.zeros(1, 1, 1, C).double(), torch.zeros(1, 1, 1, R).double()), "one model and one batch"),
        ((torch.zeros(1, 1, 1, C), torch.zeros(1, 1, 2, R)), "latents"),
    ],
)
def test_refuses_what_does_not_belong(states: tuple[torch.Tensor, torch.Tensor], words: str) -> None:
    layer = LatentLayer()
    layer.update(*new_tokens(1, 3, 0))
    with pytest.raises(UsageError, match=words):
        layer.update(*states)
    assert layer.get_seq_length() == 3


def test_refuses_to_crop_below_zero() -> None:
    layer = LatentLayer()
    layer.crop(-1)
    layer.update(*new_tokens(1, 3, 0))
    with pytest.raises(UsageError, match="of 3 tokens"):
        layer.crop(-4)
    with pytest.raises(ValueError, match="minus the number"):
        layer.crop(2)
    layer.crop(-3)
    assert layer.get_seq_length() == 0


def test_no_sequence_is_repeated_away() -> None:
    cache = mla_convert.LatentCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 2), 0)
    for repeats in (0, -1):
        with pytest.raises(UsageError, match=rf"batch_repeat_interleave\({repeats}\)"):
            cache.batch_repeat_interleave(repeats)
    assert cache.get_seq_length() == 3
