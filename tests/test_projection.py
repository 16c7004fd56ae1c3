"""Per-head products with plain and quantized weights, in Triton's interpreter and in PyTorch, against float64."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import aot
import interpreter  # noqa: F401  # before any kernel
import pytest
import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.kernels import projection
from mla_convert.kernels.packed import KINDS, PackedWeight, dequantize
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


CASES = [case for form in ("plain", *FORMS) for case in both(form, batch=3)]
CASES += both("plain", batch=1, stored=12, dtype=torch.float32)
CASES += both("int8/row", batch=1, q_len=17, stored=12, dtype=torch.float32)
CASES += both("fp8/128x128", batch=1, heads=1, stored=130, latent=64, dtype=torch.float32)
CASES += both("fp8/7x20", batch=2, q_len=32, heads=1, stored=12, latent=50)
CASES += both("int4/32", batch=16, q_len=4, heads=2, stored=12, latent=96)
CASES += both("int4/128", batch=1, q_len=17, heads=2, stored=65, dtype=torch.float32)
CASES += both("fp8/row", batch=5, q_len=13, heads=1, stored=16, latent=128)
# Weights near the smallest numbers of float16: scales that reach it alone would be lost.
CASES += both("int8/row", batch=1, stored=128, latent=64, heads=1, amplitude=1e-4)


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


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_against_float64(case: Case, backend: str) -> None:
    problem = build(case)
    problem.check(problem.run(backend))


def strided(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The same numbers with another order in memory and gaps in every dimension; NaN, or the largest byte, between."""
    order = [*dims]
    moved = tensor.permute(order)
    fill = math.nan if tensor.is_floating_point() else 127
    wide = torch.full([2 * size + 1 for size in moved.shape], fill, dtype=tensor.dtype)
    inner = wide[tuple(slice(1, 2 * size + 1, 2) for size in moved.shape)]
    inner.copy_(moved)
    return inner.permute([order.index(i) for i in range(len(order))])


@pytest.mark.parametrize(
    "case", [c for form in ("plain", "fp8/16x32", "int4/64") for c in both(form, q_len=2)], ids=str
)
def test_any_strides_and_nothing_between_is_read(case: Case) -> None:
    problem = build(case)
    weight = problem.weight
    if isinstance(weight, PackedWeight):
        codes, scales = strided(weight.codes, (1, 0)), strided(weight.scales, (1, 0))
        weight = dataclasses.replace(weight, codes=codes, scales=scales)
    else:
        weight = strided(weight, (0, 2, 1))
    result = problem.run(x=strided(problem.x, (2, 0, 1, 3)), weight=weight)
    assert torch.equal(result, problem.run())


@pytest.mark.parametrize("form", ["plain", "fp8/128x128", "int4/32"])
def test_slices_of_a_larger_weight(form: str) -> None:
    """The query's content columns, and rows of a joint weight, as views: what lies beside them is NaN."""
    problem = build(Case("query", form, batch=2))
    x = torch.full((2, 1, 3, 50), math.nan, dtype=torch.float16)
    x[..., 5:25] = problem.x
    weight = problem.weight
    if isinstance(weight, PackedWeight):
        scales = torch.full((weight.scales.shape[0] + 2, weight.scales.shape[1] + 1), math.nan)
        scales[1:-1, :-1] = weight.scales
        codes = torch.full((weight.rows + 2, weight.codes.shape[1] + 3), 0x7F, dtype=weight.codes.dtype)
        codes[1:-1, 1:-2] = weight.codes
        weight = dataclasses.replace(weight, codes=codes[1:-1, 1:-2], scales=scales[1:-1, :-1])
    else:
        joint = torch.full((3, 32, 192), math.nan, dtype=torch.float16)
        joint[:, :20] = weight
        weight = joint[:, :20]
    assert torch.equal(problem.run(x=x[..., 5:25], weight=weight), problem.run())


@pytest.mark.parametrize("form", ["plain", "int8/row", "fp8/7x20", "int4/32"])
@pytest.mark.parametrize("side", ["query", "output"])
def test_a_row_does_not_depend_on_the_others(side: str, form: str) -> None:
    problem = build(Case(side, form, batch=65, heads=1))
    together = problem.run()
    for rows in (slice(0, 1), slice(64, 65), slice(3, 20)):
        assert torch.equal(problem.run(x=problem.x[rows]), together[rows])


@pytest.mark.parametrize("decoding", ["torch", "integer", "native"])
def test_every_fp8_code_is_decoded_exactly(decoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """254 codes as a diagonal: each comes out as its number, on both sides, in both dtypes."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    packed = PackedWeight(torch.diag(codes), torch.ones(1, 1), "fp8", (254, 254))
    truth = torch.tensor([e4m3(int(code)) for code in codes], dtype=torch.float64)
    monkeypatch.setattr(projection, "decodes_fp8", lambda arch: decoding == "native")
    for dtype in (torch.float16, torch.float32):
        ones = torch.ones(1, 1, 1, 254, dtype=dtype)
        for lift in (lift_query, lift_output):
            lifted = lift(ones, packed, backend="torch" if decoding == "torch" else "triton")
            assert torch.equal(lifted.double().flatten(), truth)


def test_a_head_of_zeros() -> None:
    """Scales of zero divide nothing."""
    packed = PackedWeight(torch.zeros(16, 32, dtype=torch.int8), torch.zeros(16, 1), "int8", (1, 32))
    assert not lift_query(torch.ones(1, 1, 1, 16), packed, backend="triton").any()


@pytest.mark.parametrize("form", FORMS)
def test_dequantize_by_the_definition(form: str) -> None:
    packed = encode(torch.randn(30, 192, generator=torch.Generator().manual_seed(1)), form)
    exact = numbers(packed)
    # One float32 product: half a unit in the last place of each number.
    assert torch.all((dequantize(packed).double() - exact).abs() <= torch.finfo(torch.float32).eps / 2 * exact.abs())


def test_no_rows_at_all() -> None:
    for backend in ("triton", "torch"):
        assert lift_query(torch.empty(0, 1, 2, 8), torch.ones(2, 8, 16), backend=backend).shape == (0, 1, 2, 16)


def test_offsets_past_32_bits() -> None:
    """Strides that fit 32 bits where twice as much does not, on a lazily backed buffer of which little is touched."""
    gap = (1 << 30) + 16
    buffer = torch.empty(2 * gap + 256, dtype=torch.float16)
    far = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(2)).half()
    weight = buffer.as_strided((3, 16, 16), (gap, 16, 1))
    weight.copy_(far)
    near = torch.randn(3, 1, 3, 16, generator=torch.Generator().manual_seed(3)).half()
    expected = lift_query(near, far, backend="triton")
    assert torch.equal(lift_query(near, weight, backend="triton"), expected)
    x = buffer.as_strided((3, 1, 3, 16), (gap, gap, 16, 1))
    x.copy_(near)
    assert torch.equal(lift_query(x, far, backend="triton"), expected)
    assert torch.equal(lift_query(x.transpose(0, 1), far, backend="triton"), expected.transpose(0, 1))


def int8(rows: int = 6, columns: int = 8) -> PackedWeight:
    return PackedWeight(torch.zeros(rows, columns, dtype=torch.int8), torch.ones(rows, 1), "int8", (1, columns))


@pytest.mark.parametrize(
    ("x", "weight", "backend", "message"),
    [
        (torch.ones(1, 2, 3), torch.ones(2, 3, 8), "torch", r"\[B, S, H, N\] floating point, found \[1, 2, 3\]"),
        (torch.ones(1, 1, 2, 3, dtype=torch.int32), torch.ones(2, 3, 8), "torch", "floating point"),
        (torch.ones(1, 1, 2, 3), torch.ones(3, 3, 8), "torch", r"must be \[2, rows, C\] .* found \[3, 3, 8\]"),
        (torch.ones(1, 1, 2, 3), torch.ones(2, 3, 8).half(), "torch", "activations' torch.float32, found .* float16"),
        (torch.ones(1, 1, 2, 4), torch.ones(2, 3, 8), "torch", "N = 4 do not fit a weight of 3 rows per head"),
        (torch.ones(1, 1, 4, 3), int8(), "torch", "6 packed rows do not divide among 4 heads"),
        (torch.ones(1, 1, 2, 3), int8(), "cutlass", "'cutlass' is not known; choose one of auto, torch, triton"),
        (torch.ones(1, 1, 2, 3, device="meta"), int8(), "torch", "activations are on meta, the weight is on cpu"),
        (torch.ones(1, 1, 2, 3).double(), torch.ones(2, 3, 8).double(), "triton", "found torch.float64"),
    ],
)
def test_what_is_refused(x: Tensor, weight: Tensor | PackedWeight, backend: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lift_query(x, weight, backend=backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "int3"}, "'int3' is not known; supported are int8, fp8, int4"),
        ({"kind": "fp8"}, r"fp8 codes must be \[rows, C\] uint8, found \[6, 8\] int8"),
        ({"block": (0, 8)}, "blocks must be positive"),
        ({"scales": torch.ones(6)}, r"need scales \[6, 1\] float32, found \[6\]"),
        ({"scales": torch.ones(6, 1).double()}, "found .* float64"),
        ({"block": (4, 3)}, r"need scales \[2, 3\]"),
        ({"scales": torch.ones(6, 1, device="meta")}, "codes are on cpu, their scales on meta"),
    ],
)
def test_packed_weights_that_do_not_fit_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(int8(), **changes)  # type: ignore[arg-type]


def test_int4_blocks_are_even() -> None:
    with pytest.raises(UsageError, match="even along C in int4"):
        PackedWeight(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 2), "int4", (1, 3))


def test_the_choice_of_backend_is_sayable(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert projection.choose_backend("auto", cpu) == "torch"
    assert projection.choose_backend("auto", cuda) == "triton"
    assert "dequantized inside" in projection.describe_projection("auto", cuda)
    assert "dequantized, then" in projection.describe_projection("auto", cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert projection.choose_backend("auto", cuda) == "torch"
    with pytest.raises(UsageError, match="triton, which is not installed; use backend 'torch'"):
        projection.choose_backend("triton", cuda)


def test_without_triton_and_without_a_gpu() -> None:
    """PyTorch computes; asking for Triton says what is missing: the package at first, then the GPU."""
    code = (
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None); sys.modules['triton'] = None\n"
        "import torch, mla_convert.kernels\n"
        "from mla_convert.errors import UsageError\n"
        "from mla_convert.kernels.projection import lift_query\n"
        "x, w = torch.ones(1, 1, 1, 16), torch.ones(1, 16, 16)\n"
        "assert torch.equal(lift_query(x, w), torch.full((1, 1, 1, 16), 16.0))\n"
        "for _ in range(2):\n"
        "    try: lift_query(x, w, backend='triton')\n"
        "    except UsageError as error: print(error)\n"
        "    sys.modules.pop('triton', None)\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    hidden, alone = run.stdout.splitlines()
    assert "not installed" in hidden and "needs a GPU, the activations are on cpu" in alone


#: The prefix of the matrix instruction that each target must use at 16 bits.
MATRIX = {"sm_90": "HGMMA", "sm_100": "UTC", "gfx942": "v_mfma", "gfx950": "v_mfma"}
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def request(
    target: str, side: str, form: str, rows: int, dtype: str = "bf16", stored: int = 128, latent: int = 512
) -> aot.Request:
    """The kernel as a launch on contiguous tensors of 128 heads specialises it."""
    over_rows = side == "query"
    x = torch.empty(rows, 1, 128, stored if over_rows else latent, dtype=TORCH[dtype], device="meta")
    weight: Tensor | PackedWeight = torch.empty(128, stored, latent, dtype=TORCH[dtype], device="meta")
    codes, by_row = dtype, False
    if form != "plain":
        kind, (down, across) = FORMS[form]
        held, per_element = KINDS[kind]
        block = (down, min(across, latent))
        codes, by_row = "i8" if held == torch.int8 else "u8", block[1] == latent
        weight = PackedWeight(
            torch.empty(128 * stored, latent // per_element, dtype=held, device="meta"),
            torch.empty(-(-128 * stored // block[0]), -(-latent // block[1]), device="meta"),
            kind,
            block,
        )
    constants = projection.constants_of(target, x, weight, stored, latent, over_rows)
    options = {name: constants.pop(name) for name in [*constants] if name.startswith(("num_", "matrix_"))}
    strides = ["stride_xb", "stride_xs", "stride_xh", "stride_wh", "stride_wr", "stride_om", "stride_oh"]
    ones = ["stride_xk", "stride_wc", "stride_sc", *(["stride_sr"] if by_row else [])]
    wide = strides + ([] if by_row or form == "fp8/128x128" else ["stride_sr"])
    pointers = {"x": f"*{dtype}", "codes": f"*{codes}", "scales": "*fp32", "out": f"*{dtype}"}
    integers = dict.fromkeys(["rows", "q_len", *strides, *([] if by_row else ["stride_sr"])], "i32")
    return aot.Request(
        module="mla_convert.kernels.projection_kernel",
        function="project_heads",
        target=target,
        signature=pointers | integers,
        constants=constants | dict.fromkeys(ones, 1),
        divisible=(*pointers, *wide),
        options=options,
    )


def check_compiled(asked: aot.Request, built: aot.Compiled) -> None:
    assert built.shared <= aot.SHARED_LIMITS[asked.target], (asked, built)
    # A register or two may be put aside before the loop and taken back behind it.
    assert built.tensor_memory <= 512 and built.spills <= 16 and built.loop_spills == 0, (asked, built)
    assert not built.narrow_loads, (asked, built)
    if asked.signature["x"] != "*fp32":
        assert built.wide_loads, (asked, built)
        wanted = MATRIX.get(asked.target, "HMMA")
        assert built.matrix and all(name.startswith(wanted) for name in built.matrix), (asked, built)


#: One kernel for each target, chosen so that each side and each kind is among them.
QUICK = [
    ("sm_80", "query", "fp8/128x128", 16),
    ("sm_86", "output", "int4/128", 16),
    ("sm_89", "query", "fp8/row", 64),
    ("sm_90", "output", "plain", 64),
    ("sm_100", "output", "int8/row", 16),
    ("sm_120", "query", "int4/32", 32),
    ("gfx942", "output", "fp8/128x128", 64),
    ("gfx950", "query", "plain", 16),
]


def test_one_kernel_for_each_target_compiles_within_its_limits() -> None:
    assert [target for target, *_ in QUICK] == list(aot.TARGETS)
    asked = [request(*choice) for choice in QUICK]
    for one, built in zip(asked, aot.compile_all(asked), strict=True):
        check_compiled(one, built)


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_kernel_compiles_within_the_limits(target: str) -> None:
    asked = [
        request(target, side, form, rows, dtype)
        for side in ("query", "output")
        for form in ("plain", "int8/row", "fp8/row", "fp8/128x128", "int4/32", "int4/128")
        for rows, dtype in ((16, "bf16"), (64, "bf16"), (16, "fp32"))
    ]
    # The widest heads and latents of any family: longer loops hold more stages at once.
    asked += [
        request(target, side, form, 64, "fp16", stored=256, latent=1024)
        for side in ("query", "output")
        for form in ("plain", "fp8/128x128")
    ]
    for one, built in zip(asked, aot.compile_all(asked), strict=True):
        check_compiled(one, built)
