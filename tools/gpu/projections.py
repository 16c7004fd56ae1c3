"""The per-head products: right against float64, the same bits whatever shares the call, and how fast."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from gpu import timing
from gpu.setting import CPU, DEVICE, DTYPE
from mla_convert.kernels.packed import PackedWeight, dequantize
from mla_convert.kernels.projection import lift_output, lift_query

#: Heads, stored rows per head (N or V), C: of what is checked, and of what is timed (DeepSeek-V3's).
CHECKED = (2, 20, 64) if CPU else (16, 128, 512)
TIMED = (2, 20, 64) if CPU else (128, 128, 512)
ROWS = (1, 3) if CPU else (1, 3, 17, 64, 100)
TIMED_ROWS = (1,) if CPU else (1, 16, 64)
BLOCKS = {"fp8": (128, 128), "fp8 row": (1, 1 << 20), "int8": (1, 1 << 20), "int4": (1, 32)}
KINDS = ("plain", *BLOCKS)
SIDES = {"query": ("bshn,hnc->bshc", lift_query), "output": ("bshc,hvc->bshv", lift_output)}


def packed_weight(kind: str, rows: int, columns: int, seed: int = 0) -> PackedWeight:
    """Random codes of a kind with random scales."""
    gen = torch.Generator().manual_seed(seed)
    block = (BLOCKS[kind][0], min(BLOCKS[kind][1], columns))
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    scales = torch.rand(grid, generator=gen) * 0.01 + 0.001
    stored = kind.split()[0]
    if stored == "fp8":
        codes = torch.randn(rows, columns, generator=gen).mul(100).to(torch.float8_e4m3fn).view(torch.uint8)
    elif stored == "int8":
        codes = torch.randint(-127, 128, (rows, columns), generator=gen, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=gen, dtype=torch.uint8)
    return PackedWeight(codes.to(DEVICE), scales.to(DEVICE), stored, block)


def weight_of(kind: str, sizes: tuple[int, int, int], seed: int = 0) -> tuple[Any, torch.Tensor]:
    """A weight as the kernel takes it, and its numbers in float64 [heads, stored, latent]."""
    heads, stored, latent = sizes
    packed = packed_weight("int8" if kind == "plain" else kind, heads * stored, latent, seed)
    exact = dequantize(packed).double().view(heads, stored, latent)
    if kind != "plain":
        return packed, exact
    return exact.to(DTYPE), exact.to(DTYPE).double()


def correct() -> dict[str, Any]:
    """Every kind of weight, both sides, several numbers of rows: the error beside what is allowed.

    Allowed is twice what plain PyTorch loses at that dtype, one rounding of the result, and one of the largest float32
    sum that there can be (Cauchy-Schwarz).

    Raises:
        AssertionError: where an error is larger.
    """
    heads, stored, latent = CHECKED
    found: dict[str, Any] = {}
    for kind, rows, (side, (formula, lift)) in itertools.product(KINDS, ROWS, SIDES.items()):
        weight, exact = weight_of(kind, CHECKED)
        x = _activations(rows, heads, stored if side == "query" else latent)
        result = lift(x, weight, backend="triton").double()
        reference = torch.einsum(formula, x.double(), exact)
        usual = torch.einsum(formula, x, exact.to(DTYPE)).double()
        error = float((result - reference).abs().max())
        allowed = float(2 * (usual - reference).abs().max() + torch.finfo(DTYPE).eps * reference.abs().max())
        norms = exact.norm(dim=1 if side == "query" else 2).max()
        allowed += float(torch.finfo(torch.float32).eps * x.double().norm(dim=-1).max() * norms)
        assert error <= allowed, f"{kind} {side} {rows} rows: {error:.2e}, allowed {allowed:.2e}"
        found[f"{kind} {side} rows={rows}"] = {"error": error, "allowed": allowed}
    return found


def bit_equality() -> dict[str, bool]:
    """A row's product is the same, to the bit, alone and among any number of others.

    Raises:
        AssertionError: where bits differ.
    """
    heads, stored, latent = CHECKED
    found = {}
    for kind, (side, (_, lift)) in itertools.product(KINDS, SIDES.items()):
        weight, _ = weight_of(kind, CHECKED)
        x = _activations(max(ROWS), heads, stored if side == "query" else latent)
        together = lift(x, weight, backend="triton")
        for rows in ROWS:
            part = lift(x[:rows], weight, backend="triton")
            found[f"{kind} {side} rows={rows}"] = torch.equal(part, together[:rows])
    wrong = [name for name, same in found.items() if not same]
    assert not wrong, f"not bit-equal to the same rows among {max(ROWS)}: {', '.join(wrong)}"
    return found


def _activations(rows: int, heads: int, width: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 1, heads, width, generator=gen).to(DEVICE, DTYPE)


def times(kind: str, rows: int, tops: dict[str, float]) -> dict[str, Any]:
    """Both sides' seconds, bytes of weights a second, and those of plain PyTorch products, on rotating weights."""
    heads, stored, latent = TIMED
    one, _ = weight_of(kind, TIMED)
    tensors = [one.codes, one.scales] if isinstance(one, PackedWeight) else [one]
    read = sum(t.numel() * t.element_size() for t in tensors)
    weights = [one, *(_copy(one) for _ in range(timing.rotations(read) - 1))]
    found: dict[str, Any] = {}
    for side, (_, lift) in SIDES.items():
        x = _activations(rows, heads, stored if side == "query" else latent)
        size = {"read": read, "operations": 2 * rows * heads * stored * latent, "tops": tops}
        for backend in ("triton", "torch"):
            calls = [lambda w=w, x=x, lift=lift, b=backend: lift(x, w, backend=b) for w in weights]
            measured = timing.rates(timing.seconds(calls), **size)
            if backend == "triton":
                measured["graph_seconds"] = timing.seconds(calls, graph=True)
            found[f"{side} {backend}"] = measured | {"gb_per_second": measured["tb_per_second"] * 1e3}
    return found


def _copy(weight: Any) -> Any:
    if isinstance(weight, PackedWeight):
        return PackedWeight(weight.codes.clone(), weight.scales.clone(), weight.kind, weight.block)
    return weight.clone()
