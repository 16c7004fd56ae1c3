"""Checks of a whole checkpoint that need headers and config only; each names what it found and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mla_convert.architectures import LayerSpec
from mla_convert.errors import CheckpointError, FormatError
from mla_convert.folders import Stored
from mla_convert.formats import FP8, PLAIN_DTYPES, SCALE_DTYPES, SCALE_SUFFIX, Fp8Blocks, check_grid, plain


def check_layers(tensors: Mapping[str, Stored], layers: Iterable[LayerSpec]) -> None:
    """Every layer has its attention weights, in the shapes of the config, in a dtype that can be read, without bias."""
    for layer in layers:
        shapes = layer.shapes()
        missing = [name for name in shapes if name not in tensors]
        if missing:
            raise CheckpointError(
                f"layer {layer.index} lacks {', '.join(missing)}; the checkpoint is not whole, or not one of "
                f"{layer.family.model_type} with this config: fetch it again, or take the config that belongs to it"
            )
        for name, shape in shapes.items():
            _check_weight(tensors[name], shape)
        for name in (layer.kv_b, layer.query):
            _refuse_bias(tensors, name)


def _check_weight(tensor: Stored, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}; the config makes it {list(shape)}: "
            "take the config.json that belongs to the checkpoint"
        )
    if tensor.dtype not in (*PLAIN_DTYPES, FP8):
        supported = ", ".join(plain(dtype) for dtype in (*PLAIN_DTYPES, FP8))
        raise FormatError(f"{tensor.name} is stored in {plain(tensor.dtype)}; supported are {supported}")


def _refuse_bias(tensors: Mapping[str, Stored], weight: str) -> None:
    bias = weight.removesuffix("weight") + "bias"
    if bias in tensors:
        raise CheckpointError(
            f"the checkpoint has {bias}; the supported families have none there, and transformers would leave it out: "
            "this is another architecture"
        )


def check_scales(tensors: Mapping[str, Stored], blocks: Fp8Blocks | None) -> None:
    """Each FP8 weight has a scale of the right grid and dtype, and no other tensor has one."""
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            _check_owner(tensors, tensor)
        elif tensor.dtype == FP8:
            _check_scale(tensors, tensor, blocks)


def _check_owner(tensors: Mapping[str, Stored], scale: Stored) -> None:
    weight = tensors.get(scale.name.removesuffix(SCALE_SUFFIX))
    if weight is None:
        raise FormatError(f"{scale.name} has no weight beside it; the checkpoint is not whole: fetch it again")
    if weight.dtype != FP8:
        raise FormatError(
            f"{scale.name} is surplus: {weight.name} is stored in {plain(weight.dtype)}, not in float8_e4m3fn; if the "
            "weight was dequantized already, remove its scale"
        )


def _check_scale(tensors: Mapping[str, Stored], weight: Stored, blocks: Fp8Blocks | None) -> None:
    if blocks is None:
        raise FormatError(
            f"{weight.name} is stored in float8_e4m3fn, but the config has no quantization_config with a "
            "weight_block_size; take the config.json that belongs to the checkpoint"
        )
    scale = tensors.get(weight.name + SCALE_SUFFIX)
    if scale is None:
        raise FormatError(
            f"{weight.name} is stored in float8_e4m3fn, but its scale {weight.name}{SCALE_SUFFIX} is missing: without "
            "it the codes mean nothing; fetch the checkpoint again"
        )
    if scale.dtype not in SCALE_DTYPES:
        supported = ", ".join(plain(dtype) for dtype in SCALE_DTYPES)
        raise FormatError(f"{scale.name} is stored in {plain(scale.dtype)}; supported are {supported}")
    _check_block_boundaries(weight, blocks)
    check_grid(weight.name, weight.shape, weight.dtype, scale.shape, blocks.block_size)


def _check_block_boundaries(weight: Stored, blocks: Fp8Blocks) -> None:
    if weight.axis is None:
        return
    block = blocks.block_size[weight.axis]
    cut = [piece for piece in weight.pieces[:-1] if piece.shape[weight.axis] % block]
    if cut:
        raise FormatError(
            f"{weight.name} has {cut[0].shape[weight.axis]} of its {weight.shape[weight.axis]} "
            f"{'columns' if weight.axis else 'rows'} in {cut[0].file.name}, which is no multiple of the block size "
            f"{block}: the parts' scales do not join into one grid. Use the checkpoint in Hugging Face form"
        )
