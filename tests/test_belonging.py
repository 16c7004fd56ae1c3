"""Rounding alone always passes; wrong weights never do, however small the fault that quantization can make."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from variants import quantize_fp8

from mla_convert.absorption import fuse_ov, fuse_qk, slice_rows, split_kv_b
from mla_convert.belonging import compare_factored, compare_fused_ov, compare_fused_qk
from mla_convert.comparison import Comparison
from mla_convert.errors import UsageError
from mla_convert.geometry import MLAGeometry

GEOMETRIES = {
    "example": MLAGeometry(192, 8, 64, 32, 16, 32, 96, 1.0),
    "DeepSeek heads": MLAGeometry(256, 2, 256, 128, 64, 128, 256, 1.0),
    "odd": MLAGeometry(200, 3, 100, 40, 8, 56, None, 1.0),
    "no rotary": MLAGeometry(136, 3, 72, 24, 0, 40, 150, 1.0),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = list(itertools.product(DTYPES, repeat=2))
# Rounding is meant to leave this much room below the bound; elementwise bounds are exact and leave none.
MARGIN = 0.8


@pytest.fixture(params=GEOMETRIES, ids=GEOMETRIES)
def g(request: pytest.FixtureRequest) -> MLAGeometry:
    return GEOMETRIES[request.param]


Weights = tuple[Tensor, Tensor, Tensor]


def plain(g: MLAGeometry, make: torch.Generator) -> Weights:
    """kv_b, q_b, o, as a model is initialised."""
    return tuple(torch.randn(shape, generator=make) * 0.02 for shape in (g.kv_b_shape, g.q_b_shape, g.o_shape))  # type: ignore[return-value]


def outliers(g: MLAGeometry, make: torch.Generator) -> Weights:
    """A few rows and columns hundreds of times larger than the others."""
    kv_b, q_b, o = plain(g, make)
    kv_b[2] *= 100
    kv_b[:, 5] *= 300
    q_b[:, 3] *= 300
    o[4] *= 100
    return kv_b, q_b, o


def aligned(g: MLAGeometry, make: torch.Generator) -> Weights:
    """Keys that look like queries: the terms of each product add up instead of cancelling."""
    kv_b, q_b, o = plain(g, make)
    width = min(g.kv_lora_rank, g.query_rank)
    keys = kv_b.view(g.num_heads, -1, g.kv_lora_rank)[:, : g.qk_nope_head_dim, :width]
    keys.copy_(q_b.view(g.num_heads, -1, g.query_rank)[:, : g.qk_nope_head_dim, :width])
    return kv_b, q_b, o


def fp8(g: MLAGeometry, make: torch.Generator) -> Weights:
    """Dequantized blocks: eight mantissas times one scale, whose roundings go together."""
    dequantized = []
    for weight in aligned(g, make):
        codes, scale = quantize_fp8(weight)
        grid = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        dequantized.append(codes.float() * grid[: len(weight), : weight.shape[1]])
    return tuple(dequantized)  # type: ignore[return-value]


KINDS = {make.__name__: make for make in (plain, outliers, aligned, fp8)}


class Stored:
    """The four tensors made from ``weights`` and stored in ``dtype``, and their comparison with other weights."""

    def __init__(self, g: MLAGeometry, weights: Weights, dtype: torch.dtype) -> None:
        self.g = g
        w_uk, w_uv = split_kv_b(weights[0], g)
        self.k_b, self.v_b = slice_rows(w_uk, dtype), slice_rows(w_uv, dtype)
        self.qk, self.ov = fuse_qk(w_uk, weights[1], g, dtype), fuse_ov(w_uv, weights[2], g, dtype)

    def compare(self, weights: Weights) -> dict[str, Comparison]:
        kv_b, q_b, o = weights
        return {
            "k_b": compare_factored(self.k_b, None, kv_b, self.g),
            "v_b": compare_factored(None, self.v_b, kv_b, self.g),
            "qk": compare_fused_qk(self.qk, kv_b, q_b, self.g),
            "ov": compare_fused_ov(self.ov, kv_b, o, self.g),
        }


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return tuple(weight.to(dtype) for weight in weights)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_alone_passes_with_margin(g: MLAGeometry, kind: str) -> None:
    """4 geometries × 4 kinds × 9 pairs of dtypes × 2 seeds, each for four tensors."""
    for seed, (stored, model) in itertools.product(range(2), PAIRS):
        weights = KINDS[kind](g, torch.Generator().manual_seed(seed))
        found = Stored(g, weights, stored).compare(cast(weights, model))
        for key, comparison in found.items():
            assert comparison.fits, (key, stored, model, comparison)
        assert found["ov"].excess < MARGIN, (stored, model, found["ov"])
        if not g.qk_rope_head_dim:
            assert found["qk"].excess < MARGIN, (stored, model, found["qk"])


def scaled_block(weight: Tensor, row: int = 0) -> Tensor:
    """One 128 × 128 block with a scale that is 2 % too large."""
    weight = weight.clone()
    weight[row : row + 128, :128] *= 1.02
    return weight


def swapped_heads(weight: Tensor, heads: int) -> Tensor:
    return weight.reshape(heads, -1, weight.shape[1]).roll(1, 0).reshape(weight.shape)


FAULTS: dict[str, tuple[Callable[[MLAGeometry, Weights, Weights], Weights], tuple[str, ...]]] = {
    "block of kv_b, key rows": (lambda g, w, _: (scaled_block(w[0]), w[1], w[2]), ("k_b", "qk")),
    "block of kv_b, value rows": (
        lambda g, w, _: (scaled_block(w[0], g.qk_nope_head_dim), w[1], w[2]),
        ("v_b", "ov"),
    ),
    "block of q_b": (lambda g, w, _: (w[0], scaled_block(w[1]), w[2]), ("qk",)),
    "block of o": (lambda g, w, _: (w[0], w[1], scaled_block(w[2])), ("ov",)),
    "heads of kv_b": (lambda g, w, _: (swapped_heads(w[0], g.num_heads), w[1], w[2]), ("k_b", "v_b", "qk", "ov")),
    "heads of q_b": (lambda g, w, _: (w[0], swapped_heads(w[1], g.num_heads), w[2]), ("qk",)),
    "heads of o": (lambda g, w, _: (w[0], w[1], swapped_heads(w[2].T, g.num_heads).T), ("ov",)),
    "another layer": (lambda g, w, other: other, ("k_b", "v_b", "qk", "ov")),
    "NaN": (lambda g, w, _: tuple(x * torch.nan for x in w), ("k_b", "v_b", "qk", "ov")),  # type: ignore[dict-item]
    "infinity": (lambda g, w, _: tuple(x / 0 for x in w), ("k_b", "v_b", "qk", "ov")),  # type: ignore[dict-item]
    "zero": (lambda g, w, _: tuple(x * 0 for x in w), ("k_b", "v_b", "qk", "ov")),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_weights_are_found(g: MLAGeometry, kind: str, fault: str) -> None:
    plant, keys = FAULTS[fault]
    for stored, model in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        make = torch.Generator().manual_seed(3)
        weights, other = KINDS[kind](g, make), KINDS[kind](g, make)
        found = Stored(g, weights, stored).compare(cast(plant(g, weights, other), model))
        for key in keys:
            assert not found[key].fits, (key, stored, model, found[key])
            assert not found[key].excess < 1.5, (key, stored, model, found[key])


def test_what_is_stored_exactly_is_held_to_the_cast_alone() -> None:
    """One bit flipped in a bfloat16 source, seen through a float32 and a float16 model."""
    g = GEOMETRIES["example"]
    kv_b = plain(g, torch.Generator().manual_seed(0))[0].bfloat16()
    w_uk, w_uv = split_kv_b(kv_b, g)
    k_b, v_b = slice_rows(w_uk, kv_b.dtype), slice_rows(w_uv, kv_b.dtype)
    flipped = kv_b.clone()
    flipped.view(torch.int16)[77, 5] ^= 1
    for dtype in (torch.float32, torch.float16):
        same = compare_factored(k_b, v_b, kv_b.to(dtype), g, stored_exactly=True)
        changed = compare_factored(k_b, v_b, flipped.to(dtype), g, stored_exactly=True)
        assert same.fits and not changed.fits
        assert changed.where == "key rows of kv_b_proj, head 1"
        assert 2**-9 < changed.error < 2**-7


def test_a_dtype_on_the_way_widens_the_bound() -> None:
    """An FP8 source dequantized to bfloat16 and cast up looks like float32 and carries bfloat16's roundings."""
    g = GEOMETRIES["DeepSeek heads"]
    weights = fp8(g, torch.Generator().manual_seed(0))
    model = cast(cast(weights, torch.bfloat16), torch.float32)
    stored = Stored(g, weights, torch.float32)
    tight = stored.compare(model)
    assert not any(comparison.fits for comparison in tight.values())
    kv_b, q_b, o = model
    on_the_way = torch.bfloat16
    for comparison in (
        compare_factored(stored.k_b, stored.v_b, kv_b, g, source_dtype=on_the_way),
        compare_fused_qk(stored.qk, kv_b, q_b, g, source_dtype=on_the_way),
        compare_fused_ov(stored.ov, kv_b, o, g, source_dtype=on_the_way),
    ):
        assert comparison.fits and comparison.bound < 0.02
    assert not compare_fused_ov(stored.ov, kv_b, scaled_block(o), g, source_dtype=on_the_way).fits


def test_error_and_place_are_those_of_the_fault() -> None:
    g = GEOMETRIES["DeepSeek heads"]
    weights = plain(g, torch.Generator().manual_seed(0))
    stored = Stored(g, weights, torch.float32)
    wrong = stored.compare((scaled_block(weights[0]), weights[1], weights[2]))
    assert wrong["k_b"].error == pytest.approx(0.02 / 1.02, rel=1e-3)
    assert wrong["qk"].error == pytest.approx(0.02 / 1.02, rel=0.1)
    assert wrong["k_b"].where == "key rows of kv_b_proj, head 0" and wrong["qk"].where == "key side, head 0"


def test_vectors_come_from_the_generator() -> None:
    g = GEOMETRIES["example"]
    weights = plain(g, torch.Generator().manual_seed(0))
    stored = Stored(g, weights, torch.bfloat16)
    kv_b, _, o = cast(weights, torch.bfloat16)

    def run(seed: int | None) -> Comparison:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return compare_fused_ov(stored.ov, kv_b, o, g, generator)

    assert run(None) == run(0) == run(0) != run(1)


def test_other_shapes_are_refused() -> None:
    g = GEOMETRIES["example"]
    kv_b, q_b, _ = plain(g, torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match="has shape"):
        compare_factored(kv_b, None, kv_b[1:], g)
    with pytest.raises(UsageError, match="has shape"):
        compare_fused_qk(kv_b, kv_b, q_b[1:], g)
