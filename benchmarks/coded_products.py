"""Per-head products with quantized weights on a CPU: PyTorch's packed products beside the plain one, in one run.

    python benchmarks/coded_products.py [--dims example v2-lite v3] [--dtype bfloat16] [--threads 1 2] [--json FILE]

What decides how a patched model uses a quantized sidecar on a CPU, and what ``codes="keep"`` costs. "plain" is the
weight dequantized once, kept in the model's dtype; "each call" keeps its codes and dequantizes them anew. Candidates
take turns on several layers' weights, so that none stays in the cache; medians in microseconds, and the speed over
plain. The last line says what ``patches/coded.py:CPU_PRODUCTS`` has to hold. The rule:

    A packed product is used where it was faster than the plain one in bfloat16 at V2-Lite's and at V3's dimensions, at
    each in the median over thread counts. Smaller matrices are measured beside them and do not decide.

Without options, bfloat16 at all dimensions and the other dtypes at V2-Lite's, with one thread and two: under five
minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import recording
import torch
from torch import Tensor

from mla_convert.machine import describe_machine
from mla_convert.patches.coded import EACH_CALL, INT4, INT8, CodedProjection
from mla_convert.quantization import Quantized, quantize
from mla_convert.schemes import FP8_BLOCKS, Scheme, int4
from mla_convert.schemes import INT8 as INT8_ROWS

#: Heads, rows of a head, C, and how many layers' weights are used in turns.
DIMS = {"example": (8, 32, 64, 4), "v2-lite": (16, 128, 512, 12), "v3": (128, 128, 512, 2)}
#: The same of a fused key side, one matrix for all heads: 1, H·(C + R), the query's rank or the hidden size.
FUSED = {"example": (1, 8 * 80, 64, 4), "v2-lite": (1, 16 * 576, 2048, 2), "v3": (1, 128 * 576, 1536, 1)}
SIDES = ("key", "value", "fused")
PACKED = {"int8": "int8 packed", "int4": "int4 packed"}
#: The dimensions that decide, and the dtypes that are measured at V2-Lite's alone unless they are asked for.
DECIDING = ("v2-lite", "v3")
ELSEWHERE = ("float16", "float32")
#: A case with one number of threads takes no longer than this, in seconds, once it has had a few repetitions.
LONGEST, FEW = 3.0, 5


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


def candidates(dims: str, side: str, dtype: torch.dtype) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """By name the products of each layer of one side."""
    heads, rows, columns, layers = FUSED[dims] if side == "fused" else DIMS[dims]
    over_rows = side == "key"
    found: dict[str, list[Callable[[Tensor], Tensor]]] = {"plain": [], PACKED["int8"]: []}
    for layer in range(layers):
        generator = torch.Generator().manual_seed(layer)
        weight = torch.randn(heads * rows, columns, generator=generator) * 0.02
        coded: dict[Scheme, Quantized] = {
            scheme: quantize(weight, scheme) for scheme in (INT8_ROWS, FP8_BLOCKS, int4(32))
        }
        found["plain"].append(plain(coded[INT8_ROWS], heads, dtype, over_rows))
        found[PACKED["int8"]].append(CodedProjection(coded[INT8_ROWS], heads, INT8, over_rows=over_rows))
        for scheme, each in coded.items():
            anew = CodedProjection(each, heads, EACH_CALL, over_rows=over_rows)
            found.setdefault(f"{scheme.kind} each call", []).append(anew)
        if over_rows:
            folded = groups_folded(coded[int4(32)], heads, dtype)
            found.setdefault("int4 as int8, groups folded", []).append(folded)
        else:
            packed = CodedProjection(coded[int4(32)], heads, INT4, over_rows=False)
            found.setdefault(PACKED["int4"], []).append(packed)
    return found


def in_turns(products: dict[str, list[Callable[[Tensor], Tensor]]], x: Tensor, repetitions: int) -> dict[str, float]:
    """Median microseconds of every candidate; in another order each time, since what ran before one counts."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in products}
    begun = time.perf_counter()
    for turn in range(repetitions + 3):
        if turn >= FEW + 3 and time.perf_counter() - begun > LONGEST:
            break
        for name, layers in order.sample(list(products.items()), len(products)):
            start = time.perf_counter()
            layers[turn % len(layers)](x)
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def measure(dims: str, side: str, dtype: str, threads: list[int], repetitions: int) -> Iterator[dict[str, Any]]:
    """A row for each number of threads."""
    heads, rows, columns, _ = FUSED[dims] if side == "fused" else DIMS[dims]
    products = candidates(dims, side, getattr(torch, dtype))
    x = torch.randn(1, 1, heads, rows if side == "key" else columns).to(getattr(torch, dtype))
    for count in threads:
        torch.set_num_threads(count)
        found = in_turns(products, x, repetitions)
        yield {"dims": dims, "dtype": dtype, "side": side, "threads": count, "microseconds": found}


def speeds(rows: list[dict[str, Any]], dtype: str) -> dict[tuple[str, str], dict[str, float]]:
    """By (kind, side) and dimensions how much faster a packed product is, in the median over thread counts."""
    each: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        times = row["microseconds"]
        for kind, name in PACKED.items():
            if row["dtype"] == dtype and name in times:
                by_dims = each.setdefault((kind, row["side"]), {})
                by_dims.setdefault(row["dims"], []).append(times["plain"] / times[name])
    return {key: {dims: statistics.median(found) for dims, found in by.items()} for key, by in each.items()}


def decided(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(kind, side) of the packed products that are used, by the rule above."""
    found = speeds(rows, "bfloat16")
    return [key for key, by in found.items() if all(by.get(dims, 0) > 1 for dims in DECIDING)]


def cases(dims: list[str], dtypes: list[str] | None) -> Iterator[tuple[str, str, str]]:
    """Dimensions, dtype and side of each measurement."""
    for name in dims:
        for dtype in dtypes or ("bfloat16", *(ELSEWHERE if name == "v2-lite" else ())):
            yield from ((name, dtype, side) for side in SIDES)


@torch.inference_mode()
def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", choices=DIMS, nargs="+", default=list(DIMS))
    parser.add_argument("--dtype", choices=["bfloat16", *ELSEWHERE], nargs="+")
    parser.add_argument("--repetitions", type=int, default=101)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    recording.add_json(parser)
    args = parser.parse_args()
    machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
    del machine["threads"]  # each row has its own
    rows = []
    for dims, dtype, side in cases(args.dims, args.dtype):
        for row in measure(dims, side, dtype, args.threads, args.repetitions):
            found = row["microseconds"]
            cells = [f"{name} {us:.0f} us ({found['plain'] / us:.2f}x)" for name, us in found.items()]
            print(f"{dims:>8} {dtype:>9} {side:>6}, {row['threads']} threads: {', '.join(cells)}", flush=True)
            rows.append(row)
    recording.write(parser, args, {"machine": machine, "rows": rows})
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for (kind, side), by in speeds(rows, dtype).items():
            cells = [f"{dims} {speed:.2f}x" for dims, speed in by.items()]
            print(f"{dtype}, {side}, {kind}, median over thread counts: {', '.join(cells)}")
    print(f"CPU_PRODUCTS, by what was measured here: {', '.join(map(str, decided(rows))) or 'none'}")


if __name__ == "__main__":
    main()
