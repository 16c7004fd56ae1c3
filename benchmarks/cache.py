"""What a growing latent cache costs per step: appending, the attention step, and memory, beside ``DynamicCache``.

    python benchmarks/cache.py [--append 1024 65536] [--step 16384 65536] [--repetitions N] [--json FILE]

DeepSeek-V2-Lite's dimensions (C = 512, R = 64, 16 heads), one sequence. Three measurements, each with its limit; the
script exits with 1 where one is broken. Everything compared takes turns in one run, and medians are given. All of it
takes two minutes on two quiet cores.

1. Appending one token to one layer, in every format: at the longest history at most 1.5 times what it takes at the
   shortest. Histories take turns, kinds of cache do not: ``DynamicLayer`` copies so much that whatever runs after it
   finds nothing in the processor's caches.
2. One new token through one attention module, patched with ``cache="latent"`` and ``cache="dynamic"``: the first at
   least 1.2 times faster at every history. The formats of fewer bits stand beside, without a limit.
3. The most memory that one step takes beyond what it began with: for the latent cache the same at every history. The
   append that finds no room left is apart: it makes a buffer a quarter larger beside the old one, and its figures stand
   beside, with those of a cache of fixed capacity, which never does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import recording
import torch
from decode_step import Side, pair
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import mla_convert
from mla_convert.machine import describe_machine
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.call import Handover
from mla_convert.patches.latent_layer import LatentLayer

LATENT, ROPE = 512, 64
APPEND_LIMIT, STEP_LIMIT, MEMORY_LIMIT = 1.5, 1.2, 1.01
FORMATS = ["int8", "fp8", "fp8:128", "int4", "int4:32"]


def in_turns(work: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of each of ``work``, taken in turns after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for repetition in range(repetitions + 2):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if repetition >= 2:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}


def states(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random latents and rotary keys of one sequence."""
    return torch.randn(1, 1, count, LATENT).to(dtype), torch.randn(1, 1, count, ROPE).to(dtype)


def appended(layer: Any, history: int, dtype: torch.dtype) -> Callable[[], Any]:
    """A call that appends one token to ``layer``, filled with ``history``, and forgets it again.

    Codes are handed over as they are, as in an absorbed step; numbers are not made of them.
    """
    layer.update(*states(history, dtype))
    if getattr(layer, "hands_over", False):
        layer.handover = Handover()
    new = states(1, dtype)
    kept = None if isinstance(layer, LatentLayer) else (layer.keys, layer.values)

    def call() -> None:
        layer.update(*new)
        if kept is None:
            layer.crop(-1)
        else:
            layer.keys, layer.values = kept

    return call


def measure_append(histories: list[int], dtype: torch.dtype, repetitions: int) -> list[dict[str, Any]]:
    """Microseconds of one append by history, for a latent layer in every format and for a ``DynamicLayer``."""
    rows = []
    for kind in ("model", *FORMATS, "dynamic"):
        make = DynamicLayer if kind == "dynamic" else functools.partial(LatentLayer, parse_format(kind))
        medians = in_turns({str(history): appended(make(), history, dtype) for history in histories}, repetitions)
        times = {history: medians[str(history)] * 1e6 for history in histories}
        rows.append({"cache": kind, "microseconds": times, "ratio": times[histories[-1]] / times[histories[0]]})
        print(f"append, {kind:>8}: {', '.join(f'{t:8.1f} us at {h}' for h, t in times.items())}", flush=True)
    return rows


def measure_growth(history: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Peak bytes of the append that finds the room used up, and of the next one; with and without a fixed capacity."""
    rows = []
    for name, capacity in (("growing", None), ("capacity", 2 * history)):
        layer = LatentLayer(capacity=capacity)
        layer.update(*states(history, dtype))
        assert layer.rows is not None
        full = layer.rows.shape[1] if capacity is None else history
        if full > history:
            layer.update(*states(full - history, dtype))
        held, new = layer.rows.nbytes, states(1, dtype)
        growing, after = (peak(lambda: layer.update(*new)) for _ in range(2))  # noqa: B023
        rows.append(
            {"cache": name, "tokens": full, "held_bytes": held, "peak_bytes": growing, "next_peak_bytes": after}
        )
        print(f"append at {full} tokens, {name}: holds {held / 1e6:.1f} MB, takes {growing / 1e6:.3f} MB, then {after}")
    return rows


def sides(latent: Any, dynamic: Any, history: int) -> dict[str, Side]:
    """The same module with each kind of cache, filled alike."""
    made = {"latent": Side(latent, history, 1), "dynamic": Side(dynamic, history, 1, DynamicCache())}
    return made | {form: Side(latent, history, 1, mla_convert.LatentCache(format=form)) for form in FORMATS}


def once(side: Side) -> Callable[[], Any]:
    """A call that takes one step and forgets it."""

    def call() -> None:
        side.step()
        side.back()

    return call


def peak(call: Callable[[], Any]) -> int:
    """Bytes allocated at once by ``call``, at most, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    now = most = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@torch.inference_mode()
def measure_steps(dtype: torch.dtype, histories: list[int], repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds and peak bytes of an attention step by history and kind of cache."""
    dynamic, latent = pair("v2-lite", dtype)
    mla_convert.patch(dynamic, cache="dynamic")
    rows = []
    for history in histories:
        caches = sides(latent, dynamic, history)
        medians = in_turns({name: once(side) for name, side in caches.items()}, repetitions)
        peaks = {name: peak(side.step) for name, side in caches.items()}
        row = {"dtype": str(dtype).removeprefix("torch."), "history": history}
        row |= {"ratio": medians["dynamic"] / medians["latent"], "peak_bytes": peaks}
        rows.append(row | {"ms": {name: t * 1e3 for name, t in medians.items()}})
        print(
            f"step, {row['dtype']}, {history}: {row['ratio']:.2f} times faster than dynamic; "
            + ", ".join(f"{name} {t * 1e3:.2f} ms" for name, t in medians.items())
        )
        print("  peak kB: " + ", ".join(f"{name} {bytes_ / 1e3:.0f}" for name, bytes_ in peaks.items()), flush=True)
    return rows


def broken(append: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[str]:
    """The limits that are not kept, in words."""
    found = []
    for row in append:
        if row["cache"] != "dynamic" and row["ratio"] > APPEND_LIMIT:
            found.append(f"appending in {row['cache']} takes {row['ratio']:.2f} times longer at the longest history")
    for row in steps:
        if row["ratio"] < STEP_LIMIT:
            found.append(f"{row['dtype']} at {row['history']}: only {row['ratio']:.2f} times faster")
    for dtype in {row["dtype"] for row in steps}:
        peaks = [row["peak_bytes"]["latent"] for row in steps if row["dtype"] == dtype]
        if max(peaks) > MEMORY_LIMIT * min(peaks):
            found.append(f"{dtype}: a step's memory goes from {min(peaks)} to {max(peaks)} bytes")
    return found


def main() -> None:
    """Parse the command line, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--append", type=int, nargs="+", default=[1024, 16384, 65536])
    parser.add_argument("--step", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repetitions", type=int, default=11)
    recording.add_json(parser)
    args = parser.parse_args()
    append = measure_append(args.append, torch.bfloat16, 20 * args.repetitions)
    steps = [row for d in args.dtype for row in measure_steps(getattr(torch, d), args.step, args.repetitions)]
    growth = measure_growth(max(args.append), torch.bfloat16)
    machine = dataclasses.asdict(describe_machine(torch.device("cpu")))
    result = {"machine": machine, "append": append, "steps": steps, "growth": growth}
    recording.write(parser, args, result)
    for sentence in (found := broken(append, steps)):
        print(f"BROKEN: {sentence}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
