"""The decode kernel's launches, to be compiled ahead of time: problems on no device, and what a tile takes of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import aot
import interpreter  # noqa: F401  # before the kernel: other tests of this process interpret it
import torch

from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.decode_kernel import ANYWHERE, CHANGING
from mla_convert.kernels.history import flashmla_views
from mla_convert.kernels.tiles import MMA_SYNC, SHARED_LIMIT, Tile, kind_of, padded, piece_width, shared_bytes, tiles_of
from mla_convert.kernels.triton_decode import Division, join_arguments, part_arguments

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
}
CODES = {"fp8": torch.float8_e4m3fn, "fp8fnuz": torch.float8_e4m3fnuz, "int8": torch.int8}
#: Tensor memory of a streaming multiprocessor of sm_100, in columns.
TENSOR_MEMORY = 512


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is specialised for; ``variant`` is a name of :data:`VARIANTS`.

    ``codes`` as in ``decode_cases``; "fp8fnuz" is the e4m3 of gfx942's own instructions.
    """

    dtype: str = "bf16"
    latent: int = 512
    rope: int = 64
    codes: str = "plain"
    variant: str = "paged"

    def __str__(self) -> str:
        return f"{self.dtype} {self.latent}/{self.rope} {self.codes} {self.variant}"

    @property
    def cache_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize if self.codes == "plain" else 1

    @property
    def kind(self) -> str:
        return kind_of(self.latent, query_bytes=DTYPES[self.dtype].itemsize, cache_bytes=self.cache_bytes)


#: What changes from one launch to the next besides shapes and formats.
VARIANTS: dict[str, dict[str, Any]] = {
    "paged": {"page": 64},
    "contiguous": {"page": 0},
    "small pages": {"page": 1},
    "several tokens": {"page": 64, "q_len": 4},
    "masked": {"page": 0, "masked": True},
    "indices": {"page": 64, "count": 2048},
    "one part": {"page": 0, "kv_len": 256, "sinks": True},
    "flashmla": {"page": 64},
}


def arguments(problem: Problem) -> DecodeArguments:
    """The problem's tensors, of the strides that caches have, without storage."""
    shape = {"page": 0, "q_len": 1, "kv_len": 8192, "count": 0, "masked": False, "sinks": False}
    shape |= VARIANTS[problem.variant]
    batch, heads, page = 4, 128, shape["page"]

    def empty(*size: int, dtype: torch.dtype = DTYPES[problem.dtype]) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    rows = (batch * shape["kv_len"] // page, page) if page else (batch, shape["kv_len"])
    joint = empty(*rows, problem.latent + problem.rope)
    latent, rope = joint[..., : problem.latent], joint[..., problem.latent :]
    scale: torch.Tensor | None = None
    if problem.codes != "plain":
        kind, _, spread = problem.codes.partition("/")
        latent, rope = empty(*rows, problem.latent, dtype=CODES[kind]), empty(*rows, problem.rope)
        scale_shape = {"tensor": (), "token": rows, "group": (*rows, problem.latent // 128)}[spread]
        scale = empty(*scale_shape, dtype=torch.float32)
        if problem.variant == "flashmla":
            latent, scale, rope = flashmla_views(empty(*rows, FLASHMLA_ROW, dtype=torch.uint8))
    positions = (batch, shape["q_len"])
    return DecodeArguments(
        empty(*positions, heads, problem.latent),
        empty(*positions, heads, problem.rope),
        latent,
        rope,
        scale=0.1,
        kv_lens=empty(batch, dtype=torch.int32),
        mask=empty(*positions, shape["kv_len"], dtype=torch.bool) if shape["masked"] else None,
        block_table=empty(batch, shape["kv_len"] // page, dtype=torch.int32) if page else None,
        indices=empty(*positions, shape["count"], dtype=torch.int32) if shape["count"] else None,
        sinks=empty(heads, dtype=torch.float32) if shape["sinks"] else None,
        latent_scale=scale,
    )


def request(function: str, values: dict[str, Any], target: str, **options: Any) -> aot.Request:
    """A kernel as Triton specialises it for these values: ones are constants, multiples of 16 are known to be.

    Neither holds of what the kernel says not to specialise.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: list[str] = []
    for name, value in values.items():
        if name.isupper() or (isinstance(value, int) and value == 1 and name not in CHANGING):
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            divisible += [name] if name not in ANYWHERE else []
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 1 << 31 else "i64"
            divisible += [name] if value % 16 == 0 and name not in CHANGING else []
    return aot.Request(
        "mla_convert.kernels.decode_kernel", function, target, signature, constants, tuple(divisible), options
    )


def part_request(problem: Problem, target: str, tile: Tile) -> aot.Request:
    """``part_kernel`` as a launch specialises it."""
    args = arguments(problem)
    division = Division.of(args, tile)
    out = args.q_latent if division.parts == 1 else torch.empty(1, dtype=torch.float32, device="meta")
    values = part_arguments(args, tile, division) | {"out": out, "lse": torch.empty(1, device="meta")}
    return request("part_kernel", values, target, num_warps=tile.warps, num_stages=tile.stages)


def join_request(problem: Problem, target: str, tile: Tile) -> aot.Request:
    """``join_kernel`` likewise."""
    args = arguments(problem)
    floats = torch.empty(1, device="meta")
    values = join_arguments(args, tile, Division.of(args, tile))
    values |= {"parts_out": floats, "parts_lse": floats, "out": args.q_latent, "lse": floats}
    return request("join_kernel", values, target, num_warps=1)


def estimate(problem: Problem, target: str, tile: Tile) -> int:
    """What ``tiles`` says about shared memory."""
    return shared_bytes(
        target,
        tile,
        problem.latent,
        problem.rope,
        query_bytes=DTYPES[problem.dtype].itemsize,
        cache_bytes=problem.cache_bytes,
    )


def latent_loads(problem: Problem, target: str, tile: Tile) -> int:
    """Loads of 16 bytes that a thread needs for one tile of the latent; 1 a piece even where it has less than that."""
    group = 128 if problem.codes.endswith("/group") else 0
    piece = padded(piece_width(tile, problem.latent, group))
    threads = (64 if target.startswith("gfx") else 32) * tile.warps
    return max(1, tile.block_tokens * piece * problem.cache_bytes // (16 * threads)) * -(-problem.latent // piece)


def faults(problem: Problem, target: str, tile: Tile, built: aot.Compiled) -> list[str]:
    """Bars that a compiled tile misses."""
    amd, half = target.startswith("gfx"), problem.dtype != "fp32"
    wanted = matrix_instruction(target, problem.kind, rows_of(target, problem.kind, tile)) if half or amd else ""
    bars = {
        "shared memory": built.shared <= SHARED_LIMIT[target],
        "estimate": built.shared <= estimate(problem, target, tile),
        "tensor memory": built.tensor_memory <= TENSOR_MEMORY,
        "spills in the loop": built.loop_spills == 0,
        "spills": built.spills * (4 if amd else 1) <= 16,
        "matrix instruction": not wanted or any(name.startswith(wanted) for name in built.matrix),
        "load width": narrow_is_fine(problem) or built.loop_loads >= latent_loads(problem, target, tile),
    }
    return [name for name, holds in bars.items() if not holds]


def narrow_is_fine(problem: Problem) -> bool:
    """Problems whose tiles are so small that 16 bytes for each thread would be more than there is of a piece."""
    return problem.dtype == "fp32" or problem.kind == "wide coded" or problem.latent < 256


def rows_of(target: str, kind: str, tile: Tile) -> int:
    """The largest number of rows, of those that the table tells apart, that get a tile: 128 where there is no end."""
    return max(min(most, 128) for most, chosen in tiles_of(target, kind) if chosen == tile)


def matrix_instruction(target: str, kind: str, rows: int) -> str:
    """The prefix of the matrix instruction that a problem of 16-bit numbers with so many rows must compile to."""
    if target.startswith("gfx"):
        return "v_mfma"
    if rows <= MMA_SYNC.get((target, kind), (0, ""))[0]:
        return "HMMA"
    if target == "sm_90":
        return "HGMMA"
    return "UTC" if target == "sm_100" and rows >= 64 else "HMMA"


def occupancy(target: str, tile: Tile, built: aot.Compiled) -> int:
    """Programs that fit a multiprocessor or compute unit at once, by registers, shared memory and threads."""
    if target.startswith("gfx"):
        waves = 4 * (512 // (-(-built.registers // 8) * 8))
        return min(waves // tile.warps, SHARED_LIMIT[target] // max(1, built.shared))
    threads = 32 * tile.warps
    shared = {"sm_80": 167_936, "sm_90": 233_472, "sm_100": 233_472}.get(target, 102_400)
    most = 2048 if target in ("sm_80", "sm_90", "sm_100") else 1536
    registers = 65_536 // (-(-built.registers // 8) * 8 * threads)
    memory = TENSOR_MEMORY // built.tensor_memory if built.tensor_memory else registers
    return min(registers, shared // (built.shared + 1024), most // threads, memory)


def intensity(problem: Problem, tile: Tile) -> float:
    """Floating-point operations of a tile per byte of history."""
    wide = 2 * tile.block_rows * (2 * problem.latent + problem.rope)
    return wide / (problem.latent * problem.cache_bytes + problem.rope * DTYPES[problem.dtype].itemsize)


def cases(target: str, problem: Problem) -> Iterator[tuple[Problem, Tile]]:
    """A problem with each tile that the table has for it."""
    for tile in dict.fromkeys(tile for _, tile in tiles_of(target, problem.kind)):
        yield problem, tile


#: Architectures that share another's tiles.
LIKE_ANOTHER = ("sm_89", "sm_120", "gfx950")
#: Latents in codes, as the product stores them on every device; and as others may, on the GPU that computes with those.
FORMATS = ("fp8/tensor", "fp8/token", "fp8/group", "int8/token")
FNUZ = ("fp8fnuz/tensor", "fp8fnuz/token", "fp8fnuz/group")
#: Bytes of a row of FlashMLA's cache: 512 codes, 4 float32 scales, 64 bfloat16 rotary numbers.
FLASHMLA_ROW = 656


def problems(target: str) -> list[Problem]:
    """Every combination that the report covers."""
    formats = (*FORMATS, *FNUZ) if target == "gfx942" else FORMATS
    found = [
        Problem(dtype, wide, codes=codes)
        for wide in (512, 1024)
        for dtype in ("bf16", "fp16", "fp32")
        for codes in ("plain", *formats)
    ]
    found.append(Problem(codes="fp8/group", variant="flashmla"))
    if target in LIKE_ANOTHER:
        return found
    found += [Problem(latent=wide) for wide in (64, 128, 192, 256)] + [Problem(rope=rope) for rope in (0, 16, 32)]
    found += [
        Problem(codes=codes, variant=name)
        for codes in ("plain", "fp8/group")
        for name in VARIANTS
        if name != "flashmla"
    ]
    return list(dict.fromkeys(found))


def grid(target: str) -> list[tuple[Problem, Tile]]:
    """All tiles of an architecture with all problems."""
    return [case for problem in problems(target) for case in cases(target, problem)]


def spread(target: str) -> list[tuple[Problem, Tile]]:
    """Cases of :func:`grid` that hold every tile with every dtype and format, and every width and variant once."""
    seen: set[object] = set()
    chosen = []
    for problem, tile in grid(target):
        # One scale for all is compiled as one for each token is: only the numbers of strides differ.
        codes = problem.codes.replace("tensor", "token")
        new = {(problem.kind, tile, problem.dtype), (tile, codes), problem.latent, ("R", problem.rope), problem.variant}
        new.add((problem.latent, problem.dtype))
        if not new <= seen:
            chosen.append((problem, tile))
            seen |= new
    return chosen
