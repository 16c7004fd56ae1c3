"""Problems for the per-head products: weights in every form, and their numbers by the formats' definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mla_convert.kernels.packed import PackedWeight
from mla_convert.kernels.projection import lift_output, lift_query

FORMS = {
    "int8/row": ("int8", (1, 1 << 20)),
    "fp8/row": ("fp8", (1, 1 << 20)),
    "fp8/128x128": ("fp8", (128, 128)),
    "fp8/16x32": ("fp8", (16, 32)),
    "fp8/7x20": ("fp8", (7, 20)),
    "int4/32": ("int4", (1, 32)),
    "int4/64": ("int4", (1, 64)),
    "int4/128": ("int4", (1, 128)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One product; ``stored`` is N or V, letters as in ``mla_convert.geometry``."""

    side: str
    form: str
    batch: int = 1
    q_len: int = 1
    heads: int = 3
    stored: int = 20
    latent: int = 192
    dtype: torch.dtype = torch.float16
    amplitude: float = 0.05

    def __str__(self) -> str:
        shape = f"B{self.batch}S{self.q_len}H{self.heads}x{self.stored}C{self.latent}"
        return f"{self.side}-{self.form}-{shape}-{str(self.dtype)[6:]}"


def both(form: str, **fields: Any) -> list[Case]:
    return [Case(side, form, **fields) for side in ("query", "output")]


def encode(weight: Tensor, form: str) -> PackedWeight:
    """``weight`` [rows, C] float32 in the codes of a form, with the scale that makes each block fit."""
    kind, block = FORMS[form]
    block = (block[0], min(block[1], weight.shape[1]))
    top = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}[kind]
    grid = [range(0, size, step) for size, step in zip(weight.shape, block, strict=True)]
    scales = torch.empty(len(grid[0]), len(grid[1]))
    scaled = torch.empty_like(weight)
    for i, row in enumerate(grid[0]):
        for j, column in enumerate(grid[1]):
            part = (slice(row, row + block[0]), slice(column, column + block[1]))
            scales[i, j] = weight[part].abs().max() / top
            scaled[part] = weight[part] / scales[i, j]
    if kind == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    elif kind == "int8":
        codes = scaled.round().to(torch.int8)
    else:
        nibbles = (scaled.round() + 8).to(torch.uint8)
        codes = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return PackedWeight(codes, scales, kind, block)


def e4m3(code: int) -> float:
    """float8_e4m3fn by its definition: one sign bit, four of exponent (bias 7), three of mantissa."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def numbers(packed: PackedWeight) -> Tensor:
    """Every element of a packed weight by the format's definition, one at a time, float64 [rows, C]."""
    codes, scales = packed.codes.tolist(), packed.scales.double().tolist()
    out = []
    for i, row in enumerate(codes):
        if packed.kind == "int4":
            values = [float(nibble - 8) for byte in row for nibble in (byte % 16, byte // 16)]
        else:
            values = [e4m3(code) if packed.kind == "fp8" else float(code) for code in row]
        factors = scales[i // packed.block[0]]
        out.append([value * factors[j // packed.block[1]] for j, value in enumerate(values)])
    return torch.tensor(out, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case's tensors: activations, the weight as the kernel takes it, and its numbers in float64 [H, rows, C]."""

    case: Case
    x: Tensor
    weight: Tensor | PackedWeight
    exact: Tensor

    def run(self, backend: str = "triton", **changes: object) -> Tensor:
        problem = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        lift = lift_query if self.case.side == "query" else lift_output
        return lift(problem.x, problem.weight, backend=backend)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same product in PyTorch, in the dtype of its arguments."""
        return torch.einsum("bshn,hnc->bshc" if self.case.side == "query" else "bshc,hvc->bshv", x, weight)

    def plain(self) -> Tensor:
        """What this dtype costs: the weight rounded to it, a float32 sum one term after another, one rounding.

        A library's product may keep many partial sums and err less than any order that a kernel is free to take.
        """
        x, weight = self.x.float(), self.exact.to(self.x.dtype).float()
        terms = range(x.shape[-1])
        if self.case.side == "query":
            total = sum((x[..., n, None] * weight[:, n] for n in terms), start=torch.zeros(()))
        else:
            total = sum((x[..., c, None] * weight[:, :, c] for c in terms), start=torch.zeros(()))
        return total.to(self.x.dtype)

    def bound(self) -> Tensor:
        """Twice the error of :meth:`plain`, plus one rounding of the result."""
        truth = self.product(self.x.double(), self.exact)
        plain = self.plain().double()
        unit = torch.finfo(self.x.dtype).eps / 2
        return 2 * (plain - truth).abs().max() + unit * truth.abs().max()

    def check(self, result: Tensor) -> None:
        truth = self.product(self.x.double(), self.exact)
        assert result.shape == truth.shape and result.dtype == self.x.dtype and result.is_contiguous()
        error = (result.double() - truth).abs().max()
        assert error <= self.bound(), f"error {error:.3g}, bound {self.bound():.3g}"


def build(case: Case) -> Problem:
    gen = torch.Generator().manual_seed(0)
    width = case.stored if case.side == "query" else case.latent
    x = torch.randn(case.batch, case.q_len, case.heads, width, generator=gen).to(case.dtype)
    rows = torch.randn(case.heads * case.stored, case.latent, generator=gen) * case.amplitude
    rows *= torch.logspace(-1, 1, rows.shape[0])[torch.randperm(rows.shape[0], generator=gen), None]
    per_head = (case.heads, case.stored, case.latent)
    if case.form == "plain":
        weight = rows.to(case.dtype).view(per_head)
        return Problem(case, x, weight, weight.double())
    packed = encode(rows, case.form)
    return Problem(case, x, packed, numbers(packed).view(per_head))
