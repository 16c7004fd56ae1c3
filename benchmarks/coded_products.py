"""Per-head products with quantized weights on a CPU: PyTorch's packed products beside the plain one, in one run.

    python benchmarks/coded_products.py [--dims v2-lite v3] [--dtype bfloat16] [--threads N] [--json FILE]

What decides how a patched model uses a quantized sidecar on a CPU: at the end stands what
``patches/coded.py:CPU_PRODUCTS`` should hold, the packed products that were faster for every dims measured. "plain" is
the weight dequantized once, kept in the model's dtype. Candidates take turns on several layers' weights, so that none
stays in the cache; medians in microseconds, and the ratio to plain.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_convert.machine import describe_machine
from mla_convert.patches.coded import INT4, INT8, CodedProjection
from mla_convert.quantization import Quantized, quantize
from mla_convert.schemes import INT8 as INT8_ROWS
from mla_convert.schemes import Scheme, int4

#: Heads, rows of a head, C, and how many layers' weights are used in turns.
DIMS = {"example": (8, 32, 64, 4), "v2-lite": (16, 128, 512, 12), "v3": (128, 128, 512, 2)}
#: The same of a fused key side, one matrix for all heads: 1, H·(C + R), the query's rank or the hidden size.
FUSED = {"example": (1, 8 * 80, 64, 4), "v2-lite": (1, 16 * 576, 2048, 2)}
SIDES = ("key", "value", "fused")
PACKED = {"int8": "int8 packed", "int4": "int4 packed"}


def groups_folded(weight: Quantized, heads: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The key side in int4 without dequantizing: a row of activations for each group of columns.

    Scales s[n, j] differ by group j of columns, and fold into the query once for each j.
    """
    rows, columns = weight.shape[0] // heads, weight.shape[1]
    groups, size = columns // weight.scheme.block[1], weight.scheme.block[1]
    codes = weight.numbers().to(torch.int8).view(heads, rows, columns).transpose(1, 2).contiguous()
    scales = weight.scales.view(heads, rows, groups).transpose(1, 2).to(dtype)
    ones = torch.ones(columns, dtype=dtype)

    def product(x: Tensor) -> Tensor:
        folded = (x[:, 0].transpose(0, 1) * scales).contiguous()  # one token: [1, 1, H, N] to [H, groups, N]
        each = [torch.ops.aten._weight_int8pack_mm(a, b, ones) for a, b in zip(folded, codes, strict=True)]
        return torch.stack(each).view(heads, groups, groups, size).diagonal(dim1=1, dim2=2)

    return product


def plain(weight: Quantized, heads: int, dtype: torch.dtype, over_rows: bool) -> Callable[[Tensor], Tensor]:
    """The product of a patched model with plain weights."""
    numbers = weight.dequantize().to(dtype).view(heads, -1, weight.shape[1])
    kept = numbers.transpose(1, 2).contiguous() if over_rows else numbers.contiguous()
    return lambda x: torch.bmm(x[0].transpose(0, 1), kept.transpose(1, 2))


def measure(dims: str, side: str, dtype: torch.dtype, repetitions: int) -> dict[str, float]:
    """Median microseconds of every candidate for one side."""
    heads, rows, columns, layers = FUSED[dims] if side == "fused" else DIMS[dims]
    over_rows = side == "key"
    x = torch.randn(1, 1, heads, rows if over_rows else columns).to(dtype)
    candidates: dict[str, list[Callable[[Tensor], Tensor]]] = {"plain": [], "int8 packed": []}
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        weight = torch.randn(heads * rows, columns, generator=generator) * 0.02
        coded: dict[Scheme, Quantized] = {scheme: quantize(weight, scheme) for scheme in (INT8_ROWS, int4(32))}
        candidates["plain"].append(plain(coded[INT8_ROWS], heads, dtype, over_rows))
        candidates["int8 packed"].append(CodedProjection(coded[INT8_ROWS], heads, INT8, over_rows=over_rows))
        if over_rows:
            folded = groups_folded(coded[int4(32)], heads, dtype)
            candidates.setdefault("int4 as int8, groups folded", []).append(folded)
        else:
            candidates.setdefault("int4 packed", []).append(
                CodedProjection(coded[int4(32)], heads, INT4, over_rows=False)
            )
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repetitions + 3):
        for name, products in candidates.items():
            start = time.perf_counter()
            products[turn % layers](x)
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def faster(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(kind, side) of the packed products that were faster than the plain one in bfloat16, whatever the dims."""
    found = []
    for kind, name in PACKED.items():
        for side in SIDES:
            times = [
                row["microseconds"]
                for row in rows
                if (row["dtype"], row["side"]) == ("bfloat16", side) and name in row["microseconds"]
            ]
            if times and all(time[name] < time["plain"] for time in times):
                found.append((kind, side))
    return found


@torch.inference_mode()
def main() -> None:
    """Parse the command line, measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", choices=DIMS, nargs="+", default=["v2-lite", "v3"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--repetitions", type=int, default=41)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dims in args.dims:
        for dtype in args.dtype:
            for side in SIDES[: 3 if dims in FUSED else 2]:
                found = measure(dims, side, getattr(torch, dtype), args.repetitions)
                rows.append({"dims": dims, "dtype": dtype, "side": side, "microseconds": found})
                cells = [f"{name} {us:.0f} us ({found['plain'] / us:.2f}x)" for name, us in found.items()]
                print(f"{dims:>8} {dtype:>9} {side:>6}: {', '.join(cells)}", flush=True)
    print(f"CPU_PRODUCTS, by what was measured here: {', '.join(map(str, faster(rows))) or 'none'}")
    if args.json:
        machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
