"""Seconds of calls whose inputs are never in the cache, and what the machine can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from gpu.setting import CPU, DEVICE, ROTATED_BYTES


def rotations(bytes_each: int) -> int:
    """How many equal problems it takes to go through more memory than the cache holds."""
    return ROTATED_BYTES // max(1, bytes_each) + 1


def seconds(work: Sequence[Callable[[], Any]], *, graph: bool = False) -> float:
    """Median seconds of one call, going round through ``work``; ``graph`` replays a captured CUDA graph."""
    turn = 0

    def once() -> None:
        nonlocal turn
        work[turn % len(work)]()
        turn += 1

    if CPU:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            once()
            times.append(time.perf_counter() - start)
        return sorted(times)[1]
    if graph:
        return float(triton.testing.do_bench_cudagraph(once, rep=20, return_mode="median")) * 1e-3
    return float(triton.testing.do_bench(once, warmup=10, rep=40, return_mode="median")) * 1e-3


def ceilings() -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and operations a second of a large bfloat16 product."""
    size = 1 << 18 if CPU else 1 << 30
    a, b = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    n = 64 if CPU else 8192
    x = torch.randn(n, n, device=DEVICE).to(torch.bfloat16)
    return {
        "copy_tb_per_second": 2 * size / seconds([lambda: b.copy_(a)]) * 1e-12,
        "bf16_tflop_per_second": 2 * n**3 / seconds([lambda: x @ x]) * 1e-12,
    }


def rates(elapsed: float, *, read: int, operations: int, tops: dict[str, float]) -> dict[str, float]:
    """Seconds of a call as TB/s and TFLOP/s, beside the ceilings of the same run where those were measured."""
    found = {
        "seconds": elapsed,
        "tb_per_second": read / elapsed * 1e-12,
        "tflop_per_second": operations / elapsed * 1e-12,
    }
    for rate, top in (("tb_per_second", "copy_tb_per_second"), ("tflop_per_second", "bf16_tflop_per_second")):
        if top in tops:
            found[f"share_of_{top.split('_')[0]}"] = found[rate] / tops[top]
    return found
