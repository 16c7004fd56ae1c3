"""The forms in which weights are stored as codes: a row each, with the tensors that belong together and a reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mla_convert import library_readers, readers
from mla_convert.formats import FP8, SCALE_DTYPES
from mla_convert.readers import Codes
from mla_convert.source_schemes import CHANNEL, TENSOR, SourceScheme

Shape = tuple[int, ...]
#: Shapes that a tensor may have, for a weight of a shape [rows, columns] under a scheme.
Shapes = Callable[[Shape, SourceScheme], list[Shape]]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor that goes with the codes: its suffixes (one of them is there), dtypes, and shapes; any where empty."""

    suffixes: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: Shapes | None = None
    needed: Callable[[SourceScheme], bool] = lambda scheme: True


@dataclasses.dataclass(frozen=True)
class Format:
    """A way of storing a weight: the tensor with its codes, the parts beside it, its shape, and who reads it.

    ``shape`` is the weight's, from that of the codes and, where they leave it open, from the one that is expected.
    """

    codes: str
    dtypes: tuple[torch.dtype, ...]
    parts: tuple[Part, ...]
    read: Callable[[Codes, torch.dtype], Tensor]
    shape: Callable[[Shape, SourceScheme, Shape | None], Shape] = lambda stored, scheme, expected: stored


def _optional(scheme: SourceScheme) -> bool:
    return False


def asymmetric(scheme: SourceScheme) -> bool:
    """Whether codes count from a zero point of their own, which is stored beside them."""
    return not scheme.symmetric


def _grid(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    """A scale for each block; one for a row or for all may have fewer dimensions."""
    rows, down_across = shape[0], scheme.grid(shape)
    if scheme.block == TENSOR:
        return [(), (1,), (1, 1)]
    return [(rows, 1), (rows,)] if scheme.block == CHANNEL else [down_across]


def _tensor_or_rows(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    """As ModelOpt, SGLang and vLLM store them: without blocks the shape itself says whose scale it is."""
    if scheme.block in (TENSOR, CHANNEL):
        return [(shape[0], 1), (shape[0],), (), (1,), (1, 1)]
    down, across = scheme.grid(shape)
    return [(down, across), (down, 1, across, 1)]


def _packed_zeros(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    rows, across = shape[0], scheme.grid(shape)[1]
    return [(-(-rows * scheme.bits // 32), across), (rows, across)]


def _one(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    return [(), (1,)]


def _transposed_grid(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    rows, across = shape[0], scheme.grid(shape)[1]
    return [(across, rows)]


def _transposed_zeros(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    rows, across = shape[0], scheme.grid(shape)[1]
    return [(across, rows * scheme.bits // 32)]


def _columns(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    return [(shape[1],)]


def _pair(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    return [(2,)]


def _rows(shape: Shape, scheme: SourceScheme) -> list[Shape]:
    return [(shape[0],)]


def _dense(stored: Shape, scheme: SourceScheme, expected: Shape | None) -> Shape:
    """Densely packed columns: the expected number where it takes as many int32."""
    rows, words = stored
    if expected is not None and len(expected) == 2 and expected[0] == rows:
        if -(-expected[1] * scheme.bits // 32) == words:
            return expected
    return rows, words * 32 // scheme.bits


def _expected(stored: Shape, scheme: SourceScheme, expected: Shape | None) -> Shape:
    return stored if expected is None else expected


_SCALE = Part(("weight_scale",), _FLOATS, _grid)
_ZERO = Part(("weight_zero_point",), (torch.int8,), _grid, asymmetric)
_GROUP_SCALE = Part(("weight_scale",), (FP8,), _grid)
_SCALED = Part(("weight_scale_inv", "weight_scale"), SCALE_DTYPES, _tensor_or_rows)
_SCALES = Part(("scales",), _FLOATS, _transposed_grid)

#: Every form that is read, by the name that a :class:`SourceScheme` gives.
FORMATS: dict[str, Format] = {
    "float8": Format("weight", (FP8,), (_SCALED,), readers.scaled),
    "int8": Format("weight", (torch.int8,), (_SCALED,), readers.scaled),
    "float-quantized": Format("weight", (FP8,), (_SCALE,), readers.quantized),
    "int-quantized": Format("weight", (torch.int8,), (_SCALE, _ZERO), readers.quantized),
    "pack-quantized": Format(
        "weight_packed",
        (torch.int32,),
        (
            _SCALE,
            Part(("weight_shape",), (torch.int64, torch.int32), _pair),
            Part(("weight_zero_point",), (torch.int32, torch.int8), _packed_zeros, asymmetric),
            Part(("weight_g_idx",), (torch.int32, torch.int64), _columns, _optional),
        ),
        readers.packed,
        _dense,
    ),
    "nvfp4-pack-quantized": Format(
        "weight_packed",
        (torch.uint8,),
        (_GROUP_SCALE, Part(("weight_global_scale",), (torch.float32,), _one)),
        readers.nvfp4,
        lambda stored, scheme, expected: (stored[0], 2 * stored[1]),
    ),
    "modelopt-nvfp4": Format(
        "weight",
        (torch.uint8,),
        (_GROUP_SCALE, Part(("weight_scale_2",), (torch.float32,), _one)),
        readers.nvfp4,
        lambda stored, scheme, expected: (stored[0], 2 * stored[1]),
    ),
    "awq": Format(
        "qweight",
        (torch.int32,),
        (_SCALES, Part(("qzeros",), (torch.int32,), _transposed_zeros, asymmetric)),
        readers.awq,
        lambda stored, scheme, expected: (8 * stored[1], stored[0]),
    ),
    "gptq": Format(
        "qweight",
        (torch.int32,),
        (
            _SCALES,
            Part(("qzeros",), (torch.int32,), _transposed_zeros),
            Part(("g_idx",), (torch.int32, torch.int64), _columns, _optional),
        ),
        readers.gptq,
        lambda stored, scheme, expected: (stored[1], stored[0] * 32 // scheme.bits),
    ),
    "torchao": Format(
        "_weight_qdata", (), (Part(("_weight_*",), needed=_optional),), library_readers.torchao, _expected
    ),
    "bitsandbytes-4bit": Format(
        "weight",
        (torch.uint8,),
        (
            Part(("weight.absmax",)),
            Part(("weight.quant_map",)),
            Part(("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")),
            Part(("weight.nested_absmax",), needed=_optional),
            Part(("weight.nested_quant_map",), needed=_optional),
        ),
        library_readers.bnb_4bit,
        _expected,
    ),
    "bitsandbytes-int8": Format(
        "weight",
        (torch.int8,),
        (Part(("SCB",), _FLOATS, _rows), Part(("weight_format",), needed=_optional)),
        library_readers.bnb_int8,
    ),
}
