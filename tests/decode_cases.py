"""Hostile inputs for ``absorbed_decode``: poisoned tails, wild page numbers, strided and coded caches."""

from __future__ import annotations

import dataclasses

import torch

from mla_convert.kernels import flashmla_views
from mla_convert.kernels.arguments import DecodeArguments

#: A page number that no cache holds: reading it fails.
WILD_PAGE = 2_147_480_000


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of the problem; letters as in ``mla_convert.geometry``."""

    batch: int = 2
    q_len: int = 1
    heads: int = 3
    latent: int = 64
    rope: int = 16
    lens: tuple[int, ...] = (65, 20)
    dtype: torch.dtype = torch.float32
    layout: str = "joint"
    page: int = 16
    codes: str | None = None
    masked: bool = False
    indices: int = 0
    sinks: bool = False
    amplitude: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ",".join(changed).replace(" ", "") or "default"


#: What every backend is run on, beside cases of its own.
HOSTILE = [
    Case(),
    Case(heads=1, q_len=4),
    Case(heads=16, q_len=2, lens=(140, 1)),
    Case(heads=126, latent=128, rope=32, lens=(0, 63)),
    Case(latent=192, rope=32, layout="strided"),
    Case(latent=1024, rope=64, lens=(20, 20)),
    Case(latent=256, rope=0, layout="separate"),
    Case(layout="separate", masked=True, q_len=3),
    Case(masked=True, sinks=True),
    Case(sinks=True, lens=(0, 12)),
    Case(indices=17, q_len=5),
    Case(indices=17, q_len=2, masked=True, layout="paged", page=4),
    Case(indices=9, codes="fp8/group", sinks=True),
    Case(layout="paged", page=1),
    Case(layout="paged", page=64, q_len=4, lens=(64, 65), masked=True),
    Case(batch=3, q_len=2, lens=(1, 0, 5)),
    Case(amplitude=30.0, lens=(50, 50)),
    Case(dtype=torch.float16, heads=16, q_len=2),
    Case(dtype=torch.float16, codes="int8/token"),
]


def build(case: Case) -> DecodeArguments:
    """Arguments of a case: everything past a sequence's end is NaN, every unused page number wild."""
    gen = torch.Generator().manual_seed(case.seed)
    capacity = max([*case.lens, 1]) + 7
    shape = (case.batch, case.q_len, case.heads)

    def numbers(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=gen) * case.amplitude).to(case.dtype)

    latent = numbers(case.batch, capacity, case.latent)
    rope = numbers(case.batch, capacity, case.rope)
    codes, scale = encode(latent, case.codes)
    kv_lens = torch.tensor(case.lens)
    cache: dict[str, object] = _store(case, codes, rope, scale, gen)
    extra: dict[str, object] = {}
    positions = int(cache.pop("kv_len"))  # type: ignore[call-overload]
    if case.masked:
        extra["mask"] = torch.rand(case.batch, case.q_len, positions, generator=gen) < 0.6
        extra["mask"][0, 0] = False
    if case.indices:
        extra["indices"] = _indices(case, positions, gen)
    if case.sinks:
        extra["sinks"] = torch.randn(case.heads, generator=gen)
    q_latent, q_rope = numbers(*shape, case.latent), numbers(*shape, case.rope)
    return DecodeArguments(q_latent, q_rope, scale=(case.latent + case.rope) ** -0.5, kv_lens=kv_lens, **cache, **extra)


def encode(latent: torch.Tensor, codes: str | None) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """``latent`` as it is, or as codes with their scales: by the formats' definitions, in float32."""
    if codes is None:
        return latent, None
    wide = latent.float()
    kind, _, spread = codes.partition("/")
    groups = wide.unflatten(-1, (4, -1)) if spread == "group" else wide[..., None, :]
    top = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}[kind]
    scale = groups.abs().amax(-1).clamp(min=1e-6) / top
    if spread == "tensor":
        scale = scale.max().expand_as(scale)
    scaled = groups / scale[..., None]
    scaled = scaled.flatten(-2)
    if kind == "fp8":
        stored = scaled.to(torch.float8_e4m3fn)
    elif kind == "int8":
        stored = scaled.round().to(torch.int8)
    else:
        nibbles = (scaled.round() + 8).to(torch.uint8)
        stored = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    if spread == "tensor":
        return stored, float(scale.flatten()[0])
    return stored, scale if spread == "group" else scale[..., 0]


def _poison(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    """NaN (or the code that decodes to it) past each sequence's end."""
    tensor = tensor.clone()
    for b, length in enumerate(case.lens):
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8)[b, length:] = 0x7F
        elif tensor.is_floating_point():
            tensor[b, length:] = torch.nan
        else:
            tensor[b, length:] = 113
    return tensor


def _store(
    case: Case, codes: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor | float | None, gen: torch.Generator
) -> dict[str, object]:
    codes, rope = _poison(codes, case), _poison(rope, case)
    if isinstance(scale, torch.Tensor) and scale.dim():
        scale = _poison(scale, case)
    if case.layout == "paged":
        return _paged(case, codes, rope, scale, gen)
    if case.layout == "joint" and case.codes is None:
        rows = torch.cat((codes, rope), -1)
        codes, rope = rows[..., : case.latent], rows[..., case.latent :]
    elif case.layout == "strided":
        codes, rope = _strided(codes), _strided(rope)
    return {"latent": codes, "k_rope": rope, "latent_scale": scale, "kv_len": codes.shape[1]}


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other row and with a gap behind each."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] * 2, tensor.shape[2] + 5), 77, dtype=torch.float32)
    wide = wide.to(tensor.dtype)
    wide[:, ::2, : tensor.shape[2]] = tensor
    return wide[:, ::2, : tensor.shape[2]]


def _paged(
    case: Case, codes: torch.Tensor, rope: torch.Tensor, scale: torch.Tensor | float | None, gen: torch.Generator
) -> dict[str, object]:
    """Pages in random order, unused ones poisoned, unused table entries wild."""
    per_sequence = -(-codes.shape[1] // case.page) + 1
    total = case.batch * per_sequence + 3
    order = torch.randperm(total, generator=gen)
    table = torch.full((case.batch, per_sequence), WILD_PAGE, dtype=torch.int32)

    def pages_of(tensor: torch.Tensor) -> torch.Tensor:
        fill = torch.full((total, case.page, *tensor.shape[2:]), torch.nan if tensor.is_floating_point() else 113)
        pages = fill.to(tensor.dtype)
        for b, length in enumerate(case.lens):
            for i in range(-(-length // case.page)):
                number = int(order[b * per_sequence + i])
                table[b, i] = number
                piece = tensor[b, i * case.page : (i + 1) * case.page]
                pages[number, : piece.shape[0]] = piece
        return pages

    stored = scale if not isinstance(scale, torch.Tensor) or not scale.dim() else pages_of(scale)
    return {
        "latent": pages_of(codes),
        "k_rope": pages_of(rope),
        "latent_scale": stored,
        "block_table": table,
        "kv_len": per_sequence * case.page,
    }


def _indices(case: Case, positions: int, gen: torch.Generator) -> torch.Tensor:
    """Distinct positions, some −1, some past what the token may see."""
    rows = [torch.randperm(positions, generator=gen)[: case.indices] for _ in range(case.batch * case.q_len)]
    chosen = torch.stack(rows).view(case.batch, case.q_len, -1)
    return chosen.masked_fill(torch.rand(chosen.shape, generator=gen) < 0.2, -1)


def flashmla_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 656 bytes [2, 40, 656], and the codes, scales and rotary keys in them."""
    numbers = torch.randn(2, 40, 512)
    scales = numbers.unflatten(-1, (4, 128)).abs().amax(-1) / 448
    codes = (numbers.unflatten(-1, (4, 128)) / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    rope = torch.randn(2, 40, 64).bfloat16()
    parts = (codes.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8))
    return torch.cat(parts, dim=-1), codes, scales, rope


def flashmla_problem(paged: bool, dtype: torch.dtype = torch.float32) -> DecodeArguments:
    """Attention over such rows as they are stored; in pages of 64, of which the second is given first.

    Unused bytes are 0xFF: NaN as a code, as a scale and as a rotary number.
    """
    rows = flashmla_rows()[0]
    kv_lens = table = None
    if paged:
        pages = torch.full((5, 64, 656), 0xFF, dtype=torch.uint8)
        pages[3, :40], pages[1, :40] = rows[0], rows[1]
        rows, kv_lens = pages, torch.tensor([40, 33], dtype=torch.int32)
        table = torch.tensor([[3, WILD_PAGE], [1, WILD_PAGE]], dtype=torch.int32)
    latent, latent_scale, k_rope = flashmla_views(rows)
    query, q_rope = torch.randn(2, 1, 4, 512).to(dtype), torch.randn(2, 1, 4, 64).to(dtype)
    return DecodeArguments(query, q_rope, latent, k_rope, 0.04, kv_lens, block_table=table, latent_scale=latent_scale)
