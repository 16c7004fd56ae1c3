"""Projections that hold codes and scales, or tensors of another library, instead of a plain weight.

Codes are read as the form's own definition has it, in float32, and rounded once to the model's dtype. Forms that also
round their *input* as they go keep doing so where they run themselves; what is absorbed multiplies unrounded inputs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import PatchError
from mla_convert.formats import dequantize_blocks
from mla_convert.patches.forms import LINEAR, Projection, Reader, exactly, kinds, linear_of, weight_shape


def _fp8_parts(linear: Projection) -> dict[str, Tensor]:
    return {"weight": linear.weight, "weight_scale_inv": linear.weight_scale_inv}


def _read_fp8(linear: Projection) -> Tensor:
    """``code · scale`` of its block (or of the whole tensor), by this package's reader: it minds partial blocks."""
    codes: Tensor = linear.weight.detach()
    scale: Tensor = linear.weight_scale_inv.detach()
    if codes.dtype in FLOAT_DTYPES:  # FP8Linear multiplies a weight that was dequantized in place as it is
        return codes
    if codes.dtype != torch.float8_e4m3fn:
        raise PatchError(f"an FP8Linear with codes in {codes.dtype}; supported is float8_e4m3fn: load it dequantized")
    if linear.block_size is None:
        return dequantize_blocks(codes, scale.reshape(1, 1), weight_shape(codes))
    rows, columns = linear.block_size
    return dequantize_blocks(codes, scale, (rows, columns))


FP8 = Reader(
    "transformers' FP8Linear", exactly("transformers.integrations.finegrained_fp8.FP8Linear"), _fp8_parts, _read_fp8
)


def _torchao_parts(linear: Projection) -> dict[str, Tensor]:
    """The tensors inside a torchao weight, which is a tensor made of tensors."""
    weight = linear.weight
    names, _ = weight.__tensor_flatten__()
    return {"weight": weight} | {f"weight.{name}": getattr(weight, name) for name in names}


def _read_torchao(linear: Projection) -> Tensor:
    weight = linear.weight.detach()
    try:
        wide = "output_dtype" in inspect.signature(weight.dequantize).parameters
        out: Tensor = weight.dequantize(output_dtype=torch.float32) if wide else weight.dequantize()
    except (NotImplementedError, TypeError) as error:
        raise PatchError(
            f"torchao's {type(weight).__name__} has no way back to plain numbers ({error}): leave kv_b_proj out of its "
            "quantization (filter_fn of quantize_), or load the model dequantized"
        ) from error
    return out


TORCHAO = Reader(
    "torchao weights",
    linear_of("torchao.utils.TorchAOBaseTensor"),
    _torchao_parts,
    _read_torchao,
)


def _compressed_parts(linear: Projection) -> dict[str, Tensor]:
    return dict(linear.named_parameters(recurse=False)) | dict(linear.named_buffers(recurse=False))


def _read_compressed(linear: Projection) -> Tensor:
    """What the module multiplies by after its first forward, which an absorbed model never calls.

    compressed-tensors decompresses a packed weight in place before the first forward, and rounds a weight that is not
    packed yet anew in each.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from compressed_tensors.utils import get_direct_state_dict

    scheme = linear.quantization_scheme
    if linear.quantization_status == QuantizationStatus.COMPRESSED:
        kind = scheme.format or infer_module_format(type(linear), scheme)
        compressor: Any = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
        decompressed: Tensor = compressor.decompress(get_direct_state_dict(linear), scheme)["weight"]
        return decompressed.detach()
    weight: Tensor = linear.weight.detach()
    rounds = getattr(linear, "quantization_enabled", True) and scheme.weights
    if linear.quantization_status > QuantizationStatus.COMPRESSED or not rounds:
        return weight
    return forward_quantize(linear, weight, "weight", scheme.weights)  # type: ignore[no-any-return]


def _compressed_state(linear: Projection) -> Hashable:
    return str(linear.quantization_status), bool(getattr(linear, "quantization_enabled", True))


COMPRESSED = Reader(
    "compressed-tensors modules",
    lambda linear: kinds(linear)[0] == LINEAR and getattr(linear, "quantization_status", None) is not None,
    _compressed_parts,
    _read_compressed,
    state=_compressed_state,
)


def _nf4_parts(linear: Projection) -> dict[str, Tensor]:
    found, state = {"weight": linear.weight}, linear.weight.quant_state
    while state is not None:
        found[f"absmax{len(found)}"] = state.absmax
        state = state.state2 if state.nested else None
    return found


def _read_4bit(linear: Projection) -> Tensor:
    """A code of 16 values times the largest magnitude of its block, in float32."""
    from bitsandbytes import functional

    codes, state = linear.weight.data, copy.copy(linear.weight.quant_state)
    if getattr(state, "packing_format_for_cpu", False):
        # Once run on a CPU, codes lie in the order of its kernel, and the scales have lost their own quantization.
        state.original_nested = False
        codes, state = functional._convert_weight_packed_for_cpu_inverse(codes, state)
        state.absmax = state.absmax.T.reshape(-1).float()
    state.dtype = torch.float32
    return functional.dequantize_4bit(codes, state)


FOUR_BITS = Reader(
    "bitsandbytes' Linear4bit",
    lambda linear: (
        "bitsandbytes.nn.modules.Linear4bit" in kinds(linear)
        and getattr(linear.weight, "quant_state", None) is not None
    ),
    _nf4_parts,
    _read_4bit,
)


def _int8_scales(linear: Projection) -> Tensor | None:
    """One magnitude a row; it moves from the weight to the module's state in the first forward."""
    found = linear.weight.SCB if getattr(linear.weight, "SCB", None) is not None else linear.state.SCB
    return found  # type: ignore[no-any-return]


def _int8_parts(linear: Projection) -> dict[str, Tensor]:
    scales = _int8_scales(linear)
    assert scales is not None
    return {"weight": linear.weight, "SCB": scales}


def _read_8bit(linear: Projection) -> Tensor:
    """``code · scale / 127``, one scale a row."""
    scales = _int8_scales(linear)
    assert scales is not None
    return linear.weight.data.float() * (scales.float() / 127).view(-1, 1)  # type: ignore[no-any-return]


EIGHT_BITS = Reader(
    "bitsandbytes' Linear8bitLt",
    lambda linear: (
        "bitsandbytes.nn.modules.Linear8bitLt" in kinds(linear)
        and linear.weight.dtype == torch.int8
        and _int8_scales(linear) is not None
    ),
    _int8_parts,
    _read_8bit,
)


def _shard(linear: Projection) -> Tensor:
    with torch.no_grad():  # with gradients on, each call would make another view
        return linear.weight.to_local()  # type: ignore[no-any-return]


SHARD = Reader(
    "this process's shard",
    holds=linear_of("torch.distributed.tensor.DTensor"),
    parts=lambda linear: {"weight": _shard(linear)},
    read=_shard,
    shape=lambda linear: weight_shape(_shard(linear)),
)

#: Forms in which the stored numbers are codes, or are rounded to some at each call.
CODES = (FP8, COMPRESSED, TORCHAO, FOUR_BITS, EIGHT_BITS)
QUANTIZED = (SHARD, *CODES)
