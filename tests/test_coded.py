"""Products with quantized weights as they are, against float64; what casting and moving leave alone."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import benchmarking
import interpreter  # noqa: F401  # before any kernel: on a CPU, Triton is chosen where it is interpreted
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_convert.kernels.packed import PackedWeight, dequantize
from mla_convert.patches import coded as coded_module
from mla_convert.patches import unpacking
from mla_convert.patches.coded import (
    CPU_PRODUCTS,
    EACH_CALL,
    INT4,
    INT8,
    PLAIN,
    TRITON,
    CodedProjection,
    choose_product,
    describe_product,
)
from mla_convert.quantization import Quantized, quantize
from mla_convert.schemes import FP8_BLOCKS, FP8_ROWS, Scheme, all_schemes, int4
from mla_convert.schemes import INT8 as INT8_ROWS

HEADS, ROWS, COLUMNS = 3, 32, 128
CPU = torch.device("cpu")
SIDES = ("key", "value", "fused")


def weight(scheme: Scheme, heads: int = HEADS) -> Quantized:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(heads * ROWS, COLUMNS, generator=generator) * 1e-4
    return quantize(
        rows * torch.logspace(-1, 1, len(rows))[torch.randperm(len(rows), generator=generator), None], scheme
    )


def activations(dtype: torch.dtype, width: int, heads: int = HEADS) -> Tensor:
    x = torch.randn(2, heads, 3, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.transpose(1, 2)  # as attention hands it on: not contiguous


CASES = [
    (INT8_ROWS, INT8, True),
    (INT8_ROWS, INT8, False),
    *((int4(group), INT4, False) for group in (32, 64, 128)),
    *((scheme, p, over_rows) for p in (TRITON, EACH_CALL) for scheme in all_schemes() for over_rows in (True, False)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("scheme", "product", "over_rows"), CASES, ids=str)
def test_against_float64(scheme: Scheme, product: str, over_rows: bool, dtype: torch.dtype) -> None:
    coded = CodedProjection(weight(scheme), HEADS, product, over_rows=over_rows)
    x = activations(dtype, ROWS if over_rows else COLUMNS)
    exact = weight(scheme).dequantize().double().view(HEADS, ROWS, COLUMNS)
    letters = "bshn,hnc->bshc" if over_rows else "bshc,hnc->bshn"
    truth, size = (torch.einsum(letters, *pair) for pair in ((x.double(), exact), (x.double().abs(), exact.abs())))
    found = coded(x)
    assert found.shape == truth.shape and found.dtype == dtype
    # In this dtype are rounded: a scale (or what it is folded into), the weight or nothing, and the result. Sums are
    # float32 over at most 128 terms. float16 has subnormals in the result.
    unit = torch.finfo(dtype).eps / 2
    bound = (3 * unit + COLUMNS * 2**-24) * size + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert torch.all((found.double() - truth).abs() <= bound * 1.01)


#: What ``codes="keep"`` runs on a CPU in bfloat16 where the sizes fit, by kind and side; else each call dequantizes.
KEPT = {
    ("int8", "key"): INT8,
    ("int8", "value"): INT8,
    ("int8", "fused"): INT8,
    ("int4", "value"): INT4,
    ("int4", "fused"): INT4,
}
#: Rows of a head and columns: those that packed products take, and others, with blocks that end inside of a head.
SIZES = {"fitting": (32, 128), "odd": (21, 288)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_kept_codes_against_float64(
    scheme: Scheme, side: str, dtype: torch.dtype, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind, side and dtype with the product that ``codes="keep"`` chooses on a CPU, in pieces of any size."""
    heads, over_rows = 1 if side == "fused" else 7, side == "key"
    rows, columns = SIZES[sizes]
    columns -= columns % scheme.block[1] if scheme.kind == "int4" else 0
    product = choose_product(scheme, (rows, columns), CPU, dtype, side=side, codes="keep")
    fits = rows % 16 == 0 or (scheme.kind == "int8" and not over_rows)  # int8 asks it of what is summed
    packed = KEPT.get((scheme.kind, side)) if dtype == torch.bfloat16 and fits else None
    assert product == (packed or EACH_CALL)
    generator = torch.Generator().manual_seed(0)
    stored = quantize(torch.randn(heads * rows, columns, generator=generator) * 1e-3, scheme)
    coded = CodedProjection(stored, heads, product, over_rows=over_rows)
    x = activations(dtype, rows if over_rows else columns, heads)
    exact = stored.dequantize().double().view(heads, rows, columns)
    letters = "bshn,hnc->bshc" if over_rows else "bshc,hnc->bshn"
    truth, size = (torch.einsum(letters, *pair) for pair in ((x.double(), exact), (x.double().abs(), exact.abs())))
    # At each call the numbers are exact in float32, sums are float32 or wider, and the result is rounded: half a unit.
    # The packed products round the scale, or what it is folded into, and perhaps the weight besides.
    unit, wide = (torch.finfo(kind).eps / 2 for kind in (dtype, torch.promote_types(dtype, torch.float32)))
    bound = ((1 if packed is None else 3) * unit + (x.shape[-1] + 1) * wide) * size
    bound += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for piece in (13 * columns, 2 * rows * columns, unpacking.PIECE):
        monkeypatch.setattr(unpacking, "PIECE", piece)
        found = coded(x)
        assert found.shape == truth.shape and found.dtype == dtype
        assert torch.all((found.double() - truth).abs() <= bound * 1.01)


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_rows_are_dequantized_from_anywhere(scheme: Scheme) -> None:
    """The same bits as the whole weight's, also where a row begins or ends inside of a block, with every FP8 number."""
    columns = 256 if scheme.kind == "int4" else 260
    stored = quantize(torch.randn(300, columns, generator=torch.Generator().manual_seed(0)) ** 5, scheme)
    if scheme.kind == "fp8":
        stored.codes.view(-1)[:508] = torch.tensor([code for code in range(256) if code & 127 != 127] * 2)
    whole = stored.dequantize()
    for start, stop in ((0, 300), (0, 1), (1, 128), (127, 129), (100, 300), (255, 257), (299, 300)):
        assert torch.equal(unpacking.dequantize_rows(stored, start, stop), whole[start:stop])


class _Largest(TorchDispatchMode):
    """The most bytes that any one operation's result has memory for."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not found.is_sparse and found._base is None:
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


@pytest.mark.parametrize("heads", [24, 1])
@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_no_more_than_a_piece_is_dequantized_at_once(scheme: Scheme, heads: int) -> None:
    rows, columns = 5 * unpacking.PIECE // 24 // 512, 512
    stored = quantize(torch.randn(24 * rows, columns), scheme)
    coded = CodedProjection(stored, heads, EACH_CALL, over_rows=False)
    before = {name: (buffer.data_ptr(), buffer.nbytes) for name, buffer in coded.named_buffers()}
    with _Largest() as largest:
        coded(torch.randn(1, 1, heads, columns))
    assert 2 * unpacking.PIECE < largest.nbytes <= 4 * unpacking.PIECE  # float32; the whole weight has five pieces
    assert {name: (buffer.data_ptr(), buffer.nbytes) for name, buffer in coded.named_buffers()} == before


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (80, 128), (1040, 64)])
def test_a_packed_int4_weight_comes_back_whatever_its_size(rows: int, columns: int) -> None:
    stored = quantize(torch.randn(2 * rows, columns), int4(32))
    coded = CodedProjection(stored, 2, INT4, over_rows=False)
    assert torch.equal(coded.weight().codes, stored.codes)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # in PyTorch's own code
@pytest.mark.parametrize(
    ("scheme", "product", "over_rows"),
    [(INT8_ROWS, INT8, True), (INT8_ROWS, INT8, False), (int4(32), INT4, False), (FP8_BLOCKS, EACH_CALL, True)],
)
@torch.inference_mode()
def test_compiled_products_are_the_same(
    scheme: Scheme, product: str, over_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would collect it, for minutes
    torch._dynamo.reset()
    coded = CodedProjection(weight(scheme), HEADS, product, over_rows=over_rows)
    x = activations(torch.bfloat16, ROWS if over_rows else COLUMNS)
    exact, found = coded(x).float(), torch.compile(coded, fullgraph=True)(x).float()
    # Sums may be taken in another order, and a rounding of what is multiplied be left out: half a unit each.
    assert torch.all((found - exact).abs() <= 4 * 2**-8 * exact.abs().amax())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_single_head_is_a_linear(dtype: torch.dtype) -> None:
    coded = CodedProjection(weight(int4(64)), 1, INT4, over_rows=False)
    x = torch.randn(2, 3, 1, COLUMNS, dtype=dtype)
    linear = torch.nn.functional.linear(x[:, :, 0], weight(int4(64)).dequantize().to(dtype))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-7  # three roundings of 2 ** −9 each, and float32 products
    assert torch.allclose(coded(x)[:, :, 0], linear, rtol=tolerance, atol=tolerance * float(linear.abs().max()))


@pytest.mark.parametrize(("scheme", "product", "over_rows"), CASES, ids=str)
def test_the_weight_comes_back_from_every_layout(scheme: Scheme, product: str, over_rows: bool) -> None:
    coded = CodedProjection(weight(scheme), HEADS, product, over_rows=over_rows)
    back = coded.weight()
    assert torch.equal(back.codes, weight(scheme).codes) and torch.equal(back.scales, weight(scheme).scales)


@pytest.mark.parametrize("scheme", all_schemes(), ids=str)
def test_the_kernels_read_the_same_numbers(scheme: Scheme) -> None:
    coded = weight(scheme)
    packed = PackedWeight(coded.codes, coded.scales, scheme.kind, scheme.blocks(COLUMNS))
    assert torch.equal(dequantize(packed), coded.dequantize())


@pytest.mark.parametrize(
    ("scheme", "product"), [(INT8_ROWS, INT8), (int4(32), INT4), (FP8_BLOCKS, TRITON), (int4(64), EACH_CALL)]
)
def test_casting_copying_and_pickling_change_no_bit(scheme: Scheme, product: str) -> None:
    coded = CodedProjection(weight(scheme), HEADS, product, over_rows=False)
    before = {name: buffer.clone() for name, buffer in coded.named_buffers()}
    assert not coded.state_dict() and {buffer.dtype.is_floating_point for buffer in before.values()} == {False}
    for other in (copy.deepcopy(coded).half(), pickle.loads(pickle.dumps(coded)).double(), coded.to(torch.bfloat16)):
        assert all(torch.equal(buffer, before[name]) for name, buffer in other.named_buffers())
        assert other.scales.dtype == torch.float32 and torch.equal(other.scales, weight(scheme).scales)


def test_bytes_are_those_of_codes_and_scales() -> None:
    numbers = HEADS * ROWS * COLUMNS
    for scheme, product, expected in (
        (INT8_ROWS, INT8, numbers + 4 * HEADS * ROWS),
        (int4(32), INT4, numbers // 2 + 4 * numbers // 32),
        (FP8_BLOCKS, TRITON, numbers + 4),
        (FP8_BLOCKS, EACH_CALL, numbers + 4),
        (int4(32), EACH_CALL, numbers // 2 + 4 * numbers // 32),
    ):
        coded = CodedProjection(weight(scheme), HEADS, product, over_rows=False)
        assert sum(buffer.nbytes for buffer in coded.buffers()) == expected


@pytest.mark.parametrize(
    ("scheme", "rows", "dtype", "side", "expected"),
    [
        *((INT8_ROWS, 32, torch.bfloat16, side, INT8) for side in SIDES),
        (INT8_ROWS, 12, torch.bfloat16, "value", INT8),
        (INT8_ROWS, 12, torch.bfloat16, "key", PLAIN),
        (INT8_ROWS, 32, torch.float16, "value", PLAIN),
        (INT8_ROWS, 32, torch.float32, "value", PLAIN),
        (INT8_ROWS, 32, torch.float64, "value", PLAIN),
        *((int4(32), 32, torch.bfloat16, side, INT4) for side in ("value", "fused")),
        (int4(32), 32, torch.bfloat16, "key", PLAIN),
        (int4(32), 12, torch.bfloat16, "value", PLAIN),
        (int4(32), 32, torch.float32, "value", PLAIN),
        (FP8_BLOCKS, 128, torch.bfloat16, "value", PLAIN),
        (FP8_ROWS, 128, torch.bfloat16, "value", PLAIN),
    ],
)
def test_the_choice_on_a_cpu(
    scheme: Scheme, rows: int, dtype: torch.dtype, side: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table of every packed product there is, what the products ask for decides; with an empty one, nothing."""
    everything = {("int8", side): INT8 for side in SIDES} | {("int4", side): INT4 for side in ("value", "fused")}
    monkeypatch.setattr(coded_module, "CPU_PRODUCTS", everything)
    product = choose_product(scheme, (rows, 128), CPU, dtype, side=side)
    assert product == expected
    assert str(scheme) in describe_product(scheme, product)
    monkeypatch.setattr(coded_module, "CPU_PRODUCTS", {})
    assert choose_product(scheme, (rows, 128), CPU, dtype, side=side) == PLAIN


def test_the_table_is_what_was_measured() -> None:
    """The rule of the table, on the figures that are recorded; in other dtypes no packed product is faster anywhere."""
    rows = json.loads((benchmarking.RESULTS / "coded_products.json").read_text("utf-8"))["rows"]
    script = benchmarking.script("coded_products")
    assert set(script.decided(rows)) == set(CPU_PRODUCTS)
    for dtype in ("float16", "float32"):
        found = script.speeds(rows, dtype)
        assert len(found) == 5 and all(speed < 1 for by in found.values() for speed in by.values())


def test_the_rule_of_the_table() -> None:
    """Faster at both dimensions, in the median over thread counts; neither small matrices nor other dtypes decide."""

    def row(dims: str, side: str, threads: int, packed: float, dtype: str = "bfloat16") -> dict[str, object]:
        times = {"plain": 10.0, "int8 packed": packed}
        return {"dims": dims, "dtype": dtype, "side": side, "threads": threads, "microseconds": times}

    decided = benchmarking.script("coded_products").decided
    faster = [row(dims, "key", threads, 5) for dims in ("v2-lite", "v3") for threads in (1, 2)]
    assert decided(faster) == [("int8", "key")]
    assert decided([*faster, row("example", "key", 1, 99), row("v3", "key", 1, 99, "float32")]) == [("int8", "key")]
    assert decided(faster[:2]) == []  # not measured at V3's dimensions
    assert decided([*faster[:3], row("v3", "key", 2, 12)]) == [("int8", "key")]  # speeds of 2 and 0.83
    assert decided([*faster[:3], row("v3", "key", 2, 12), row("v3", "key", 4, 12)]) == []


def test_the_table_names_products_that_there_are() -> None:
    for (kind, side), product in CPU_PRODUCTS.items():
        assert side in SIDES and product == {"int8": INT8, "int4": INT4}[kind] and (kind, side) != ("int4", "key")


def test_sums_that_the_packed_product_gets_wrong_are_not_given_to_it() -> None:
    assert choose_product(INT8_ROWS, (32, 40), CPU, torch.bfloat16, side="value") == PLAIN


def test_kept_codes_elsewhere() -> None:
    """Where Triton multiplies by codes, keeping them changes nothing; where nothing does, they stay all the same."""
    for scheme in all_schemes():
        for device, dtype in (("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.bfloat16)):
            asked = {"side": "key", "backend": "auto" if device == "cuda" else "triton"}
            found = choose_product(scheme, (20, 128), torch.device(device), dtype, codes="keep", **asked)
            assert found == choose_product(scheme, (20, 128), torch.device(device), dtype, **asked) == TRITON
        for device, backend, dtype in (
            ("cuda", "torch", torch.half),
            ("cuda", "auto", torch.double),
            ("mps", "auto", torch.half),
        ):
            found = choose_product(
                scheme, (20, 128), torch.device(device), dtype, side="key", backend=backend, codes="keep"
            )
            assert found == EACH_CALL


def test_the_choice_elsewhere() -> None:
    for scheme in all_schemes():
        assert choose_product(scheme, (20, 128), torch.device("cuda"), torch.bfloat16, side="key") == TRITON
        assert choose_product(scheme, (20, 128), torch.device("mps"), torch.bfloat16, side="key") == PLAIN
    assert choose_product(INT8_ROWS, (20, 128), torch.device("cuda"), torch.float64, side="key") == PLAIN


def test_the_choice_follows_the_backend_asked_for() -> None:
    """No Triton where PyTorch was asked for, whatever the device."""
    cuda, half = torch.device("cuda"), torch.bfloat16
    for scheme in all_schemes():
        assert choose_product(scheme, (32, 128), cuda, half, side="key", backend="torch") == PLAIN
        assert choose_product(scheme, (32, 128), cuda, half, side="key", backend="triton") == TRITON
        assert choose_product(scheme, (32, 128), CPU, half, side="key", backend="triton") == TRITON
    assert choose_product(INT8_ROWS, (32, 128), CPU, half, side="key", backend="torch") == CPU_PRODUCTS.get(
        ("int8", "key"), PLAIN
    )


@pytest.mark.parametrize("over_rows", [True, False])
def test_the_product_runs_on_the_backend_asked_for(over_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("lift_query", "lift_output"):
        monkeypatch.setattr(coded_module, name, lambda x, packed, backend: asked.append(backend) or x)
    for backend in ("auto", "torch", "triton"):
        coded = CodedProjection(weight(INT8_ROWS), HEADS, TRITON, over_rows=over_rows, backend=backend)
        coded(activations(torch.bfloat16, ROWS if over_rows else COLUMNS))
    assert asked == ["auto", "torch", "triton"]
