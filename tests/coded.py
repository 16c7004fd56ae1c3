"""Weights in every form of codes, each from its definition: random codes and scales, how they are stored, their values.

A form is a row of :data:`FORMS`. Its function draws a weight [rows, columns] and gives the tensors that a checkpoint
would hold, by the last words of their names, and the values that they mean, computed in float64 by the formula.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from variants import Tensors, attention_weights, config_v3, fp8_config, write_checkpoint

Drawn = tuple[Tensors, Tensor]
FP8 = torch.float8_e4m3fn
#: Values of the four bits of an FP4 number: sign, two bits of exponent, one of mantissa.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(shape: tuple[int, ...], low: int, high: int, seed: int) -> Tensor:
    """Whole numbers from low to high, both drawn."""
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def scales(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, size: float = 0.02) -> Tensor:
    return ((torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5) * size).to(dtype)


def fp8_codes(shape: tuple[int, ...], seed: int) -> Tensor:
    """FP8 numbers of moderate size, NaN never."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).to(FP8)


def pack_bits(rows: list[list[int]], bits: int) -> Tensor:
    """Unsigned codes of each row as one long number, lowest bits first, cut into int32."""
    words = []
    for row in rows:
        number = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words.append([(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)])
    return torch.tensor([[word - (1 << 32) if word >> 31 else word for word in row] for row in words]).to(torch.int32)


def expand(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Each element's scale in float64: ``scale[i // rows, j // columns]``."""
    i, j = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scale.double()[i[:, None], j[None, :]]


def groups(columns: int, size: int) -> int:
    return -(-columns // size)


def fp8_blocks(block: tuple[int, int], suffix: str, dtype: torch.dtype = torch.float32) -> Any:
    def draw(shape: tuple[int, int], seed: int) -> Drawn:
        codes = fp8_codes(shape, seed)
        scale = scales((groups(shape[0], block[0]), groups(shape[1], block[1])), seed + 1, dtype)
        return {"weight": codes, suffix: scale}, codes.double() * expand(scale, block, shape)

    return draw


def exponents(shape: tuple[int, int], seed: int) -> Drawn:
    """FP8 in blocks of 16 × 16 whose scales are bytes b that mean 2 ** (b − 127)."""
    codes = fp8_codes(shape, seed)
    stored = integers((groups(shape[0], 16), groups(shape[1], 16)), 118, 122, seed + 1)
    tensors = {"weight": codes, "weight_scale_inv": stored.to(torch.uint8)}
    return tensors, codes.double() * expand(2.0 ** (stored.double() - 127), (16, 16), shape)


def by_row(kind: torch.dtype, shape_of: Callable[[int], tuple[int, ...]], dtype: torch.dtype) -> Any:
    """A scale for each row, or for the whole weight where ``shape_of(rows)`` has one element."""

    def draw(shape: tuple[int, int], seed: int) -> Drawn:
        codes = fp8_codes(shape, seed) if kind == FP8 else integers(shape, -127, 127, seed).to(torch.int8)
        scale = scales(shape_of(shape[0]), seed + 1, dtype, 0.02 if kind == FP8 else 0.001)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
        return tensors, codes.double() * scale.double().reshape(-1, 1)

    return draw


def int8_zero_points(shape: tuple[int, int], seed: int) -> Drawn:
    codes, zero = integers(shape, -128, 127, seed), integers((shape[0], 1), -9, 9, seed + 2)
    scale = scales((shape[0], 1), seed + 1, torch.bfloat16, 0.001)
    tensors = {
        "weight": codes.to(torch.int8),
        "weight_scale": scale,
        "weight_zero_point": zero.to(torch.int8),
    }
    return tensors, (codes - zero).double() * scale.double()


def packed(bits: int, size: int | None, *, symmetric: bool = True, order: bool = False) -> Any:
    """compressed-tensors' int32: signed codes plus half their range; groups of ``size``, or rows where None."""

    def draw(shape: tuple[int, int], seed: int) -> Drawn:
        rows, columns = shape
        half, across = 1 << (bits - 1), 1 if size is None else groups(columns, size)
        codes = integers(shape, -half, half - 1, seed)
        zero = (
            integers((rows, across), -half, half - 1, seed + 2) if not symmetric else torch.zeros(rows, across).long()
        )
        scale = scales((rows, across), seed + 1, torch.bfloat16)
        group = torch.arange(columns) // (size or columns)
        tensors = {
            "weight_packed": pack_bits((codes + half).tolist(), bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:  # packed along the rows
            tensors["weight_zero_point"] = pack_bits((zero + half).T.tolist(), bits).T.contiguous()
        if order:
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(seed + 3))]
            tensors["weight_g_idx"] = group.to(torch.int32)
        return tensors, (codes - zero[:, group]).double() * scale.double()[:, group]

    return draw


def nvfp4(*, modelopt: bool) -> Any:
    """Two FP4 numbers a byte, a scale in FP8 for sixteen, and one for all: ModelOpt's is to be multiplied by."""

    def draw(shape: tuple[int, int], seed: int) -> Drawn:
        codes = integers(shape, 0, 15, seed)
        scale = (scales((shape[0], groups(shape[1], 16)), seed + 1) * 10000).to(FP8)
        factor = torch.tensor(0.000125 * (1 + seed % 7))
        pairs = codes.reshape(shape[0], -1, 2)
        stored = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
        values = torch.tensor(E2M1, dtype=torch.float64)[codes]
        if modelopt:
            overall = factor.double()
            tensors = {"weight": stored, "weight_scale": scale, "weight_scale_2": factor}
        else:
            inverse = (1 / factor).reshape(1)
            overall = 1 / inverse.double()
            tensors = {"weight_packed": stored, "weight_scale": scale, "weight_global_scale": inverse}
        tensors["input_scale" if modelopt else "input_global_scale"] = torch.tensor([0.25])
        return tensors, values * expand(scale, (1, 16), shape) * overall

    return draw


def awq(shape: tuple[int, int], seed: int) -> Drawn:
    """The transpose, groups of 16; in an int32 eight neighbouring rows of the weight in AWQ's own order."""
    rows, columns = shape
    codes, zero = integers(shape, 0, 15, seed), integers((rows, groups(columns, 16)), 0, 15, seed + 2)
    scale = scales((groups(columns, 16), rows), seed + 1, torch.float16)

    def pack(transposed: Tensor) -> Tensor:
        mixed = transposed.reshape(len(transposed), -1, 8)[:, :, list(AWQ_ORDER)]
        return pack_bits(mixed.reshape(len(transposed), -1).tolist(), 4)

    tensors = {"qweight": pack(codes.T), "qzeros": pack(zero.T), "scales": scale}
    group = torch.arange(columns) // 16
    return tensors, (codes - zero[:, group]).double() * scale.double().T[:, group]


def gptq(*, order: bool, plus: int = 1, bits: int = 4) -> Any:
    """The transpose, groups of 16; in an int32 neighbouring columns of the weight; zero points less ``plus``."""

    def draw(shape: tuple[int, int], seed: int) -> Drawn:
        rows, columns = shape
        most = (1 << bits) - 1
        codes, zero = integers(shape, 0, most, seed), integers((rows, groups(columns, 16)), 0, most, seed + 2)
        scale = scales((groups(columns, 16), rows), seed + 1, torch.float16, 0.02 / most)
        group = torch.arange(columns) // 16
        if order:
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(seed + 3))]
        tensors = {
            "qweight": pack_bits(codes.tolist(), bits).T.contiguous(),
            "qzeros": pack_bits(((zero - plus) % (most + 1)).T.tolist(), bits),
            "scales": scale,
            "g_idx": group.to(torch.int32),
        }
        return tensors, (codes - zero[:, group]).double() * scale.double().T[:, group]

    return draw


def bnb_int8(shape: tuple[int, int], seed: int) -> Drawn:
    codes, largest = integers(shape, -127, 127, seed).to(torch.int8), scales((shape[0],), seed + 1, size=0.2)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.double() * largest.double()[:, None] / 127


def ct_group(format: str | None, bits: int, kind: str = "int", **weights: Any) -> dict[str, Any]:
    """A group of compressed-tensors' config, for all modules."""
    arguments = {"num_bits": bits, "type": kind, "symmetric": True} | weights
    return {"targets": ["Linear"], "weights": arguments, "input_activations": None, "format": format}


def ct(group: dict[str, Any], *, overall: str | None = None, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": overall or group["format"],
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
    }


@dataclasses.dataclass(frozen=True)
class Form:
    """One way of storing weights: the ``quantization_config``, the function that draws one, and roundings per value.

    ``roundings`` bounds the float32 roundings that a value goes through on its way: the formula's own operations.
    """

    config: dict[str, Any]
    draw: Callable[[tuple[int, int], int], Drawn]
    roundings: int = 1


_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "model.layers.*.mlp*"]}
_PACK, _CHANNEL = "pack-quantized", {"strategy": "channel"}

FORMS: dict[str, Form] = {
    "FP8 blocks": Form(fp8_config((16, 16)), fp8_blocks((16, 16), "weight_scale_inv")),
    "FP8 blocks, oblong": Form(fp8_config((7, 9)), fp8_blocks((7, 9), "weight_scale_inv", torch.bfloat16)),
    "FP8 blocks, UE8M0": Form(fp8_config((16, 16), scale_fmt="ue8m0"), exponents),
    "FP8 per tensor": Form(fp8_config(weight_block_size=None), by_row(FP8, lambda rows: (), torch.float32)),
    "FP8 per row": Form({"quant_method": "fbgemm_fp8"}, by_row(FP8, lambda rows: (rows, 1), torch.float32)),
    "int8 per row": Form({"quant_method": "w8a8_int8"}, by_row(torch.int8, lambda rows: (rows, 1), torch.float32)),
    "int8 per tensor": Form({"quant_method": "w8a8_int8"}, by_row(torch.int8, lambda rows: (1,), torch.float32)),
    "float-quantized, rows": Form(
        ct(ct_group("float-quantized", 8, "float", **_CHANNEL)), by_row(FP8, lambda rows: (rows, 1), torch.bfloat16)
    ),
    "float-quantized, tensor": Form(
        ct(ct_group("float-quantized", 8, "float", strategy="tensor")), by_row(FP8, lambda rows: (1,), torch.bfloat16)
    ),
    "float-quantized, blocks": Form(
        ct(ct_group("float-quantized", 8, "float", strategy="block", block_structure=[16, 16])),
        fp8_blocks((16, 16), "weight_scale", torch.bfloat16),
    ),
    "int-quantized, rows": Form(
        ct(ct_group("int-quantized", 8, **_CHANNEL)), by_row(torch.int8, lambda rows: (rows, 1), torch.bfloat16)
    ),
    "int-quantized, zero points": Form(ct(ct_group("int-quantized", 8, symmetric=False, **_CHANNEL)), int8_zero_points),
    "pack-quantized, groups": Form(ct(ct_group(_PACK, 4, strategy="group", group_size=16)), packed(4, 16)),
    "pack-quantized, rows": Form(ct(ct_group(_PACK, 4, **_CHANNEL)), packed(4, None)),
    "pack-quantized, zero points": Form(
        ct(ct_group(_PACK, 4, strategy="group", group_size=16, symmetric=False)), packed(4, 16, symmetric=False)
    ),
    "pack-quantized, order": Form(
        ct(ct_group(_PACK, 4, strategy="group", group_size=16, actorder="group")), packed(4, 16, order=True)
    ),
    "pack-quantized, 3 bits": Form(ct(ct_group(_PACK, 3, strategy="group", group_size=16)), packed(3, 16)),
    "nvfp4-pack-quantized": Form(
        ct(ct_group("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16)),
        nvfp4(modelopt=False),
        roundings=2,  # the quotient of the scales, and the product
    ),
    "ModelOpt FP8": Form(_MODELOPT | {"quant_algo": "FP8"}, by_row(FP8, lambda rows: (), torch.float32)),
    "ModelOpt NVFP4": Form(_MODELOPT | {"quant_algo": "NVFP4"}, nvfp4(modelopt=True)),
    "AWQ": Form({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq),
    "GPTQ": Form({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}, gptq(order=False)),
    "GPTQ, order": Form({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, gptq(order=True)),
    "GPTQ v2": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}, gptq(order=True, plus=0)
    ),
    "GPTQ, 8 bits": Form({"quant_method": "gptq", "bits": 8, "group_size": 16}, gptq(order=True, bits=8)),
    "bitsandbytes int8": Form(
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        bnb_int8,
        roundings=2,  # the product, and the quotient
    ),
}

#: Sizes under which every form can hold every projection, and that no block or group of 16 divides.
SIZES = {"qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 24, "kv_lora_rank": 24}


def coded_config(form: Form, **changes: Any) -> dict[str, Any]:
    return config_v3(**SIZES | {"dtype": "bfloat16", "quantization_config": form.config} | changes)


def draw_all(form: Form, config: dict[str, Any], layers: int = 1) -> tuple[Tensors, Tensors]:
    """The attention of some layers as stored in the form, and the values (float64) of every weight."""
    stored: Tensors = {}
    values: Tensors = {}
    for layer in range(layers):
        for number, (name, plain) in enumerate(attention_weights(config, layer, torch.bfloat16).items()):
            if plain.dim() == 1:
                stored[name], values[name] = plain, plain.double()
                continue
            tensors, values[name] = form.draw((plain.shape[0], plain.shape[1]), 10 * (number + 10 * layer))
            stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in tensors.items()}
    return stored, values


def write_coded(folder: pathlib.Path, form: Form, **changes: Any) -> Tensors:
    """A checkpoint of one layer's attention in a form; gives the values of its weights."""
    config = coded_config(form, **changes)
    stored, values = draw_all(form, config)
    write_checkpoint(folder, config, stored)
    return values


def set_config(folder: pathlib.Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def close(weight: torch.Tensor, values: torch.Tensor, form: Form) -> bool:
    """Each value within as many float32 roundings as the form's arithmetic has."""
    return bool(((weight.double() - values).abs() <= form.roundings * 2.0**-24 * values.abs() * (1 + 1e-6)).all())
