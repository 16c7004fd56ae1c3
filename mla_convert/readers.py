"""From stored codes to numbers: one function for each way of storing them, all in float32 and rounded once.

In the table ``s`` is a scale, ``z`` a zero point, and ``g`` the group that column j belongs to: ``j // group size``,
the last one perhaps partial, unless an index ``g_idx`` says otherwise.

====================== ==============================================================================================
format                 weight[i, j]
====================== ==============================================================================================
float8, int8           ``code[i, j] · s[block of (i, j)]``
float-, int-quantized  ``(code[i, j] − z[block]) · s[block]``, by compressed-tensors
pack-quantized         ``(code[i, j] − z[i, g]) · s[i, g]``, by compressed-tensors unless there is a ``g_idx``; codes
                       and zero points are signed, stored plus ``2 ** (bits − 1)``, densely in int32 from the lowest
                       bits on: codes along the columns, zero points along the rows
nvfp4-pack-quantized   ``e2m1[i, j] · s[i, g] / global``, by compressed-tensors; two codes a byte, the first in the low
                       half
modelopt-nvfp4         ``e2m1[i, j] · s[i, g] · s2``, packed alike; ``s2`` is what compressed-tensors stores inverted
awq                    ``(code − z[g]) · s[g]`` of the transpose, ``qweight`` [columns, rows / 8]: eight rows in an
                       int32, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on, in ``qzeros`` too
gptq                   ``(code − z[g]) · s[g]`` of the transpose, ``qweight`` [columns / 8, rows]: eight columns in an
                       int32, the first in the lowest bits; ``qzeros`` has ``z − 1`` modulo 16 (in gptq_v2 ``z``)
bitsandbytes-int8      ``code[i, j] · SCB[i] / 127``
bitsandbytes-4bit      by bitsandbytes
torchao                by torchao
====================== ==============================================================================================

compressed-tensors, bitsandbytes and torchao are imported when first needed: importing them takes seconds.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import FormatError
from mla_convert.formats import count_nonfinite, decode_scale, dequantize_blocks, refuse_nonfinite, refuse_overflow
from mla_convert.source_schemes import CHANNEL, TENSOR, SourceScheme

#: Where column c of eight stands in an int32 of AWQ, counted in codes from the lowest bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_SLAB = 256


@dataclasses.dataclass(frozen=True)
class Codes:
    """A weight as it was read: its tensors by the last words of their names, its scheme, and its shape.

    ``metadata`` is what the safetensors files say of themselves.
    """

    name: str
    shape: tuple[int, ...]
    scheme: SourceScheme
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def scale(self, *suffixes: str, may_be_zero: bool = False) -> Tensor:
        """The scale under one of the suffixes, in float32."""
        suffix = next(each for each in suffixes if each in self.tensors)
        return decode_scale(self.tensors[suffix], name=self.called(suffix), may_be_zero=may_be_zero)

    def called(self, suffix: str) -> str:
        """Full name of one of the tensors."""
        return f"{self.name.removesuffix('weight')}{suffix}"


def scaled(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``float8`` and ``int8``: a scale for each block, row, or the whole tensor."""
    suffix = "weight_scale_inv" if "weight_scale_inv" in codes.tensors else "weight_scale"
    scale = codes.tensors[suffix]
    rows, columns = codes.shape
    block = codes.scheme.sizes(codes.shape)
    if codes.scheme.block in (TENSOR, CHANNEL):
        each = rows if scale.numel() == 1 else 1
        block = (min(each, _SLAB), columns)
        scale = scale.reshape(-1, 1).expand(-(-rows // block[0]), 1)
    elif scale.dim() == 4:  # ModelOpt: [down, 1, across, 1]
        scale = scale[:, 0, :, 0]
    return dequantize_blocks(
        codes.tensors["weight"], scale, block, dtype, name=codes.name, scale_name=codes.called(suffix)
    )


def quantized(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``float-quantized`` and ``int-quantized``."""
    zero = None if codes.scheme.symmetric else codes.tensors["weight_zero_point"]
    return finish(codes, _by_compressed_tensors(codes, codes.tensors["weight"], zero), dtype)


def packed(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``pack-quantized``: ``weight_shape`` [2] is the weight's, and must be the one that is expected."""
    said = tuple(codes.tensors["weight_shape"].tolist())
    if said != codes.shape:
        raise FormatError(
            f"{codes.called('weight_shape')} is {list(said)}, and {codes.name} has shape {list(codes.shape)}; the "
            "checkpoint is damaged, or of another config: fetch it again"
        )
    unpack = library("compressed_tensors.compressors").unpack_from_int32
    bits = codes.scheme.bits
    values = unpack(codes.tensors["weight_packed"], bits, torch.Size(said))
    zero = None if codes.scheme.symmetric else codes.tensors["weight_zero_point"]
    if zero is not None and zero.dtype == torch.int32:
        zero = unpack(zero, bits, torch.Size(codes.scheme.grid(said)), packed_dim=0)
    index = codes.tensors.get("weight_g_idx")
    if index is None or bool((index == -1).all()):
        return finish(codes, _by_compressed_tensors(codes, values, zero), dtype)
    scale = codes.scale("weight_scale", may_be_zero=True)
    return finish(codes, _affine(values, scale, zero, _checked_index(codes, "weight_g_idx", scale.shape[1])), dtype)


def nvfp4(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``nvfp4-pack-quantized``, and ``modelopt-nvfp4`` with ``weight_scale_2``."""
    stored = codes.tensors["weight_packed" if "weight_packed" in codes.tensors else "weight"]
    rows, columns = codes.shape
    unpack = library("compressed_tensors.compressors").unpack_fp4_from_uint8
    values = unpack(stored, rows, columns, dtype=torch.float32)
    if "weight_scale_2" not in codes.tensors:
        return finish(codes, _by_compressed_tensors(codes, values, None), dtype)
    # The product of a code and a group's scale is exact, so that only the last factor rounds.
    weight = _affine(values, codes.scale("weight_scale", may_be_zero=True), None, _groups(codes))
    weight *= codes.scale("weight_scale_2").reshape(())
    return finish(codes, weight, dtype)


def awq(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``awq`` in the layout of its GEMM kernels."""
    values = _unpack(codes.tensors["qweight"], 4, _AWQ_PLACES).T
    zero = None if codes.scheme.symmetric else _unpack(codes.tensors["qzeros"], 4, _AWQ_PLACES).T
    if zero is None:
        values = values.to(torch.int16) - 8
    scale = codes.scale("scales", may_be_zero=True).T
    return finish(codes, _affine(values, scale, zero, _groups(codes)), dtype)


def gptq(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``gptq``: the order of ``g_idx``, where it is there and filled in."""
    bits = codes.scheme.bits
    values = _unpack(codes.tensors["qweight"].T, bits)
    zero = _unpack(codes.tensors["qzeros"], bits).T
    zero = (zero + codes.scheme.zero_offset) & ((1 << bits) - 1)
    scale = codes.scale("scales", may_be_zero=True).T
    index = codes.tensors.get("g_idx")
    # All zeros with several groups is what is stored where no order was made.
    trivial = index is None or (scale.shape[1] > 1 and not bool(index.any()))
    groups = _groups(codes) if trivial else _checked_index(codes, "g_idx", scale.shape[1])
    return finish(codes, _affine(values, scale, zero, groups), dtype)


def finish(codes: Codes, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``, after the checks that every weight goes through."""
    if tuple(weight.shape) != codes.shape:
        raise FormatError(
            f"{codes.name} is stored as a weight of shape {list(weight.shape)}; expected is {list(codes.shape)}: take "
            "the config.json that belongs to the checkpoint"
        )
    refuse_nonfinite(codes.name, count_nonfinite(weight), weight.numel(), weight.dtype)
    out = weight.to(dtype).contiguous()
    refuse_overflow(codes.name, count_nonfinite(out), out.numel(), dtype)
    return out


def _by_compressed_tensors(codes: Codes, values: Tensor, zero: Tensor | None) -> Tensor:
    """compressed-tensors' own arithmetic, in float32; groups that do not fill the last one are filled for it."""
    quantization = library("compressed_tensors.quantization")
    dequantize = library("compressed_tensors.quantization.lifecycle.forward").dequantize
    scheme, columns = codes.scheme, codes.shape[1]
    what: dict[str, Any] = {TENSOR: {"strategy": "tensor"}, CHANNEL: {"strategy": "channel"}}.get(scheme.block, {})
    grouped = not what and scheme.block[0] == 1
    if grouped:
        nested = "weight_global_scale" in codes.tensors
        what = {"strategy": "tensor_group" if nested else "group", "group_size": scheme.block[1]}
        values = torch.nn.functional.pad(values, (0, -columns % scheme.sizes(codes.shape)[1]))
    elif not what:
        what = {"strategy": "block", "block_structure": list(scheme.block)}
    kind = "float" if values.is_floating_point() else "int"
    arguments = quantization.QuantizationArgs(num_bits=scheme.bits, type=kind, symmetric=scheme.symmetric, **what)
    overall = codes.scale("weight_global_scale") if "weight_global_scale" in codes.tensors else None
    scale = codes.scale("weight_scale", may_be_zero=True)
    weight: Tensor = dequantize(values, scale, zero, arguments, dtype=torch.float32, global_scale=overall)
    return weight[:, :columns]


def _affine(values: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor) -> Tensor:
    """``(values − zero) · scale``: ``scale`` and ``zero`` [rows, groups], ``index`` [columns] the group of a column."""
    out = torch.empty(values.shape, dtype=torch.float32)
    for start in range(0, len(values), _SLAB):
        at = slice(start, start + _SLAB)
        wide = values[at].to(torch.float32)
        if zero is not None:
            wide = wide - zero[at].to(torch.float32)[:, index]
        torch.mul(wide, scale[at][:, index], out=out[at])
    return out


def _groups(codes: Codes) -> Tensor:
    return torch.arange(codes.shape[1]) // codes.scheme.sizes(codes.shape)[1]


def _checked_index(codes: Codes, suffix: str, groups: int) -> Tensor:
    index = codes.tensors[suffix].long()
    outside = int(((index < 0) | (index >= groups)).sum())
    if outside:
        raise FormatError(
            f"{codes.called(suffix)} puts {outside} of {len(index)} columns into groups outside the {groups} that "
            "there are; the checkpoint is damaged, fetch it again"
        )
    return index


def _unpack(stored: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Codes [.., columns · 32 / bits] as uint8 from int32 [.., columns]; ``places`` says where each of eight stands."""
    order = torch.tensor(places or range(32 // bits), dtype=torch.int32)
    spread = (stored.unsqueeze(-1) >> (order * bits)) & ((1 << bits) - 1)
    return spread.to(torch.uint8).flatten(-2)


def library(module: str) -> Any:
    """A module of one of the libraries that read their own formats; FormatError where it is not installed."""
    package = module.partition(".")[0].replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FormatError(
            f"weights that {package} has stored are read by {package} itself, which cannot be imported here ({error}): "
            f"pip install {package}"
        ) from error
