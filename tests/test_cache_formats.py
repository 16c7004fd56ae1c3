"""Formats of a cached latent: bounds, layouts, what the kernel reads, and what is refused."""

from __future__ import annotations

import pytest
import torch

from mla_convert.errors import UsageError
from mla_convert.kernels import absorbed_decode, flashmla_views
from mla_convert.kernels.arguments import DecodeArguments, check
from mla_convert.kernels.history import decode_latent
from mla_convert.kernels.reference import absorbed_decode_reference
from mla_convert.patches.cache_formats import CacheFormat, encode, parse_cache, parse_format
from mla_convert.patches.cache_rows import RowLayout

FORMATS = ["int8", "int8:32", "int4", "int4:16", "fp8", "fp8:64", "flashmla"]


def shape(name: str) -> tuple[int, int, torch.dtype]:
    """C, R and the dtype that formats are tried with; FlashMLA's row knows one of each."""
    return (512, 64, torch.bfloat16) if name == "flashmla" else (64, 16, torch.float32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hostile(width: int = 64) -> torch.Tensor:
    """Tokens [n, width] of every size: ordinary, tiny, huge, one channel far above the rest, zeros."""
    tokens = random(8, width)
    tokens[1] *= 1e-6
    tokens[2] *= 1e4
    tokens[3, 5] = 300.0
    tokens[4] = 0
    tokens[5] = torch.linspace(-1, 1, width)
    tokens[6] = 2.0 ** torch.linspace(-12, 4, width)
    return tokens


def bound(x: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """The largest error of each number in float64, from the table of ``cache_formats``."""
    grouped = x.double().unflatten(-1, (-1, form.group or x.shape[-1]))
    largest = grouped.abs().amax(-1, keepdim=True).expand(grouped.shape).flatten(-2)
    if form.kind == "fp8":
        half_step = torch.maximum(x.double().abs() / 16, largest / 448 / 1024)
    else:
        half_step = largest / {"int8": 127, "int4": 7}[form.kind] / 2
    # The scale, the quotient, the product: three roundings of float32, 2^-24 each, with room for one more.
    return half_step + largest * 2.0**-22


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_within_the_derived_bound(name: str) -> None:
    form, x = parse_format(name), hostile(shape(name)[0])
    codes, scale = encode(x, form)
    found = decode_latent(codes, scale, torch.float64)
    assert bool(((found - x.double()).abs() <= bound(x, form)).all())
    assert scale.shape == (8, x.shape[1] // (form.group or x.shape[1])) and scale.dtype == torch.float32
    # The bound is tight: another bit would not do.
    assert float(((found - x.double()).abs() / bound(x, form).clamp(min=1e-20)).max()) > 0.5


@pytest.mark.parametrize("name", FORMATS)
def test_codes_read_again_are_the_same_codes(name: str) -> None:
    form = parse_format(name)
    codes, scale = encode(random(5, shape(name)[0]), form)
    again, scale_again = encode(decode_latent(codes, scale, torch.float32), form)
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    torch.testing.assert_close(scale, scale_again, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    x = random(2, shape(name)[0])
    x[0, 3] = bad
    found = decode_latent(*encode(x, parse_format(name)), torch.float32)
    assert not found[0, 3].isfinite() and bool(found[1].isfinite().all())


def test_every_e4m3_code_is_read_as_pytorch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    number = (codes & 127) != 127
    found = decode_latent(codes[number].view(torch.float8_e4m3fn), 1.0, torch.float32)
    assert torch.equal(found, codes[number].view(torch.float8_e4m3fn).to(torch.float32))
    with_nan = decode_latent(codes.view(torch.float8_e4m3fn), 1.0, torch.float32)
    assert torch.equal(with_nan.isnan(), ~number) and torch.equal(with_nan[number], found)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ROWS = [(name, 64, rope, dtype) for name in ["model", *FORMATS[:-1]] for rope in (0, 6, 16) for dtype in DTYPES]


@pytest.mark.parametrize(("name", "width", "rope", "dtype"), [*ROWS, ("flashmla", *shape("flashmla"))], ids=str)
def test_rows_hold_what_was_written(name: str, width: int, rope: int, dtype: torch.dtype) -> None:
    layout = RowLayout(parse_format(name), width, rope, dtype)
    rows = torch.zeros(2, 9, layout.width, dtype=layout.stored_dtype)
    latent, k_rope = random(2, 4, width).to(dtype), random(2, 4, rope, seed=1).to(dtype)
    layout.write(rows[:, 3:7], latent, k_rope)
    assert torch.equal(layout.k_rope(rows)[:, 3:7], k_rope)
    if name == "model":
        assert torch.equal(layout.numbers(rows)[:, 3:7], latent)
    else:
        codes, scale = encode(latent, layout.form)
        assert torch.equal(layout.numbers(rows)[:, 3:7], decode_latent(codes, scale, dtype))
        assert layout.codes(rows).data_ptr() == rows.data_ptr()
    assert not rows[:, :3].any() and not rows[:, 7:].any()


def test_bytes_of_a_token() -> None:
    """DeepSeek-V3's 512 and 64 numbers: 1,152 bytes in bfloat16; codes, scales and rotary key, each at 16 bytes."""
    expected = {"model": 1152, "int8": 656, "fp8": 656, "fp8:128": 656, "flashmla": 656, "int4": 400, "int4:32": 448}
    found = {name: RowLayout(parse_format(name), 512, 64, torch.bfloat16).row_bytes for name in expected}
    assert found == expected


def test_the_flashmla_row_is_what_its_views_say() -> None:
    layout = RowLayout(parse_format("flashmla"), 512, 64, torch.bfloat16)
    rows = torch.zeros(1, 5, layout.width, dtype=torch.uint8)
    latent, k_rope = random(1, 5, 512).bfloat16(), random(1, 5, 64, seed=1).bfloat16()
    layout.write(rows, latent, k_rope)
    codes, scale, rope = flashmla_views(rows)
    assert torch.equal(rope, k_rope)
    assert torch.equal(decode_latent(codes, scale, torch.bfloat16), layout.numbers(rows))
    wide = latent.float().unflatten(-1, (4, 128))
    assert torch.equal(scale, wide.abs().amax(-1) / 448)


@pytest.mark.parametrize("name", FORMATS)
def test_absorbed_decode_reads_the_views(name: str) -> None:
    """Against float64 on the same codes: what is measured is the kernel's error, not the format's.

    The PyTorch backend adds parts of 1,024 tokens: 2,500 of them, with bounds of a float32 sum of that length. The
    row of FlashMLA is for bfloat16, in which its codes may be twice as far from float64 as the same numbers, plain.
    """
    width, rope, dtype = shape(name)
    layout = RowLayout(parse_format(name), width, rope, dtype)
    rows = torch.zeros(2, 2500, layout.width, dtype=torch.uint8)
    layout.write(rows, random(2, 2500, width).to(dtype), random(2, 2500, rope, seed=1).to(dtype))
    stored = layout.codes(rows), layout.k_rope(rows)
    query = random(2, 3, 4, width, seed=2).to(dtype), random(2, 3, 4, rope, seed=3).to(dtype)
    args = {"scale": 0.1, "latent_scale": layout.scale(rows)}
    found = absorbed_decode(*query, *stored, **args)  # type: ignore[arg-type]
    expected = absorbed_decode_reference(check(DecodeArguments(*query, *stored, **args)))  # type: ignore[arg-type]
    bounds = [2e-5, 2e-5]
    if dtype != torch.float32:
        plain = absorbed_decode(*query, layout.numbers(rows), stored[1], scale=0.1)
        bounds = [2 * float((a.double() - b).abs().max()) for a, b in zip(plain, expected, strict=True)]
        assert max(bounds) < 0.02
    for one, other, bound in zip(found, expected, bounds, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound)


def test_history_becomes_numbers_a_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding never makes more of a coded history than a tile of it."""
    from mla_convert.kernels import torch_decode

    largest = []

    def watched(codes: torch.Tensor, *rest: object) -> torch.Tensor:
        largest.append(codes.shape[0] * codes.shape[1])
        return decode_latent(codes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_decode, "decode_latent", watched)
    layout = RowLayout(parse_format("int8"), 64, 16, torch.float32)
    rows = torch.zeros(1, 5000, layout.width, dtype=torch.uint8)
    query = random(1, 1, 4, 64), random(1, 1, 4, 16)
    absorbed_decode(*query, layout.codes(rows), layout.k_rope(rows), scale=0.1, latent_scale=layout.scale(rows))
    assert sum(largest) == 5000 and max(largest) <= torch_decode.TILE_TOKENS


@pytest.mark.parametrize(
    "text", ["int9", "int8:", "int8:0", "int8:-1", "int8:x", "model:4", "flashmla:128", "", "INT8"]
)
def test_refuses_formats_that_are_not_known(text: str) -> None:
    with pytest.raises(UsageError, match="cache format"):
        parse_format(text)


@pytest.mark.parametrize("text", ["static", "latent:int3", "latent:", "dynamic:int8", ""])
def test_refuses_caches_that_are_not_known(text: str) -> None:
    with pytest.raises(UsageError, match="cache"):
        parse_cache(text)


@pytest.mark.parametrize(
    ("name", "latent", "words"),
    [("int4", 7, "two numbers a byte"), ("int8:48", 64, "whole groups"), ("flashmla", 64, '"fp8:128"')],
)
def test_refuses_formats_that_do_not_fit(name: str, latent: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RowLayout(parse_format(name), latent, 16, torch.float32)
