"""Prove the Triton kernels on a GPU, then time them; one JSON file, resumable, under eight minutes.

    python tools/gpu_check.py --out benchmarks/results/NAME.json [--budget 450] [--cpu]

First correctness: random hostile cases in bfloat16, float16, FP8 and int8 against float64, each allowed
twice the error of plain PyTorch at that dtype; the same bits however a sequence or a row is accompanied; FlashMLA's
rows, merged parts, shared pages, offsets past 2**31, torch.compile and a replayed CUDA graph. Then times:
the decode kernel over a grid of shapes by median and by CUDA-graph replay, on inputs that rotate through more memory
than the L2 cache holds, beside the ceilings measured in the same run (a large copy, a large product), PyTorch's own
attention on the same latents, and transformers' expanded step; the per-head products; and the tiles that the table
could have chosen.

The most telling comes first, and what the time does not reach is named. Results are written after every entry; the
same command goes on where it ended, and repeats what failed. ``--cpu`` runs everything at tiny sizes in Triton's
interpreter, to prove the script itself. The exit code is 1 where something is not correct or could not be measured,
2 where the call is at fault.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402  # only with the time of the imports counted
import itertools  # noqa: E402
import os  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

if "--cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import gpu.checkout  # noqa: E402, F401  # before anything of ours
import torch  # noqa: E402
from gpu import correctness, decode, projections, proofs, setting, timing, variants  # noqa: E402
from gpu.results import OutOfStep, Results, failed  # noqa: E402
from gpu.setting import BATCHES, HISTORIES, Shape  # noqa: E402

Entry = tuple[str, Callable[[], Any]]
#: What must be right before a time means anything.
PROOFS = {
    "bit equality": correctness.bit_equality,
    **proofs.ALL,
    "projections correct": projections.correct,
    "projections bit equality": projections.bit_equality,
}


def prove(results: Results, cases: int, workers: int) -> None:
    """Correctness of everything."""
    jobs = [(f"case {number:03}", number) for number in range(cases)]
    results.measure_apart(correctness.check_case, jobs, workers)
    for name, work in PROOFS.items():
        results.measure(name, work)


def plan(tops: dict[str, float]) -> Iterator[Entry]:
    """Everything to time, the most telling first."""
    usual = [Shape(heads, BATCHES[0], HISTORIES[0]) for heads in setting.HEADS]
    coded = [Shape(s.heads, s.batch, s.history, codes=codes) for codes in ("fp8", "int8") for s in usual]
    yield from decode_entries([*usual, *coded], tops)
    yield from transformers_entries(HISTORIES[:1])
    yield from tile_entries(usual, variants.near, tops)
    for rows, kind in itertools.product(projections.TIMED_ROWS, projections.KINDS):
        yield f"projections {kind} rows={rows}", lambda k=kind, r=rows: projections.times(k, r, tops)
    yield from decode_entries([shape for shape in setting.grid() if shape not in usual], tops)
    yield from transformers_entries(HISTORIES[1:])
    alone = [Shape(heads, 1, HISTORIES[-1]) for heads in setting.HEADS]
    yield from tile_entries(alone, variants.near, tops)
    yield from tile_entries(usual, variants.far, tops)


def decode_entries(shapes: list[Shape], tops: dict[str, float]) -> Iterator[Entry]:
    """The kernel on each shape."""
    for shape in shapes:
        yield f"decode {shape}", lambda shape=shape: decode.kernel_times(shape, tops)


def transformers_entries(histories: tuple[int, ...]) -> Iterator[Entry]:
    """transformers' step beside the patched one."""
    for history, dims in itertools.product(histories, setting.MODELS):
        yield f"transformers {dims} history={history}", lambda d=dims, h=history: decode.against_transformers(d, h)


def tile_entries(
    shapes: list[Shape], tiles_of: Callable[[Shape], list[Any]], tops: dict[str, float]
) -> Iterator[Entry]:
    """Each tile on each shape."""
    for shape in shapes:
        for tile in tiles_of(shape)[: 2 if setting.CPU else None]:
            yield variants.name_of(shape, tile), lambda s=shape, t=tile: variants.measure(s, t, tops)


def summary(results: Results) -> dict[str, Any]:
    """What one looks at first."""
    cases = {name: entry for name, entry in results.entries.items() if name.startswith("case ")}
    wrong = {name: entry for name, entry in results.entries.items() if failed(entry)}
    shares = [entry["error"] / entry["allowed"] for entry in cases.values() if entry.get("allowed")]
    return {
        "cases": len(cases),
        "failed": [name for name, entry in wrong.items() if not name.startswith("tile ")],
        "tiles_that_do_not_run": [name for name in wrong if name.startswith("tile ")],
        "worst_share_of_allowed": max(shares, default=None),
        "tiles": dict(variants.advice(results.entries)),
        "left_out": results.left_out,
        "device_lost": results.lost,
    }


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds, after which nothing more is started")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes in Triton's interpreter")
    parser.add_argument("--cases", type=int, default=12 if setting.CPU else 200, help="random cases of correctness")
    workers = 1 if setting.CPU else min(12, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=workers, help="processes that check the random cases")
    return parser.parse_args()


def run(results: Results, cases: int, workers: int) -> dict[str, Any]:
    """Everything, in order; returns the summary."""
    results.begin(setting.machine())
    prove(results, cases, workers)
    results.measure("ceilings", timing.ceilings)
    for name, work in plan(results.entries.get("ceilings", {})):
        results.measure(name, work)
    found = summary(results)
    results.save(found)
    return found


def main() -> int:
    """Measure, say what was left, and exit 1 where something is not correct."""
    args = options()
    if not setting.CPU and not torch.cuda.is_available():
        print("no GPU was found; --cpu runs the check in Triton's interpreter", file=sys.stderr)
        return 2
    try:
        found = run(Results(args.out, STARTED + args.budget), args.cases, args.workers)
    except (OutOfStep, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for shape, row in found["tiles"].items():
        print(f"{shape}: table {row['table']}, fastest {row['fastest']} ({row['times_faster']:.2f} times faster)")
    print(f"{found['cases']} cases in {args.out}; left out for time: {len(found['left_out'])}")
    for name in found["left_out"]:
        print(f"  left out: {name}")
    for name in found["failed"]:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if found["failed"] or found["device_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
