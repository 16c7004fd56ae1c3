"""Codes and scales by their definition, bounds of rounding, and what compressed-tensors makes of the same bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor

from mla_convert import quantization
from mla_convert.errors import FormatError, SidecarError, UsageError
from mla_convert.geometry import MLAGeometry
from mla_convert.quantization import Quantized, find_scales, measure_loss, quantize, slice_fp8, slices_line_up
from mla_convert.schemes import (
    FP8_BLOCKS,
    FP8_ROWS,
    INT8,
    Scheme,
    all_schemes,
    int4,
    parse_schemes,
    quantization_config,
)

#: A small block beside the public ones, so that a weight written out here has several.
SMALL_FP8 = Scheme("fp8", (2, 2))
SMALL_INT4 = Scheme("int4", (1, 2))


def weight(rows: int = 260, columns: int = 256, seed: int = 0) -> Tensor:
    """Rows of very different sizes, an outlier, a row and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    w[3, 5] = 40.0
    w[7] = 0
    w[8, : columns // 2] = 0
    return w


def test_int8_written_out() -> None:
    coded = quantize(torch.tensor([[1.0, -2.0, 255.0, 0.9], [0.0, 0.0, 0.0, 0.0], [-127.5, 0.5, 0.49, 127.0]]), INT8)
    assert coded.scales.tolist() == [[2.0], [1.0], [1.0]]
    # 255 is 127.5 steps: half a step beyond the last code. Ties go to the even code.
    assert coded.codes.tolist() == [[0, -1, 127, 0], [0, 0, 0, 0], [-128, 0, 0, 127]]
    assert coded.dequantize().tolist() == [[0, -2, 254, 0], [0, 0, 0, 0], [-128, 0, 0, 127]]


def test_int4_written_out() -> None:
    coded = quantize(torch.tensor([[7.5, -7.5, 2.0, -1.0]]), SMALL_INT4)
    assert coded.scales.tolist() == [[1.0, pytest.approx(2 / 7.5)]]
    # Codes 7 and −8 in the first byte, low four bits first, plus 8: 15 and 0; then 7 and −4: 15 and 4.
    assert coded.codes.tolist() == [[15 + 16 * 0, 15 + 16 * 4]]
    assert coded.dequantize().tolist() == [[7.0, -8.0, pytest.approx(7 * 2 / 7.5), pytest.approx(-4 * 2 / 7.5)]]


def test_fp8_written_out() -> None:
    coded = quantize(torch.tensor([[448.0, 17.0, 1.0], [1.0, -2.0, 0.0], [4.48, 0.0, 2.0]]), SMALL_FP8)
    assert coded.scales.flatten().tolist() == pytest.approx([1.0, 1 / 448, 0.01, 2 / 448])
    # 448 is 0x7E; 17 lies between 16 (0x58) and 18, a tie for the even code; −2 is 0xC0.
    assert coded.codes[0, :2].tolist() == [0x7E, 0x58] and coded.codes[1, :2].tolist() == [0x38, 0xC0]
    assert coded.codes[:, 2].tolist() == [0x7E, 0, 0x7E] and coded.codes[2, :2].tolist() == [0x7E, 0]


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_no_element_is_off_by_more_than_half_a_step(scheme: Scheme) -> None:
    w = weight()
    coded = quantize(w, scheme)
    each = coded.scales.repeat_interleave(scheme.blocks(256)[0], 0)[:260].repeat_interleave(scheme.blocks(256)[1], 1)
    # Half the distance between codes; FP8's grows with the number. Float32 rounds the quotient and the product.
    half = torch.maximum(w.abs() / 16, each / 1024) if scheme.kind == "fp8" else each / 2
    assert torch.all((coded.dequantize() - w).abs() <= half * (1 + 1e-5) + w.abs() * 2**-22)
    assert not coded.dequantize()[7].any() and not coded.dequantize()[8, :128].any()
    assert torch.isfinite(coded.scales).all() and (coded.scales > 0).all()


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_coding_twice_changes_nothing(scheme: Scheme) -> None:
    coded = quantize(weight(), scheme)
    again = quantize(coded.dequantize(), scheme, coded.scales)
    assert torch.equal(again.codes, coded.codes)


def tensors(coded: Quantized) -> dict[str, Tensor]:
    """As they come back from a file."""
    return {name: part.clone() for name, part in coded.parts().items()}


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_compressed_tensors_reads_and_makes_the_same(scheme: Scheme) -> None:
    """Its own compressor, chosen by our config's own words, decompresses to the same bits and compresses to them."""
    coded = quantize(weight(), scheme)
    config = QuantizationConfig.model_validate(quantization_config({"k_b_proj": scheme}))
    (group,) = config.config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(group.format)
    plain = compressor.decompress(tensors(coded), group)["weight"]
    assert plain.dtype == torch.float32 and torch.equal(plain, coded.dequantize())
    assert set(compressor.compression_param_names(group)) == set(coded.parts())
    made = compressor.compress({"weight": weight(), "weight_scale": coded.scales}, group)
    for name, part in tensors(coded).items():
        assert torch.equal(made[name].view(torch.uint8), part.view(torch.uint8)), name


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_parts_come_back(scheme: Scheme) -> None:
    coded = quantize(weight(), scheme)
    planned = scheme.parts((260, 256))
    assert {name: (tuple(p.shape), p.dtype) for name, p in coded.parts().items()} == planned
    back = Quantized.from_parts("w.weight", tensors(coded), scheme, (260, 256))
    assert torch.equal(back.codes, coded.codes) and torch.equal(back.scales, coded.scales)
    assert back.shape == (260, 256)


def test_the_packing_is_compressed_tensors_own() -> None:
    coded = quantize(weight(9, 64), int4(32))
    codes = coded.numbers().to(torch.int8)
    assert torch.equal(coded.parts()["weight_packed"], pack_to_int32(codes, 4))


def wrong_nibble_order(parts: dict[str, Tensor]) -> None:
    codes = parts["weight_packed"].view(torch.uint8)
    parts["weight_packed"] = ((codes << 4) | (codes >> 4)).view(torch.int32)


def wrong_group(parts: dict[str, Tensor]) -> None:
    parts["weight_scale"] = parts["weight_scale"].roll(1, 1)


def transposed_scale(parts: dict[str, Tensor]) -> None:
    parts["weight_scale"] = parts["weight_scale"].T.contiguous().view(parts["weight_scale"].shape)


@pytest.mark.parametrize("fault", [wrong_nibble_order, wrong_group, transposed_scale])
def test_faults_in_the_packing_show(fault: Any) -> None:
    scheme = int4(32)
    coded = quantize(weight(), scheme)
    parts = tensors(coded)
    fault(parts)
    config = QuantizationConfig.model_validate(quantization_config({"k_b_proj": scheme}))
    (group,) = config.config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(group.format)
    assert not torch.equal(compressor.decompress(parts, group)["weight"], coded.dequantize())


def test_what_is_stored_must_fit_together() -> None:
    coded = quantize(weight(9, 32), int4(32))
    parts = tensors(coded)
    parts["weight_shape"] += 1
    with pytest.raises(SidecarError, match=r"w\.weight_shape says \[10, 33\], the manifest \[9, 32\]"):
        Quantized.from_parts("w.weight", parts, coded.scheme, (9, 32))
    parts = tensors(coded)
    parts["weight_scale"][2] = math.nan
    with pytest.raises(SidecarError, match="weight_scale has values that are not positive"):
        Quantized.from_parts("w.weight", parts, coded.scheme, (9, 32))
    parts = tensors(quantize(weight(9, 32), FP8_ROWS))
    parts["weight"].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(SidecarError, match="codes that are not numbers"):
        Quantized.from_parts("w.weight", parts, FP8_ROWS, (9, 32))


def test_values_that_cannot_be_coded() -> None:
    w = weight(9, 32)
    w[1, 1] = math.inf
    with pytest.raises(FormatError, match="w: the product of its source weights has 1 values"):
        quantize(w, INT8, name="w")
    with pytest.raises(UsageError, match="no int4 group size fits: use int8 or fp8"):
        quantize(weight(9, 20), int4(32))


def test_the_smallest_numbers() -> None:
    """Scales stay numbers where the weight's largest magnitude is a subnormal."""
    coded = quantize(torch.full((2, 32), 1e-42), int4(32))
    assert (coded.scales == torch.finfo(torch.float32).tiny).all() and not coded.dequantize().any()


def test_loss() -> None:
    w = torch.tensor([[3.0, 4.0]])
    coded = Quantized(torch.tensor([[3, 3]], dtype=torch.int8), torch.ones(1, 1), INT8)
    loss = measure_loss(w, coded)
    assert (loss.largest, loss.frobenius) == (0.25, pytest.approx(0.2))
    assert loss.signal_to_noise == pytest.approx(20 * math.log10(5))
    exact = measure_loss(torch.tensor([[3.0, 3.0]]), coded)
    assert exact.frobenius == 0 and exact.signal_to_noise == math.inf


GEOMETRY = MLAGeometry(64, 2, 192, 128, 16, 256, None, 0.1)


def test_blocks_that_line_up_are_sliced_without_loss() -> None:
    kv_b = torch.randn(GEOMETRY.kv_b_shape, generator=torch.Generator().manual_seed(0))
    source = quantize(kv_b, FP8_BLOCKS)
    whole = source.dequantize().view(2, 384, 192)
    codes = source.codes.view(torch.float8_e4m3fn)
    for keys, rows in ((True, whole[:, :128]), (False, whole[:, 128:])):
        sliced = slice_fp8(codes, source.scales, GEOMETRY, keys=keys)
        assert torch.equal(sliced.dequantize(), rows.flatten(0, 1))
        assert sliced.scales.shape == find_scales(rows.flatten(0, 1), FP8_BLOCKS).shape


def test_ue8m0_scales_become_their_numbers() -> None:
    codes = torch.full(GEOMETRY.kv_b_shape, 1.5).to(torch.float8_e4m3fn)
    scale = torch.full((6, 2), 125, dtype=torch.uint8)  # 2 ** −2
    sliced = slice_fp8(codes, scale, GEOMETRY, keys=False)
    assert (sliced.dequantize() == 0.375).all() and sliced.scales.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "blocks", "scheme", "expected"),
    [
        ({}, (128, 128), FP8_BLOCKS, True),
        ({"qk_nope_head_dim": 192}, (128, 128), FP8_BLOCKS, False),
        ({"v_head_dim": 64}, (128, 128), FP8_BLOCKS, False),
        ({}, (64, 128), FP8_BLOCKS, False),
        ({}, (128, 128), FP8_ROWS, False),
        ({}, (128, 128), INT8, False),
        ({}, None, FP8_BLOCKS, False),
    ],
)
def test_which_blocks_line_up(
    changes: dict[str, int], blocks: tuple[int, int] | None, scheme: Scheme, expected: bool
) -> None:
    geometry = dataclasses.replace(GEOMETRY, **changes)
    assert slices_line_up(blocks, scheme, geometry) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, None, None, None), (None, None)),
        (("int8", None, None, None), (INT8, INT8)),
        (("fp8", None, None, None), (FP8_BLOCKS, FP8_BLOCKS)),
        (("fp8", None, None, "row"), (FP8_ROWS, FP8_ROWS)),
        (("fp8", None, None, "128"), (FP8_BLOCKS, FP8_BLOCKS)),
        (("int4", None, None, None), (int4(32), int4(32))),
        (("int4", 8, None, 64), (INT8, int4(64))),
        (("fp8", 8, 4, 128), (FP8_BLOCKS, int4(128))),
        (("fp8", None, 4, 64), (FP8_BLOCKS, int4(64))),
        (("int8", 16, None, None), (None, INT8)),
        ((None, None, 4, None), (None, int4(32))),
        ((None, 8, None, None), (INT8, None)),
    ],
)
def test_options(options: tuple[Any, ...], expected: tuple[Scheme | None, Scheme | None]) -> None:
    assert parse_schemes(*options) == expected


def test_formats_of_a_mixture() -> None:
    config = quantization_config({"k_b_proj": INT8, "v_b_proj": int4(64)})
    assert config["format"] == "mixed-precision"
    groups = QuantizationConfig.model_validate(config).config_groups
    assert [group.targets for group in groups.values()] == [[r"re:.*\.k_b_proj$"], [r"re:.*\.v_b_proj$"]]
    assert [group.weights.num_bits for group in groups.values()] == [8, 4]


def test_rounding_of_steps_is_that_of_the_codes() -> None:
    steps = torch.linspace(-500, 500, 4001)[None]
    for scheme in (INT8, FP8_ROWS, SMALL_INT4):
        row = steps[:, : steps.shape[1] // 2 * 2]
        coded = quantization.encode(row, torch.ones(1, 1), scheme)
        assert torch.equal(quantization.round_steps(row, scheme), coded.numbers())
