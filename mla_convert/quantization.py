"""Requantize absorbed weights: float32 numbers to codes and scales and back, rounding to the nearest code.

The table of :mod:`mla_convert.schemes` says what the codes mean. Scales are a block's largest magnitude over the reach
of the codes, so that rounding is off by at most half a step: half a scale for integers, and for FP8 half the distance
of its neighbours, ``max(|w| · 2⁻⁴, scale · 2⁻¹⁰)``. Codes are always made from float32 numbers, never from the codes of
another grid; where the blocks of an FP8 source are the blocks wanted, :func:`slice_fp8` takes codes and scales over as
they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mla_convert.errors import FormatError, SidecarError
from mla_convert.formats import FP8, count_nonfinite, decode_scale
from mla_convert.geometry import MLAGeometry
from mla_convert.schemes import FP8_BLOCKS, REACH, Scheme

_LIMITS = {"int8": (-128, 127), "int4": (-8, 7)}
_FP8_LARGEST = 448.0


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A coded weight [rows, columns]: the codes, and float32 scales on the scheme's grid.

    ``codes`` are int8 [rows, columns]; for fp8 uint8 [rows, columns], each the byte of a float8_e4m3fn; for int4 uint8
    [rows, columns / 2], the even column in the low four bits, plus 8.
    """

    codes: Tensor
    scales: Tensor
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the weight."""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.scheme.kind == "int4" else 1)

    def numbers(self) -> Tensor:
        """What the codes stand for, before scaling: float32 [rows, columns]."""
        if self.scheme.kind == "int4":
            return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2).to(torch.float32) - 8
        codes = self.codes.view(FP8) if self.scheme.kind == "fp8" else self.codes
        return codes.to(torch.float32)

    def dequantize(self) -> Tensor:
        """The weight in float32, multiplied in float32."""
        return self.numbers().mul_(expand(self.scales, self.scheme, self.shape))

    def parts(self) -> dict[str, Tensor]:
        """What is stored, by the last word of its name, as :meth:`Scheme.parts` plans it."""
        if self.scheme.kind == "int4":
            packed = self.codes.contiguous().view(torch.int32)
            shape = torch.tensor(self.shape, dtype=torch.int64)
            return {"weight_packed": packed, "weight_scale": self.scales, "weight_shape": shape}
        codes = self.codes.view(FP8) if self.scheme.kind == "fp8" else self.codes
        return {"weight": codes, "weight_scale": self.scales}

    @classmethod
    def from_parts(cls, name: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, ...]) -> Quantized:
        """The weight from what :meth:`parts` gave; SidecarError, naming ``name``, where that does not fit together."""
        scales = parts["weight_scale"]
        if not bool(((scales > 0) & torch.isfinite(scales)).all()):
            raise SidecarError(f"{name}_scale has values that are not positive numbers; the file is damaged")
        if scheme.kind == "int4":
            stored = tuple(parts["weight_shape"].tolist())
            if stored != tuple(shape):
                raise SidecarError(f"{name}_shape says {list(stored)}, the manifest {list(shape)}; the file is damaged")
            return cls(parts["weight_packed"].view(torch.uint8), scales, scheme)
        codes = parts["weight"]
        if scheme.kind == "fp8":
            if count_nonfinite(codes):
                raise SidecarError(f"{name} has codes that are not numbers; the file is damaged")
            codes = codes.view(torch.uint8)
        return cls(codes, scales, scheme)


def quantize(weight: Tensor, scheme: Scheme, scales: Tensor | None = None, *, name: str = "weight") -> Quantized:
    """Code ``weight`` [rows, columns] float32 in ``scheme``: the nearest codes under ``scales`` (:func:`find_scales`).

    FormatError where a value is not finite; UsageError where the columns do not divide into groups.
    """
    scheme.check(name, tuple(weight.shape))
    bad = count_nonfinite(weight)
    if bad:
        raise FormatError(f"{name}: the product of its source weights has {bad} values that are not finite")
    scales = find_scales(weight, scheme) if scales is None else scales
    return encode(weight / expand(scales, scheme, tuple(weight.shape)), scales, scheme)


def encode(steps: Tensor, scales: Tensor, scheme: Scheme) -> Quantized:
    """Codes nearest to ``steps``, the weight [rows, columns] in units of its scales."""
    if scheme.kind == "fp8":
        codes = steps.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(FP8).view(torch.uint8)
        return Quantized(codes, scales, scheme)
    codes = steps.round().clamp_(*_LIMITS[scheme.kind]).to(torch.int8)
    if scheme.kind == "int4":
        nibbles = (codes + 8).view(torch.uint8)
        codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return Quantized(codes, scales, scheme)


def round_steps(steps: Tensor, scheme: Scheme) -> Tensor:
    """The number of the code nearest to each of ``steps``, any shape, float32."""
    if scheme.kind == "fp8":
        return steps.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(FP8).to(torch.float32)
    return steps.round().clamp_(*_LIMITS[scheme.kind])


def find_scales(weight: Tensor, scheme: Scheme) -> Tensor:
    """Each block's largest magnitude over the codes' reach, float32 on the scheme's grid; 1 for blocks of zeros."""
    largest = tiles(weight.abs(), scheme).amax(dim=(1, 3))
    scales = (largest / REACH[scheme.kind]).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.where(largest > 0, scales, 1.0)


def tiles(weight: Tensor, scheme: Scheme) -> Tensor:
    """The blocks of a weight [rows, columns] as [down, rows of a block, across, columns of a block], zeros at edges."""
    rows, columns = scheme.blocks(weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def expand(scales: Tensor, scheme: Scheme, shape: tuple[int, ...]) -> Tensor:
    """Each element's scale; [rows, columns], or a shape that broadcasts to it."""
    rows, columns = scheme.blocks(shape[1])
    each_row = scales if rows == 1 else scales.repeat_interleave(rows, 0)[: shape[0]]
    return each_row if scheme.by_row else each_row.repeat_interleave(columns, 1)[:, : shape[1]]


def slices_line_up(blocks: tuple[int | None, int | None] | None, scheme: Scheme, g: MLAGeometry) -> bool:
    """Whether ``kv_b_proj`` in FP8 ``blocks`` falls apart into key and value slices that keep whole blocks.

    N and V must be multiples of the block's rows; and the source's blocks those of the scheme.
    """
    if blocks is None or scheme != FP8_BLOCKS or blocks != scheme.block:
        return False
    return g.qk_nope_head_dim % scheme.block[0] == 0 and g.v_head_dim % scheme.block[0] == 0


def slice_fp8(codes: Tensor, scale: Tensor, g: MLAGeometry, *, keys: bool) -> Quantized:
    """The key (or value) rows of ``kv_b_proj`` in FP8 blocks of 128×128, codes and scales taken over as they are.

    ``codes`` [H·(N + V), C] float8_e4m3fn, ``scale`` as stored [H·(N + V) / 128, ceil(C / 128)]; for layers that
    :func:`slices_line_up` accepts.
    """
    rows = FP8_BLOCKS.block[0]
    sizes = (g.qk_nope_head_dim, g.v_head_dim)

    def take(tensor: Tensor, per: int) -> Tensor:
        n, v = sizes[0] // per, sizes[1] // per
        heads = tensor.reshape(g.num_heads, n + v, tensor.shape[1])
        return (heads[:, :n] if keys else heads[:, n:]).flatten(0, 1).contiguous()

    return Quantized(take(codes.view(torch.uint8), 1), take(decode_scale(scale), rows), FP8_BLOCKS)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What coding a tensor cost, against its float32 reference.

    ``largest`` is the largest difference over the largest magnitude, ``frobenius`` the norm of the difference over the
    norm; both are 0 where codes were taken over from the source.
    """

    largest: float
    frobenius: float

    @property
    def signal_to_noise(self) -> float:
        """−20·log10 of ``frobenius``, in decibels; infinite where nothing was lost."""
        return signal_to_noise(self.frobenius)


def signal_to_noise(frobenius: float) -> float:
    """−20·log10 of a relative error, in decibels; infinite for 0."""
    return -20 * math.log10(frobenius) if frobenius else math.inf


def measure_loss(weight: Tensor, coded: Quantized) -> Loss:
    """Compare ``coded`` with the float32 ``weight`` it was made from."""
    error = coded.dequantize().sub_(weight)
    largest = float(weight.abs().max())
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    return Loss(
        float(error.abs().max()) / largest if largest else 0.0,
        float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm if norm else 0.0,
    )
