"""Compile every tile of the decode kernel for every GPU, and write down what it takes.

    python tools/kernel_report.py [--targets sm_90,gfx942] [--processes 2] [--output FILE]

Needs no GPU. A tile that misses a bar is marked, and the exit code is 1. A report of chosen targets is printed only.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT / "tests")

import aot  # noqa: E402  # from the tests, which hold the same bars
import decode_aot  # noqa: E402
from decode_aot import Problem  # noqa: E402

from mla_convert.kernels.tiles import MMA_SYNC, SHARED_LIMIT, Tile  # noqa: E402

REPORT = ROOT / "benchmarks" / "results" / "kernel_report.md"
HEAD = """# The decode kernel, compiled ahead of time

Written by `make kernel-report` with Triton {triton} on {machine}; no GPU is needed, and speed is not what it tells.

Every tile of the launch table, for the problems that it is chosen for. A tile is rows × tokens, warps, stages, columns
of the latent in one piece; T: transposed, r: queries loaded anew in the loop. Registers are per thread; spills are
bytes of stack on NVIDIA and registers on AMD, "in" instructions of the loop over the history that move them. Shared
memory is in bytes per program, beside the table's own upper bound and as a share of the limit. "16 B" counts the loop's
global loads of 16 bytes a thread, beside those that the latent alone needs. Programs is how many fit a multiprocessor
at once; FLOP/B operations per byte of history. A problem is query dtype, C/R, format of the latent (fp8: e4m3fn, which
`LatentCache` stores on every device; fp8fnuz: e4m3 as gfx942 computes with it), variant of the launch.

Bars, held by the tests: shared and tensor memory within limits, no spill in the loop and at most 16 bytes outside it,
WGMMA (HGMMA) on sm_90, tcgen05 (UTC…MMA) on sm_100 from 64 rows, 16-byte loads of the latent. With float32 queries,
which use no matrix instruction on NVIDIA, with coded latents wider than 512 and with latents below 256 narrower loads
are allowed. mma.sync (HMMA) is allowed, by the table's kind of problem ("wide": C above 512), where tiles for the wider
instruction were compiled and miss a bar:

{exceptions}
"""


def exceptions() -> str:
    """Where mma.sync is allowed, up to how many rows, and why."""
    items = [
        f"- {target}, {kind}{'' if most >= 128 else f', up to {most} rows'}: {reason}."
        for (target, kind), (most, reason) in MMA_SYNC.items()
    ]
    return "\n".join(items)


COLUMNS = "problem|tile|registers|spills|in|shared|bound|%|tensor memory|instruction|16 B|programs|FLOP/B|missed"


def row(problem: Problem, target: str, tile: Tile, built: aot.Compiled, missed: list[str]) -> str:
    """One line of a target's table."""
    name = f"{tile.block_rows} × {tile.block_tokens}, {tile.warps}w {tile.stages}s p{tile.piece}"
    cells = [
        str(problem),
        name + " T" * tile.transposed + " r" * tile.reload_query,
        built.registers,
        built.spills,
        built.loop_spills,
        built.shared,
        decode_aot.estimate(problem, target, tile),
        round(100 * built.shared / SHARED_LIMIT[target]),
        built.tensor_memory,
        ", ".join(built.matrix) or "FMA",
        f"{built.loop_loads} of {decode_aot.latent_loads(problem, target, tile)}",
        decode_aot.occupancy(target, tile, built),
        round(decode_aot.intensity(problem, tile)),
        ", ".join(missed),
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def section(target: str, processes: int) -> tuple[list[str], bool]:
    """A target's table, and whether every bar holds."""
    cases = decode_aot.grid(target)
    columns = COLUMNS.split("|")
    lines = [f"\n## {target}: {SHARED_LIMIT[target]:,} bytes of shared memory\n", "| " + " | ".join(columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    built = aot.compile_all((decode_aot.part_request(problem, target, tile) for problem, tile in cases), processes)
    fine = True
    for (problem, tile), result in zip(cases, built, strict=True):
        missed = decode_aot.faults(problem, target, tile, result)
        lines.append(row(problem, target, tile, result, missed))
        fine = fine and not missed
    return lines, fine


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(aot.TARGETS), help="comma-separated; all by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--output", type=Path, help=f"default: {REPORT.relative_to(ROOT)}, of all targets")
    asked = parser.parse_args(arguments)
    targets = asked.targets.split(",")
    machine = f"{platform.system()} {platform.machine()}"
    lines = [HEAD.format(triton=metadata.version("triton"), machine=machine, exceptions=exceptions())]
    print(lines[0])
    fine = True
    for target in targets:
        found, holds = section(target, asked.processes)
        print("\n".join(found), flush=True)
        lines += found
        fine = fine and holds
    output = asked.output or (REPORT if tuple(targets) == aot.TARGETS else None)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(lines) + "\n", "utf-8")
        print(f"\nwritten to {output}")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
