"""Prove the Triton kernels on a GPU, then time them; one JSON file, resumable, under eight minutes.

    python tools/gpu_check.py --out benchmarks/results/NAME.json [--budget 450] [--cpu]

First correctness: random hostile cases in bfloat16, float16, FP8 and int8 against float64, each allowed
twice the error of plain PyTorch at that dtype. Then times: the decode kernel over a grid of shapes by
median and by CUDA-graph replay, on inputs that rotate through more memory than the L2 cache holds,
beside the ceilings measured in the same run (a large copy, a large product), PyTorch's own attention on
the same latents, and transformers' expanded step; and the tiles that the table could have chosen.

Results are written after every entry, and an entry that is there is not measured again. ``--cpu`` runs
everything at tiny sizes in Triton's interpreter, to prove the script itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
CPU = "--cpu" in sys.argv
if CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
sys.path[:] = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != ROOT]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import decode_cases  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import triton  # noqa: E402

from mla_convert.kernels import triton_decode  # noqa: E402
from mla_convert.kernels.arguments import DecodeArguments, check  # noqa: E402
from mla_convert.kernels.history import decode_latent  # noqa: E402
from mla_convert.kernels.packed import PackedWeight, dequantize  # noqa: E402
from mla_convert.kernels.projection import lift_output, lift_query  # noqa: E402
from mla_convert.kernels.reference import absorbed_decode_reference  # noqa: E402
from mla_convert.kernels.tiles import Tile  # noqa: E402

DEVICE = "cpu" if CPU else "cuda"
LATENT, ROPE = 512, 64
#: Inputs rotate through at least this much, several times an L2 cache.
ROTATED_BYTES = 1 << 20 if CPU else 400 << 20
CASES = 12 if CPU else 200


class Results:
    """Entries by name, kept in a file; ``measure`` skips what is there and stops when the time is used up."""

    def __init__(self, path: pathlib.Path, budget: float) -> None:
        self.path = path
        self.deadline = time.monotonic() + budget
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.left_out: list[str] = []

    def measure(self, name: str, work: Callable[[], Any]) -> None:
        """Run ``work`` and keep what it returns under ``name``; an error is kept as its text."""
        if name in self.data:
            return
        if time.monotonic() > self.deadline:
            self.left_out.append(name)
            return
        try:
            self.data[name] = work()
        except (RuntimeError, AssertionError, triton.runtime.errors.OutOfResources, torch.OutOfMemoryError) as error:
            self.data[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(name, json.dumps(self.data[name]), flush=True)
        self.save()

    def save(self) -> None:
        """Write the file in one step."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n")
        temporary.replace(self.path)


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
    }
    if not CPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "arch": triton_decode.device_arch(torch.device("cuda", 0)),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found


def random_case(rng: random.Random, number: int) -> decode_cases.Case:
    """A hostile case; the dtypes, codes and layouts take turns so that each is met often."""
    batch = rng.randint(1, 4)
    sizes = [(512, 64), (512, 64), (256, 64), (128, 32), (192, 32), (1024, 64), (64, 0), (256, 16)]
    latent, rope = (64, 16) if CPU else rng.choice(sizes)
    return decode_cases.Case(
        batch=batch,
        q_len=rng.choice((1, 1, 2, 4, 8)) if not CPU else rng.choice((1, 2)),
        heads=rng.choice((1, 3, 6, 12, 16, 20, 32, 63, 64, 126, 128)) if not CPU else rng.choice((1, 3, 16)),
        latent=latent,
        rope=rope,
        lens=tuple(
            rng.choice((0, 1, 20, 63, 64, 65, 140, 600, 2000)) if not CPU else rng.randint(0, 70) for _ in range(batch)
        ),
        dtype=(torch.float16, torch.float32)[number % 2]
        if CPU
        else (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32)[number % 4],
        layout=("joint", "paged", "strided", "separate", "paged")[number % 5],
        page=rng.choice((1, 16, 64)),
        codes=(None, "fp8/group", None, "fp8/token", "int8/token", None, "fp8/tensor")[number % 7],
        masked=rng.random() < 0.3,
        indices=rng.choice((0, 0, 0, 33)),
        sinks=rng.random() < 0.3,
        seed=number,
    )


def moved(args: DecodeArguments) -> DecodeArguments:
    """Arguments on the device, strides kept."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
        as_bytes = value.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
        (there.view(torch.uint8) if as_bytes else there).copy_(value.view(torch.uint8) if as_bytes else value)
        return there

    return DecodeArguments(**{f.name: move(getattr(args, f.name)) for f in dataclasses.fields(args)})


def correctness(case: decode_cases.Case) -> dict[str, float]:
    """The kernel's largest error and what it is allowed, for output and log-sum-exp; raises where it is too large."""
    args = check(decode_cases.build(case))
    out, lse = (t.cpu() for t in triton_decode.decode(check(moved(args))))
    plain = args
    if args.coded:
        numbers = decode_latent(args.latent, args.latent_scale, args.q_latent.dtype)
        plain = dataclasses.replace(args, latent=numbers, latent_scale=None)
    exact, exact_lse = absorbed_decode_reference(plain)
    usual, usual_lse = absorbed_decode_reference(plain, args.q_latent.dtype)
    eps, eps32 = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
    norms = [
        torch.cat(pair, -1).double().nan_to_num(0).norm(dim=-1).max()
        for pair in ((args.q_latent, args.q_rope), (plain.latent.to(args.k_rope.dtype), args.k_rope))
    ]
    logits = float(eps32 * args.scale * norms[0] * norms[1])
    empty = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), empty), "other rows are empty than in the reference"
    error = float((out.double() - exact).abs().max())
    allowed = float(2 * (usual.double() - exact).abs().max() + (eps + logits) * exact.abs().max())
    lse_error = float((lse.double() - exact_lse).masked_fill(empty, 0).abs().max())
    size = float(exact_lse.masked_fill(empty, 0).abs().max().clamp(min=1))
    lse_allowed = float(2 * (usual_lse.double() - exact_lse).masked_fill(empty, 0).abs().max()) + eps32 * size + logits
    assert error <= allowed, f"output differs by {error:.2e}, allowed {allowed:.2e}"
    assert lse_error <= lse_allowed, f"log-sum-exp differs by {lse_error:.2e}, allowed {lse_allowed:.2e}"
    return {"error": error, "allowed": allowed, "lse_error": lse_error, "lse_allowed": lse_allowed}


def all_correct() -> dict[str, Any]:
    """Every random case; names those that fail."""
    rng = random.Random(0)
    failed: dict[str, str] = {}
    worst = 0.0
    for number in range(CASES):
        case = random_case(rng, number)
        try:
            found = correctness(case)
            worst = max(worst, found["error"] / max(found["allowed"], 1e-300))
        except AssertionError as error:
            failed[str(case)] = str(error)
    return {"cases": CASES, "failed": failed, "worst_share_of_allowed": worst}


def bit_equality() -> dict[str, bool]:
    """A sequence alone and in its batch, paged and not, twice: the same bits."""
    case = decode_cases.Case(
        batch=3,
        lens=(65, 20, 110) if CPU else (650, 2000, 1100),
        q_len=2,
        heads=5 if CPU else 128,
        latent=64 if CPU else LATENT,
        rope=16 if CPU else ROPE,
        dtype=torch.float32 if CPU else torch.bfloat16,
    )
    args = moved(decode_cases.build(case))
    out, lse = triton_decode.decode(args)
    again = triton_decode.decode(args)
    names = ("q_latent", "q_rope", "latent", "k_rope", "kv_lens")
    alone = triton_decode.decode(dataclasses.replace(args, **{n: getattr(args, n)[1:2] for n in names}))
    paged = moved(decode_cases.build(dataclasses.replace(case, layout="paged", page=16)))
    paged_out = triton_decode.decode(dataclasses.replace(paged, q_latent=args.q_latent, q_rope=args.q_rope))
    found = {
        "again": torch.equal(out, again[0]) and torch.equal(lse, again[1]),
        "alone": torch.equal(out[1:2], alone[0]) and torch.equal(lse[1:2], alone[1]),
        "paged": torch.equal(out, paged_out[0]) and torch.equal(lse, paged_out[1]),
    }
    assert all(found.values()), f"not bit-equal: {found}"
    return found


def seconds(work: list[Callable[[], Any]], *, graph: bool = False) -> float:
    """Median seconds of one call, going round through ``work`` so that no input stays in the cache."""
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
        return triton.testing.do_bench_cudagraph(once, rep=20, return_mode="median") * 1e-3
    return triton.testing.do_bench(once, warmup=10, rep=40, return_mode="median") * 1e-3


def ceilings() -> dict[str, float]:
    """Bytes a second of a large copy, and multiply-add operations a second of a large bfloat16 product."""
    size = 1 << 18 if CPU else 1 << 30
    a, b = torch.empty(size, dtype=torch.uint8, device=DEVICE), torch.empty(size, dtype=torch.uint8, device=DEVICE)
    n = 64 if CPU else 8192
    x = torch.randn(n, n, device=DEVICE).to(torch.bfloat16)
    return {
        "copy_bytes_per_second": 2 * size / seconds([lambda: b.copy_(a)]),
        "bf16_flop_per_second": 2 * n**3 / seconds([lambda: x @ x]),
    }


def inputs(heads: int, batch: int, history: int, q_len: int, codes: str | None = None) -> Iterator[DecodeArguments]:
    """As many equal problems with other numbers as it takes to leave the cache cold."""
    width = LATENT + ROPE
    total = batch * history * width * 2
    for i in range(max(1, min(16, ROTATED_BYTES // total + 1))):
        gen = torch.Generator(DEVICE).manual_seed(i)

        def numbers(*shape: int, gen: torch.Generator = gen) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, device=DEVICE, dtype=torch.float32 if CPU else torch.bfloat16)

        rows, query = numbers(batch, history, width), numbers(batch, q_len, heads, width)
        latent, scale = rows[..., :LATENT], None
        if codes is not None:
            latent, scale = latent.to(torch.float8_e4m3fn), 1.0
        yield check(
            DecodeArguments(
                query[..., :LATENT],
                query[..., LATENT:],
                latent,
                rows[..., LATENT:],
                width**-0.5,
                kv_lens=torch.full((batch,), history, device=DEVICE),
                latent_scale=scale,
            )
        )


def rates(args: DecodeArguments, elapsed: float) -> dict[str, float]:
    """Seconds, history bytes a second, and floating-point operations a second, of one call."""
    batch, q_len, heads = args.q_latent.shape[:3]
    history = args.kv_len
    read = batch * history * (LATENT * args.latent.element_size() + ROPE * args.k_rope.element_size())
    work = 2 * batch * q_len * heads * history * (2 * LATENT + ROPE)
    return {"seconds": elapsed, "bytes_per_second": read / elapsed, "flop_per_second": work / elapsed}


def decode_times(heads: int, batch: int, history: int, q_len: int, codes: str | None = None) -> dict[str, Any]:
    """The kernel by median and by graph replay, and PyTorch's attention on the same latents."""
    problems = list(inputs(heads, batch, history, q_len, codes))
    calls = [lambda args=args: triton_decode.decode(args) for args in problems]
    found: dict[str, Any] = {
        "tile": dataclasses.asdict(triton_decode.tile_for(problems[0])),
        "kernel": rates(problems[0], seconds(calls)),
        "graph": rates(problems[0], seconds(calls, graph=True)),
    }
    if codes is None and q_len == 1 and batch * history * heads <= 1 << 26:
        found["sdpa"] = rates(problems[0], seconds([lambda args=args: sdpa(args) for args in problems]))
    return found


def sdpa(args: DecodeArguments) -> torch.Tensor:
    """One new token by ``scaled_dot_product_attention`` on the same tensors: heads as the rows of one key."""
    query = torch.cat((args.q_latent, args.q_rope), -1)
    keys = torch.cat((args.latent, args.k_rope), -1)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, keys, args.latent[:, None], scale=args.scale)


def tile_variants(heads: int, batch: int, history: int) -> dict[str, Any]:
    """Tiles that the table could have for this many rows, side by side; one that does not launch says so."""
    problems = list(inputs(heads, batch, history, 1))
    chosen = triton_decode.tile_for(problems[0])
    variants = [chosen]
    for rows in (16, 32, 64):
        for tokens in (16, 32, 64):
            for warps in (4, 8):
                for turned in (False, True):
                    variants.append(Tile(rows, tokens, warps, 2, turned, chosen.split_tokens))
    variants += [dataclasses.replace(chosen, split_tokens=split) for split in (256, 512, 1024, 2048, 4096)]
    variants += [dataclasses.replace(chosen, stages=stages) for stages in (1, 3)]
    found: dict[str, Any] = {}
    for tile in dict.fromkeys(variants if not CPU else variants[:2]):
        name = f"{tile.block_rows}x{tile.block_tokens} w{tile.warps} s{tile.stages} split{tile.split_tokens}"
        name += " transposed" if tile.transposed else ""
        try:
            calls = [lambda args=args, tile=tile: triton_decode.launch(args, tile) for args in problems]
            found[name + (" (table)" if tile == chosen else "")] = rates(problems[0], seconds(calls))
        except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
    return found


def against_transformers(dims: str, history: int) -> dict[str, float]:
    """One attention module's decode step, transformers' and the patched one, in turns."""
    import decode_step

    return decode_step.on_device(dims, torch.float32 if CPU else torch.bfloat16, history, DEVICE)


def packed_weight(kind: str, rows: int, columns: int) -> PackedWeight:
    """Random codes of a kind with random scales."""
    gen = torch.Generator().manual_seed(0)
    block = {"fp8": (128, 128), "int8": (1, columns), "int4": (1, 32)}[kind]
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.rand(grid, generator=gen) * 0.01 + 0.001
    if kind == "fp8":
        codes = torch.randn(rows, columns, generator=gen).mul(100).to(torch.float8_e4m3fn).view(torch.uint8)
    elif kind == "int8":
        codes = torch.randint(-127, 128, (rows, columns), generator=gen, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=gen, dtype=torch.uint8)
    return PackedWeight(codes.to(DEVICE), scales.to(DEVICE), kind, block)


def projections() -> dict[str, Any]:
    """The per-head products against float64, for each kind of weight: error over what plain PyTorch loses."""
    heads, stored, latent, dtype = (2, 20, 64, torch.float32) if CPU else (16, 128, 512, torch.bfloat16)
    found: dict[str, Any] = {}
    for kind in ("plain", "fp8", "int8", "int4"):
        for rows in (1, 3) if CPU else (1, 3, 17, 64):
            packed = packed_weight("int8" if kind == "plain" else kind, heads * stored, latent)
            exact = dequantize(packed).double().view(heads, stored, latent)
            weight: Any = exact.to(dtype) if kind == "plain" else packed
            exact = exact.to(dtype).double() if kind == "plain" else exact
            for side, width, formula, lift in (
                ("query", stored, "bshn,hnc->bshc", lift_query),
                ("output", latent, "bshc,hvc->bshv", lift_output),
            ):
                x = torch.randn(rows, 1, heads, width, device=DEVICE).to(dtype)
                result = lift(x, weight, backend="triton").double()
                reference = torch.einsum(formula, x.double(), exact)
                usual = torch.einsum(formula, x, exact.to(dtype)).double()
                error = float((result - reference).abs().max())
                allowed = float(2 * (usual - reference).abs().max() + torch.finfo(dtype).eps * reference.abs().max())
                # One float32 rounding of the largest sum that there can be (Cauchy-Schwarz).
                largest = x.double().norm(dim=-1).max() * exact.flatten(0, 1).norm() / (heads * stored) ** 0.5
                allowed += float(torch.finfo(torch.float32).eps * largest)
                assert error <= allowed, f"{kind} {side} {rows} rows: {error:.2e}, allowed {allowed:.2e}"
                found[f"{kind} {side} rows={rows}"] = {"error": error, "allowed": allowed}
    return found


def plan() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything to measure, the most telling first."""
    yield "machine", machine
    yield "correctness", all_correct
    yield "bit_equality", bit_equality
    yield "projections", projections
    yield "ceilings", ceilings
    heads = (16, 32, 64, 128) if not CPU else (3, 16)
    batches = (64, 1, 16, 128) if not CPU else (2,)
    histories = (8192, 1024, 32768, 131072) if not CPU else (70,)
    for dims in ("v2-lite", "v3") if not CPU else ("small",):
        for history in (4096, 32768) if not CPU else (20,):
            yield f"transformers {dims} history={history}", lambda d=dims, h=history: against_transformers(d, h)
    for h in heads:
        yield f"tiles heads={h}", lambda h=h: tile_variants(h, batches[0], histories[0])
    for q_len in (1, 2, 4) if not CPU else (1, 2):
        for history in histories:
            for batch in batches:
                for h in heads:
                    if batch * history > 1 << 22:
                        continue
                    name = f"decode heads={h} batch={batch} history={history} new={q_len}"
                    yield name, lambda h=h, b=batch, t=history, s=q_len: decode_times(h, b, t, s)
    for h in heads:
        yield f"decode fp8 heads={h}", lambda h=h: decode_times(h, batches[0], histories[0], 1, "fp8")


def main() -> int:
    """Measure, and exit 1 where something is not correct."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds, after which the rest is left out")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes in Triton's interpreter")
    args = parser.parse_args()
    results = Results(args.out, args.budget)
    for name, work in plan():
        results.measure(name, work)
    print(f"{len(results.data)} entries in {args.out}; left out for time: {len(results.left_out)}")
    failed = [n for n in ("correctness", "bit_equality", "projections") if "error" in results.data.get(n, {})]
    wrong = results.data.get("correctness", {}).get("failed")
    if failed or wrong:
        print(f"not correct: {failed or wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
