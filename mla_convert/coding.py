"""From the weights of one layer to the codes that are stored: the step that requantizing adds to the pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mla_convert.architectures import LayerSpec
from mla_convert.checkpoint import Checkpoint
from mla_convert.manifest import StoredTensor
from mla_convert.products import Operands, make_whole
from mla_convert.quantization import Quantized, measure_loss, quantize, slice_fp8, slices_line_up
from mla_convert.schemes import Scheme

#: Chooses the codes of one tensor: (layer's number, key, float32 weight, scheme) to the codes and what they are called.
Rounder = Callable[[int, str, Tensor, Scheme], tuple[Quantized, str]]


def tag_of(rounder: Rounder) -> str:
    """What the codes of a rounder depend on beside the source, for telling two runs apart."""
    return str(getattr(rounder, "tag", "nearest"))


def nearest(index: int, key: str, weight: Tensor, scheme: Scheme) -> tuple[Quantized, str]:
    """The rounder that takes the nearest code."""
    return quantize(weight, scheme), "nearest"


def code_tensor(
    checkpoint: Checkpoint,
    operands: Operands,
    spec: LayerSpec,
    key: str,
    planned: StoredTensor,
    rounder: Rounder = nearest,
) -> tuple[StoredTensor, dict[str, Tensor]]:
    """The tensor stored under ``key``, coded as ``planned.scheme`` says.

    Returns ``planned`` with its error figures and the choice of its codes, and the parts to write, by full name and in
    the order of ``planned.parts``. Codes are made from float32 numbers, or taken over from an FP8 source whose blocks
    are those of the scheme and do not cross its slices.
    """
    assert planned.scheme is not None
    coded = _sliced(checkpoint, spec, key, planned.scheme)
    if coded is not None:
        return dataclasses.replace(planned, rounding="sliced"), _named(planned, coded)
    weight = make_whole(operands, spec.geometry, key, torch.float32)
    coded, rounding = rounder(spec.index, key, weight, planned.scheme)
    loss = measure_loss(weight, coded)
    figures = {"largest_error": loss.largest, "frobenius_error": loss.frobenius, "rounding": rounding}
    return dataclasses.replace(planned, **figures), _named(planned, coded)  # type: ignore[arg-type]


def takes_over(checkpoint: Checkpoint, spec: LayerSpec, key: str, scheme: Scheme) -> bool:
    """Whether codes and scales are taken over from the source as they are."""
    source = checkpoint.scheme(spec.kv_b)
    if key not in ("k_b", "v_b") or source is None or not source.is_fp8:
        return False
    return slices_line_up(source.block, scheme, spec.geometry)


def _sliced(checkpoint: Checkpoint, spec: LayerSpec, key: str, scheme: Scheme) -> Quantized | None:
    if not takes_over(checkpoint, spec, key, scheme):
        return None
    (scale_name,) = checkpoint.companions(spec.kv_b)
    scale = checkpoint.read(scale_name).reshape(scheme.grid(spec.geometry.kv_b_shape))
    return slice_fp8(checkpoint.read(spec.kv_b), scale, spec.geometry, keys=key == "k_b")


def _named(planned: StoredTensor, coded: Quantized) -> dict[str, Tensor]:
    parts = coded.parts()
    return {part.name: parts[part.name.rpartition(".")[2]] for part in planned.parts}
