"""FP8 blocks against the formula itself, element by element, and everything about scales that is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from variants import quantize_fp8

from mla_convert.errors import FormatError
from mla_convert.formats import (
    count_nonfinite,
    decode_scale,
    dequantize_blocks,
    scale_grid,
)

FP8 = torch.float8_e4m3fn
SHAPES = [(576, 256), (160, 192), (80, 192), (128, 128), (1, 1), (129, 127), (257, 65), (3, 300), (300, 3)]


def random_codes(shape: tuple[int, int]) -> torch.Tensor:
    """Every finite FP8 code, in random order."""
    generator = torch.Generator().manual_seed(shape[0])
    bytes_ = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    bytes_[(bytes_ & 0x7F) == 0x7F] = 0x7E  # NaN becomes the largest code
    return bytes_.view(FP8)


def random_scale(grid: tuple[int, int]) -> torch.Tensor:
    return torch.rand(grid, generator=torch.Generator().manual_seed(1)) + 0.1


def formula(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``code[i, j] · scale[i // rows, j // columns]``, exact in Python's doubles (4 + 24 bits), rounded to float32."""
    values, factors = codes.float().tolist(), scale.float().tolist()
    return torch.tensor(
        [
            [value * factors[i // block[0]][j // block[1]] for j, value in enumerate(row)]
            for i, row in enumerate(values)
        ],
        dtype=torch.float64,
    ).float()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128)], ids=str)
def test_the_formula(shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes = random_codes(shape)
    scale = random_scale((math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])))
    expected = formula(codes, scale, block)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = dequantize_blocks(codes, scale, block, dtype)
        assert weight.dtype == dtype and weight.is_contiguous()
        assert torch.equal(weight, expected.to(dtype))


def test_the_block_size_is_given_and_not_guessed() -> None:
    """576 rows in five blocks are not blocks of 116; the same grid fits both sizes."""
    codes, scale = random_codes((576, 256)), random_scale((5, 2))
    assert scale_grid((576, 256), (128, 128)) == scale_grid((576, 256), (116, 128)) == (5, 2)
    right, guessed = formula(codes, scale, (128, 128)), formula(codes, scale, (116, 128))
    assert torch.equal(dequantize_blocks(codes, scale, (128, 128)), right)
    assert not torch.equal(right, guessed)


def test_a_quantized_weight_comes_back() -> None:
    """Codes have 3 mantissa bits: half a step is 2⁻⁴ of the value, or 2⁻¹⁰ of the scale for subnormal codes."""
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(0))
    codes, scale = quantize_fp8(weight)
    back = dequantize_blocks(codes, scale, (128, 128))
    step = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :192]
    # One part in a million for the roundings of the quotient and the product in float32.
    bound = torch.maximum(weight.abs() * 2**-4, step * 2**-10) * (1 + 1e-6)
    assert ((back - weight).abs() <= bound).all()


def test_strided_codes() -> None:
    codes, scale = random_codes((192, 160)), random_scale((2, 2))
    assert torch.equal(dequantize_blocks(codes.T, scale, (128, 128)), formula(codes.T, scale, (128, 128)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_exponent_scales(dtype: torch.dtype) -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    decoded = decode_scale(exponents.view(dtype))
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_exponent_scales_in_the_formula(dtype: torch.dtype) -> None:
    codes = random_codes((160, 192))
    exponents = torch.tensor([[120, 127], [130, 101]], dtype=torch.uint8)
    powers = torch.tensor([[2.0**-7, 1.0], [8.0, 2.0**-26]])
    weight = dequantize_blocks(codes, exponents.view(dtype), (128, 128))
    assert torch.equal(weight, formula(codes, powers, (128, 128)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_scales(dtype: torch.dtype) -> None:
    codes, scale = random_codes((160, 192)), random_scale((2, 2)).to(dtype)
    assert torch.equal(dequantize_blocks(codes, scale, (128, 128)), formula(codes, scale, (128, 128)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_bad_scales(bad: float) -> None:
    scale = torch.ones(2, 2)
    scale[1, 0] = bad
    with pytest.raises(FormatError, match="kv_b_scale_inv has 1 of 4 values that are NaN, infinite, zero or negative"):
        dequantize_blocks(random_codes((160, 192)), scale, (128, 128), scale_name="kv_b_scale_inv")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_byte_255_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match="s has 2 of 3 values"):
        decode_scale(torch.tensor([255, 127, 255], dtype=torch.uint8).view(dtype), name="s")


def test_scale_of_another_kind() -> None:
    with pytest.raises(FormatError, match="s is stored in int8; supported are float32"):
        decode_scale(torch.ones(2, dtype=torch.int8), name="s")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_that_are_nan(dtype: torch.dtype) -> None:
    codes = random_codes((160, 192))
    codes.view(torch.uint8)[[0, 159, 130], [0, 191, 5]] = torch.tensor([0x7F, 0xFF, 0x7F], dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"w has 3 NaN or infinite values \(of 30720\) in float8_e4m3fn"):
        dequantize_blocks(codes, torch.ones(2, 2), (128, 128), dtype, name="w")


def test_values_too_large_for_the_dtype() -> None:
    codes = torch.tensor([[448.0, 1.0, -448.0]]).to(FP8)
    scale = torch.tensor([[1000.0]])
    assert dequantize_blocks(codes, scale, (128, 128)).tolist() == [[448000.0, 1000.0, -448000.0]]
    with pytest.raises(FormatError, match=r"w has 2 values \(of 3\) too large for float16; use bfloat16"):
        dequantize_blocks(codes, scale, (128, 128), torch.float16, name="w")


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (3, 2), (2, 3), (2,), (2, 2, 1), ()], ids=str)
def test_grids_of_the_wrong_size(grid: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=re.escape(f"has shape {list(grid)}")) as refused:
        dequantize_blocks(random_codes((160, 192)), torch.ones(grid), (128, 128), name="w", scale_name="w_scale_inv")
    for part in ("w_scale_inv", "[160, 192]", "[128, 128]", "needs [2, 2]"):
        assert part in str(refused.value)


def test_weights_of_the_wrong_kind() -> None:
    with pytest.raises(FormatError, match="w is stored in bfloat16 .*supported are .* in float8_e4m3fn, int8"):
        dequantize_blocks(torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(1, 1), (128, 128), name="w")
    with pytest.raises(FormatError, match=r"with shape \[4\]; supported are weights of two dimensions"):
        dequantize_blocks(torch.ones(4).to(FP8), torch.ones(1), (128, 128), name="w")


def test_counting_what_is_not_finite() -> None:
    values = torch.zeros((1 << 22) + 5)
    values[[0, 7, -1]] = torch.tensor([math.nan, math.inf, -math.inf])
    assert count_nonfinite(values) == 3
    assert count_nonfinite(values.to(torch.bfloat16)) == 3
    assert count_nonfinite(torch.tensor([0x7F, 0, 0xFF], dtype=torch.uint8).view(FP8)) == 2
    assert count_nonfinite(torch.tensor([2**31 - 1], dtype=torch.int32)) == 0
    assert count_nonfinite(torch.zeros(0)) == 0
    assert count_nonfinite(torch.tensor(math.nan)) == 1
