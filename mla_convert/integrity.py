"""Checks of a whole checkpoint that need headers and config only; each names what it found and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mla_convert.architectures import LayerSpec
from mla_convert.errors import CheckpointError, FormatError
from mla_convert.folders import Stored
from mla_convert.formats import CODES, PLAIN_DTYPES, plain
from mla_convert.quantized import QuantizedWeight
from mla_convert.source_schemes import Quantization


def check_layers(
    tensors: Mapping[str, Stored],
    quantized: Mapping[str, QuantizedWeight],
    quantization: Quantization | None,
    layers: Iterable[LayerSpec],
) -> None:
    """Every layer has its attention weights, in the shapes of the config, in a form that can be read, without bias."""
    for layer in layers:
        shapes = layer.shapes()
        missing = [name for name in shapes if name not in tensors and name not in quantized]
        if missing and quantization is not None and quantization.unreadable:
            raise FormatError(f"{missing[0]} is not among the plain weights: {quantization.unreadable}")
        if missing:
            raise CheckpointError(
                f"layer {layer.index} lacks {', '.join(missing)}; the checkpoint is not whole, or not one of "
                f"{layer.family.model_type} with this config: fetch it again, or take the config that belongs to it"
            )
        for name, shape in shapes.items():
            if name in quantized:
                _check_shape(name, quantized[name].shape, shape)
            else:
                _check_plain(tensors[name], shape, quantization)
        for name in (layer.kv_b, layer.query):
            _refuse_bias(tensors, name)


def _check_shape(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise CheckpointError(
            f"{name} has shape {list(found)}; the config makes it {list(shape)}: take the config.json that belongs to "
            "the checkpoint"
        )


def _check_plain(tensor: Stored, shape: tuple[int, ...], quantization: Quantization | None) -> None:
    if tensor.dtype not in PLAIN_DTYPES and quantization is not None and quantization.unreadable:
        raise FormatError(f"{tensor.name} is stored in {plain(tensor.dtype)}: {quantization.unreadable}")
    _check_shape(tensor.name, tensor.shape, shape)
    if tensor.dtype not in PLAIN_DTYPES:
        supported = ", ".join(plain(dtype) for dtype in (*PLAIN_DTYPES, *CODES))
        raise FormatError(
            f"{tensor.name} is stored in {plain(tensor.dtype)}; supported are {supported}, the last two with a scale "
            "and a quantization_config that says so"
        )


def _refuse_bias(tensors: Mapping[str, Stored], weight: str) -> None:
    bias = weight.removesuffix("weight") + "bias"
    if bias in tensors:
        raise CheckpointError(
            f"the checkpoint has {bias}; the supported families have none there, and transformers would leave it out: "
            "this is another architecture"
        )
