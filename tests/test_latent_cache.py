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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.patches.cache import LatentCache, adopt
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.latent_layer import LatentLayer

C, R = 6, 3


def new_tokens(
    batch: int, count: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 1, count, width, generator=gen) for width in (C, R))
    return keys.to(dtype), values.to(dtype)


def rounded(latent: torch.Tensor, form: str) -> torch.Tensor:
    """What a cache in that format makes of ``latent``; the formats themselves are tested in test_cache_formats."""
    layout = RowLayout(parse_format(form), latent.shape[-1], 0, latent.dtype)
    rows = torch.zeros(*latent.shape[:-1], layout.width, dtype=layout.stored_dtype)
    layout.write(rows, latent, latent[..., :0])
    return layout.numbers(rows)


class SameLife(RuleBasedStateMachine):
    """Whatever happens to a few caches that share their beginnings, each holds what its ``DynamicCache`` holds."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Any, Any]] = []
        self.appended = 0

    @initialize(batch=st.integers(1, 3), form=st.sampled_from(["model", "model", "int8", "int4:2", "fp8:3"]))
    def begin(self, batch: int, form: str) -> None:
        self.form, self.batch = form, batch
        self.pairs = [(LatentCache(format=form), DynamicCache())]

    def pick(self, which: int) -> tuple[Any, Any]:
        return self.pairs[which % len(self.pairs)]

    def stored(self, dynamic: Any) -> int:
        return int(dynamic.layers[0].keys.shape[0]) if dynamic.get_seq_length() else 0

    @rule(which=st.integers(0, 3), count=st.integers(1, 6) | st.integers(1, 200))
    def append(self, which: int, count: int) -> None:
        """Tokens that were never there before: one cache's in the place of another's would show."""
        latent, dynamic = self.pick(which)
        self.appended += 1
        seed = self.appended
        keys, values = new_tokens(self.stored(dynamic) or self.batch, count, seed, self.dtype)
        if latent.layers and latent.layers[0].rows is not None and not dynamic.get_seq_length():
            keys, values = new_tokens(latent.layers[0].rows.shape[0], count, seed, self.dtype)
        found = latent.update(keys, values, 0)
        expected = dynamic.update(rounded(keys, self.form), values, 0)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    @rule(which=st.integers(0, 3), first=st.integers(1, 6), second=st.integers(1, 6))
    def diverge(self, which: int, first: int, second: int) -> None:
        """A fork, and both go on from the same rows."""
        self.branch(which, "fork")
        self.append(which, first)
        self.append(len(self.pairs) - 1, second)

    @rule(which=st.integers(0, 3), share=st.floats(0, 1))
    def crop(self, which: int, share: float) -> None:
        latent, dynamic = self.pick(which)
        remove = int(dynamic.get_seq_length() * share)
        latent.crop(-remove)
        dynamic.crop(-remove)

    @rule(which=st.integers(0, 3), seed=st.integers(0, 10**6))
    def reorder(self, which: int, seed: int) -> None:
        latent, dynamic = self.pick(which)
        if batch := self.stored(dynamic):
            beams = torch.randint(batch, (batch,), generator=torch.Generator().manual_seed(seed))
            latent.reorder_cache(beams)
            dynamic.reorder_cache(beams)

    @rule(which=st.integers(0, 3), repeats=st.integers(1, 2))
    def repeat(self, which: int, repeats: int) -> None:
        latent, dynamic = self.pick(which)
        if 0 < self.stored(dynamic) * repeats <= 6:
            latent.batch_repeat_interleave(repeats)
            dynamic.batch_repeat_interleave(repeats)

    @rule(which=st.integers(0, 3), keep=st.integers(1, 6))
    def select(self, which: int, keep: int) -> None:
        latent, dynamic = self.pick(which)
        if batch := self.stored(dynamic):
            latent.batch_select_indices(torch.arange(min(keep, batch)))
            dynamic.batch_select_indices(torch.arange(min(keep, batch)))

    @rule(which=st.integers(0, 3), how=st.sampled_from(["fork", "deepcopy", "pickle"]))
    def branch(self, which: int, how: str) -> None:
        latent, dynamic = self.pick(which)
        make = {"fork": LatentCache.fork, "deepcopy": copy.deepcopy, "pickle": lambda c: pickle.loads(pickle.dumps(c))}
        self.pairs.append((make[how](latent), copy.deepcopy(dynamic)))
        self.pairs = self.pairs[-4:]

    @rule(which=st.integers(0, 3))
    def offload_and_back(self, which: int) -> None:
        for layer in self.pick(which)[0].layers:
            layer.offload()
            layer.prefetch()

    @rule(which=st.integers(0, 3))
    def reset(self, which: int) -> None:
        for cache in self.pick(which):
            cache.reset()

    @invariant()
    def same(self) -> None:
        for latent, dynamic in self.pairs:
            assert latent.get_seq_length() == dynamic.get_seq_length()
            assert latent.get_mask_sizes(3, 0) == dynamic.get_mask_sizes(3, 0)
            if dynamic.get_seq_length():
                for a, b in zip(latent.layers, dynamic.layers, strict=True):
                    assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


SameLife.TestCase.settings = hypothesis.settings(max_examples=12, stateful_step_count=12, deadline=None)
TestSameLife = SameLife.TestCase


@pytest.mark.slow
class TestSameLongLife(SameLife.TestCase):  # type: ignore[misc, name-defined]
    """The same through 2,000 steps: 20 lives of 100, since the first of them is the simplest there is."""

    settings = hypothesis.settings(
        max_examples=14, stateful_step_count=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_thousand_steps_in_the_models_dtype_change_no_bit(dtype: torch.dtype) -> None:
    """No codes here: in the dtype of the model a cache holds what it was given, bit for bit, after each step."""
    checked = 0

    class SameBits(SameLife):
        @initialize(batch=st.integers(1, 3), count=st.integers(1, 6))
        def begin(self, batch: int, count: int) -> None:
            self.form, self.batch, self.dtype = "model", batch, dtype
            self.pairs = [(LatentCache(), DynamicCache())]
            self.append(0, count)

        @invariant()
        def same(self) -> None:
            nonlocal checked
            super().same()
            for latent, dynamic in self.pairs:
                if dynamic.get_seq_length():
                    rows = latent.layers[0].rows
                    assert rows is not None and rows.dtype == dtype == dynamic.layers[0].keys.dtype
            if any(dynamic.get_seq_length() for _, dynamic in self.pairs):  # a step that left nothing says nothing
                checked += 1

    settings = hypothesis.settings(
        max_examples=14, stateful_step_count=100, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    run_state_machine_as_test(SameBits, settings=settings)  # type: ignore[no-untyped-call]
    assert checked >= 1000


def test_a_fork_shares_the_prefix_until_one_appends() -> None:
    prefix = LatentCache()
    prefix.update(*new_tokens(1, 500, 0), 0)
    before = prefix.layers[0].keys.clone()
    one, other = prefix.fork(), prefix.fork()
    assert one.layers[0].rows.data_ptr() == prefix.layers[0].rows.data_ptr() == other.layers[0].rows.data_ptr()
    for seed, cache in enumerate((one, other, prefix), 1):
        cache.update(*new_tokens(1, 3, seed), 0)
    assert len({cache.layers[0].rows.data_ptr() for cache in (one, other, prefix)}) == 3
    for seed, cache in enumerate((one, other, prefix), 1):
        assert torch.equal(cache.layers[0].keys[:, :, :500], before)
        assert torch.equal(cache.layers[0].keys[:, :, 500:], new_tokens(1, 3, seed)[0])


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
    layer.crop(-1)  # a layer of a cache may never get a token, where it uses another layer's
    layer.update(*new_tokens(1, 3, 0))
    with pytest.raises(UsageError, match="of 3 tokens"):
        layer.crop(-4)
    for empty_or_not in (layer, LatentLayer(), LatentCache()):
        for kind in (UsageError, ValueError):  # the latter is transformers' own
            for wrong in (2, -1.5, True):
                with pytest.raises(kind, match="minus the number"):
                    empty_or_not.crop(wrong)  # type: ignore[arg-type]
    layer.crop(-3)
    assert layer.get_seq_length() == 0


def test_refuses_to_crop_what_is_empty() -> None:
    """Before the first token, after a reset, and of a model; layers that never got one are no fault in a filled one."""
    config = models.deepseek_v3().config
    for cache in (LatentCache(), LatentCache(config)):
        with pytest.raises(UsageError, match=r"crop\(-1\) on a cache of 0 tokens"):
            cache.crop(-1)
        cache.crop(0)
        cache.update(*(torch.zeros(1, 1, 3, width) for width in (40, 8)), 0)
        with pytest.raises(UsageError, match=r"crop\(-4\) on a cache of 3 tokens"):
            cache.crop(-4)
        assert cache.get_seq_length() == 3
        cache.crop(-1)
        assert cache.get_seq_length() == 2
        cache.reset()
        with pytest.raises(UsageError, match=r"crop\(-1\) on a cache of 0 tokens"):
            cache.crop(-1)


def test_no_sequence_is_repeated_away() -> None:
    cache = mla_convert.LatentCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 2), 0)
    for repeats in (0, -1):
        with pytest.raises(UsageError, match=rf"batch_repeat_interleave\({repeats}\)"):
            cache.batch_repeat_interleave(repeats)
    assert cache.get_seq_length() == 3
