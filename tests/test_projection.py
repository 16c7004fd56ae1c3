"""Per-head products with plain and quantized weights, in Triton's interpreter and in PyTorch, against float64."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import interpreter  # noqa: F401  # before any kernel
import pytest
import torch
from projection_cases import FORMS, Case, both, build, e4m3, encode, numbers
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.kernels import projection
from mla_convert.kernels.packed import PackedWeight, dequantize
from mla_convert.kernels.projection import lift_output, lift_query

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
        (torch.ones(1, 1, 2, 3), int8(), "cutlass", "'cutlass' is not known; choose one of auto, triton, torch"),
        (torch.ones(1, 1, 2, 3, device="meta"), int8(), "torch", "activations are on meta, the weight is on cpu"),
        (torch.ones(1, 1, 2, 3).double(), torch.ones(2, 3, 8).double(), "triton", "does not take float64"),
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


def test_the_backend_is_chosen_where_that_of_attention_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is looked for among the installed packages on each product."""
    asked = []

    def choose(backend: str, device: torch.device, **call: Any) -> str:
        asked.append((backend, device.type, call))
        return "torch"

    monkeypatch.setattr("importlib.util.find_spec", None)
    x, weight = torch.ones(1, 1, 1, 16), torch.ones(1, 16, 16)
    projection.lift_query(x, weight)
    monkeypatch.setattr(projection, "choose_backend", choose)
    projection.lift_output(x, weight, backend="auto")
    assert asked == [("auto", "cpu", {"query_dtype": torch.float32})]


@pytest.mark.slow  # test_without_triton is the quick one
def test_without_triton_and_without_a_gpu() -> None:
    """PyTorch computes; asking for Triton says what is missing: the package, or the GPU."""
    code = (
        "import os, sys; os.environ.pop('TRITON_INTERPRET', None)\n"
        "if sys.argv[1] == 'hidden': sys.modules['triton'] = None\n"
        "import torch, mla_convert.kernels\n"
        "from mla_convert.errors import UsageError\n"
        "from mla_convert.kernels.projection import lift_query\n"
        "x, w = torch.ones(1, 1, 1, 16), torch.ones(1, 16, 16)\n"
        "assert torch.equal(lift_query(x, w), torch.full((1, 1, 1, 16), 16.0))\n"
        "try: lift_query(x, w, backend='triton')\n"
        "except UsageError as error: print(error)\n"
    )
    for package, words in (("hidden", "needs the triton package"), ("there", "runs on CUDA and ROCm devices")):
        run = subprocess.run([sys.executable, "-P", "-c", code, package], capture_output=True, text=True, check=True)
        assert words in run.stdout
