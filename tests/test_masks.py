"""Masks in every form, as arguments of ``absorbed_decode``: nothing shown is hidden, nothing hidden is shown."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from mla_convert.patches.masks import Visibility, additive, representable, visibility

LOWEST = torch.finfo(torch.float32).min


def seen(found: Visibility, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """What the kernel's rule makes of it, bool [B,S,T]: causal by ``kv_lens``, and the mask."""
    lens = torch.full((batch,), found.stop) if found.kv_lens is None else found.kv_lens
    limits = lens[:, None] - q_len + torch.arange(1, q_len + 1)
    visible = torch.arange(found.stop) < limits[..., None]
    if found.mask is not None:
        visible = visible & found.mask
    return torch.nn.functional.pad(visible, (0, kv_len - found.stop))


@hypothesis.given(
    st.integers(1, 3), st.integers(1, 4), st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 10**6)
)
def test_any_pattern_is_kept(batch: int, q_len: int, more: int, capacity: bool, floating: bool, seed: int) -> None:
    """Also patterns that are not causal, in a cache of which only a part is filled."""
    kv_len = q_len + more
    pattern = torch.rand(batch, 1, q_len, kv_len, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask = torch.zeros(pattern.shape).masked_fill(~pattern, LOWEST) if floating else pattern
    assert representable(mask, heads=4)
    found = visibility(mask, batch, q_len, kv_len, capacity=capacity, lower_right=False)
    assert torch.equal(seen(found, batch, q_len, kv_len), pattern[:, 0])
    if capacity:
        # As short as the causal rule allows: one less would hide something (or nothing is shown at all).
        assert found.kv_lens is not None
        for b in range(batch):
            shorter = found.kv_lens[b] - 1 - q_len + torch.arange(1, q_len + 1)
            hidden = pattern[b, 0] & (torch.arange(kv_len) >= shorter[:, None])
            assert bool(hidden.any()) or not bool(pattern[b].any())


@pytest.mark.parametrize(
    ("q_len", "kv_len", "lower_right", "expected"),
    [
        (1, 5, False, torch.ones(1, 5)),
        (3, 3, False, torch.ones(3, 3).tril()),
        (3, 5, False, torch.ones(3, 5).tril()),
        (3, 5, True, torch.ones(3, 5).tril(2)),
    ],
)
def test_no_mask(q_len: int, kv_len: int, lower_right: bool, expected: torch.Tensor) -> None:
    found = visibility(None, 2, q_len, kv_len, capacity=False, lower_right=lower_right)
    assert torch.equal(seen(found, 2, q_len, kv_len), expected.bool().expand(2, -1, -1))


def test_padding_of_flash_attention() -> None:
    """[B,T], causal to the lower right; shorter than the cache where that is a StaticCache."""
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    found = visibility(padding, 2, 2, 6, capacity=True, lower_right=True)
    expected = torch.tensor([[[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]).bool()
    assert found.stop == 4 and torch.equal(seen(found, 2, 2, 4), expected)


def test_what_the_kernel_cannot_express() -> None:
    per_head = torch.ones(1, 4, 2, 2, dtype=torch.bool)
    assert not representable(per_head, heads=4) and representable(per_head[:, :1], heads=4)
    biased = torch.zeros(1, 1, 2, 2)
    biased[..., 0] = -0.5
    assert not representable(biased, heads=4)
    assert not representable(object(), heads=4)
    assert representable(torch.tensor([[0.0, -torch.inf]])[None, None], heads=4)


def test_additive() -> None:
    query = torch.zeros(1, 2, 3, 4)
    assert additive(None, query[:, :, :1], 5) is None
    causal = torch.ones(3, 5, dtype=torch.bool).tril()[None, None]
    for mask in (None, causal):
        numbers = additive(mask, query, 5)
        assert numbers is not None and numbers.dtype == query.dtype
        assert torch.equal(numbers == 0, causal) and bool((numbers[~causal] == LOWEST).all())
    given = torch.randn(1, 1, 3, 5)
    assert additive(given, query, 5) is given
