"""How absorbed weights are coded: the schemes, what is stored for each, and their names in compressed-tensors' terms.

``weight[i, j] = number(code[i, j]) · scale[i // r, j // c]`` for blocks of r rows and c columns. All are symmetric.

======  ============  =========================================  =============================================
kind    block (r, c)  stored beside the module's name            numbers
======  ============  =========================================  =============================================
int8    (1, columns)  ``weight`` int8, ``weight_scale``          −128 … 127
fp8     (128, 128)    ``weight`` float8_e4m3fn, ``weight_scale``  up to ±448
fp8     (1, columns)  the same                                   the same
int4    (1, group)    ``weight_packed`` int32 (eight codes,      −8 … 7, stored plus 8
                      lowest bits first), ``weight_scale``,
                      ``weight_shape`` int64 [2]
======  ============  =========================================  =============================================

Scales are float32 ``[ceil(rows / r), ceil(columns / c)]``. Names, shapes and packing are those that compressed-tensors
gives the weight of a Linear, so that its own compressors read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from mla_convert.errors import UsageError
from mla_convert.wording import option

Kind = Literal["int8", "fp8", "int4"]
KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4")
GROUP_SIZES = (32, 64, 128)
FP8_BLOCK = 128
BITS = (4, 8, 16)
#: Largest magnitude of a block in units of its scale. Half a code beyond the largest positive one: rounding to the
#: nearest code that is there is then never off by more than half a step, and the step is as small as that allows.
REACH: dict[Kind, float] = {"int8": 127.5, "fp8": 448.0, "int4": 7.5}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Kind of the codes, and the block (rows, columns) that shares a scale; 0 columns stand for a whole row."""

    kind: Kind
    block: tuple[int, int]

    def __str__(self) -> str:
        if self.kind == "int4":
            return f"int4 in groups of {self.block[1]}"
        return f"{self.kind} per row" if self.by_row else f"{self.kind} in blocks of {self.block[0]}x{self.block[1]}"

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale."""
        return self.block == (1, 0)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind == "int4" else 8

    def blocks(self, columns: int) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight of ``columns``."""
        return self.block[0], self.block[1] or columns

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales of a weight [rows, columns]."""
        rows, columns = self.blocks(shape[1])
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What is stored for a weight [rows, columns]: the last word of each name, with shape and dtype."""
        scale = (self.grid(shape), torch.float32)
        if self.kind == "int4":
            packed = ((shape[0], -(-shape[1] // 8)), torch.int32)
            return {"weight_packed": packed, "weight_scale": scale, "weight_shape": ((2,), torch.int64)}
        codes = torch.int8 if self.kind == "int8" else torch.float8_e4m3fn
        return {"weight": ((shape[0], shape[1]), codes), "weight_scale": scale}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """UsageError where a weight of that shape cannot be divided into groups."""
        if self.kind == "int4" and shape[1] % self.block[1]:
            fitting = ", ".join(str(size) for size in GROUP_SIZES if shape[1] % size == 0)
            raise UsageError(
                f"{name} has {shape[1]} columns, which is no multiple of the group size {self.block[1]}; "
                + (f"sizes that fit are {fitting}" if fitting else "no int4 group size fits: use int8 or fp8")
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        return {"kind": self.kind, "block": list(self.block)}


INT8 = Scheme("int8", (1, 0))
FP8_ROWS = Scheme("fp8", (1, 0))
FP8_BLOCKS = Scheme("fp8", (FP8_BLOCK, FP8_BLOCK))


def int4(group: int) -> Scheme:
    """int4 in groups of ``group`` columns."""
    return Scheme("int4", (1, group))


def all_schemes() -> tuple[Scheme, ...]:
    """Every scheme that is written and read."""
    return (INT8, FP8_BLOCKS, FP8_ROWS, *map(int4, GROUP_SIZES))


def parse_schemes(
    quantize: str | None,
    qk_bits: int | None,
    vo_bits: int | None,
    group_size: int | str | None,
) -> tuple[Scheme | None, Scheme | None]:
    """The schemes of the key side and the value side, None for one that stays plain; UsageError for what cannot be.

    ``quantize`` names the codes of both sides; ``qk_bits`` and ``vo_bits`` override it for one side: 4 is int4, 8 is
    ``quantize`` where that has 8 bits, else int8, and 16 leaves the side plain. ``group_size`` is 32 (the default), 64
    or 128 for int4; for fp8 it is 128 (blocks of 128×128, the default) or "row".
    """
    if quantize is not None and quantize not in KINDS:
        raise UsageError(f"{option('quantize', quantize)}; supported are {', '.join(KINDS)}")
    kinds = [_kind(quantize, bits, name) for bits, name in ((qk_bits, "qk_bits"), (vo_bits, "vo_bits"))]
    if quantize is not None and quantize not in kinds:
        sides = f"{option('qk_bits', qk_bits)} and {option('vo_bits', vo_bits)}"
        raise UsageError(f"{sides} leave no side to {option('quantize', quantize)}: leave it out, or one of them")
    size = _group_size(group_size, kinds)
    return _scheme(kinds[0], size), _scheme(kinds[1], size)


def _kind(quantize: str | None, bits: int | None, name: str) -> Kind | None:
    if bits is None:
        return next((kind for kind in KINDS if kind == quantize), None)
    if bits not in BITS or isinstance(bits, bool):
        raise UsageError(f"{option(name, bits)}; supported are 4 (int4), 8 (int8 or fp8) and 16 (not quantized)")
    return {4: "int4", 8: "fp8" if quantize == "fp8" else "int8", 16: None}[bits]


def _group_size(given: int | str | None, kinds: Iterable[Kind | None]) -> int | str | None:
    if given is None:
        return None
    size = int(given) if isinstance(given, str) and given.isdigit() else given
    there = set(kinds)
    allowed: list[int | str] = [*GROUP_SIZES] if "int4" in there else []
    if "fp8" in there:
        allowed += [entry for entry in (FP8_BLOCK, "row") if entry not in allowed]
    if size not in allowed or isinstance(size, bool):
        supported = f"supported here are {', '.join(map(str, allowed))}" if allowed else "it belongs to int4 and fp8"
        raise UsageError(f"{option('group_size', given)}; {supported}")
    return size


def _scheme(kind: Kind | None, size: int | str | None) -> Scheme | None:
    if kind == "int4":
        return int4(size if isinstance(size, int) else GROUP_SIZES[0])
    if kind == "fp8":
        return FP8_ROWS if size == "row" else FP8_BLOCKS
    return INT8 if kind == "int8" else None


def quantization_config(modules: Mapping[str, Scheme]) -> dict[str, Any]:
    """``quantization_config`` in compressed-tensors' terms for coded ``modules``, by name without layer's number.

    Each kind of module is one group, whose target is a pattern: ``k_b_proj`` becomes ``re:.*\\.k_b_proj$``.
    """
    groups = {
        f"group_{number}": {
            "targets": [f"re:.*\\.{module}$"],
            "weights": _weights(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": _format(scheme),
        }
        for number, (module, scheme) in enumerate(sorted(modules.items()))
    }
    formats = {_format(scheme) for scheme in modules.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
    }


def _format(scheme: Scheme) -> str:
    return "pack-quantized" if scheme.kind == "int4" else "naive-quantized"


def _weights(scheme: Scheme) -> dict[str, Any]:
    strategy = "channel" if scheme.by_row else "group" if scheme.kind == "int4" else "block"
    return {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": scheme.block[1] if strategy == "group" else None,
        "block_structure": list(scheme.block) if strategy == "block" else None,
        "dynamic": False,
    }
