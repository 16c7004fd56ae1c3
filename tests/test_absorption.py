"""The products of absorption against float64 einsums, their rounding, their memory, and the figures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mla_convert import absorption
from mla_convert.errors import FormatError, MLAConvertError, UsageError
from mla_convert.forms import choose_form, reads
from mla_convert.geometry import MLAGeometry
from mla_convert.rounding import Rounding

# name: D, H, C, N, R, V, Q (0: no query rank)
SHAPES = {
    "tiny": (192, 8, 64, 32, 16, 32, 96),
    "no query rank": (64, 4, 32, 16, 8, 24, 0),
    "no rotary": (48, 3, 32, 16, 0, 16, 24),
    "one head": (40, 1, 24, 8, 4, 12, 20),
    "odd heads": (72, 7, 33, 9, 5, 11, 31),
    "both fused": (256, 2, 64, 128, 16, 128, 256),
}


def geometry(d: int, h: int, c: int, n: int, r: int, v: int, q: int) -> MLAGeometry:
    return MLAGeometry(d, h, c, n, r, v, q or None, (n + r) ** -0.5)


V3 = geometry(7168, 128, 512, 128, 64, 128, 1536)


@pytest.fixture(params=SHAPES, ids=SHAPES)
def g(request: pytest.FixtureRequest) -> MLAGeometry:
    return geometry(*SHAPES[request.param])


def weights(g: MLAGeometry, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """kv_b, q_b, o of the geometry's shapes."""
    make = torch.Generator().manual_seed(seed)
    shapes = (g.kv_b_shape, g.q_b_shape, g.o_shape)
    return tuple(torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def expected_qk(kv_b: Tensor, q_b: Tensor, g: MLAGeometry) -> Tensor:
    """[H, C + R, Q] in float64, one number at a time from the rows as they are stored."""
    rows = kv_b.double()
    query = q_b.double()
    out = torch.empty(g.num_heads, g.latent_width, g.query_rank, dtype=torch.float64)
    step, width = g.qk_nope_head_dim + g.v_head_dim, g.qk_head_dim
    for head in range(g.num_heads):
        keys = rows[head * step : head * step + g.qk_nope_head_dim]
        content = query[head * width : head * width + g.qk_nope_head_dim]
        out[head, : g.kv_lora_rank] = torch.einsum("nc,nq->cq", keys, content)
        out[head, g.kv_lora_rank :] = query[head * width + g.qk_nope_head_dim : (head + 1) * width]
    return out


def expected_ov(kv_b: Tensor, o: Tensor, g: MLAGeometry) -> Tensor:
    """[D, H, C] in float64."""
    step = g.qk_nope_head_dim + g.v_head_dim
    heads = [kv_b.double()[(h + 1) * step - g.v_head_dim : (h + 1) * step] for h in range(g.num_heads)]
    columns = o.double().split(g.v_head_dim, dim=1)
    return torch.stack([torch.einsum("dv,vc->dc", w_o, w_uv) for w_o, w_uv in zip(columns, heads, strict=True)], dim=1)


def rounding_bound(left: Tensor, right: Tensor, terms: int, stored: torch.dtype, wide: torch.dtype) -> Tensor:
    """Largest error of Σ left·right in ``wide``, (terms + 1) half units of ``wide`` and one of ``stored``."""
    magnitude = left.abs() @ right.abs()
    unit = torch.finfo(wide).eps / 2 * (terms + 1) + torch.finfo(stored).eps / 2
    return unit * magnitude + torch.finfo(stored).smallest_normal * torch.finfo(stored).eps


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_fused_products_match_float64(g: MLAGeometry, source: torch.dtype, stored: torch.dtype) -> None:
    kv_b, q_b, o = weights(g, source)
    w_uk, w_uv = absorption.split_kv_b(kv_b, g)
    wide = torch.float64 if source == torch.float64 else torch.float32
    qk = absorption.fuse_qk(w_uk, q_b, g, stored)
    ov = absorption.fuse_ov(w_uv, o, g, stored)
    assert qk.dtype == ov.dtype == stored
    assert qk.shape == (g.num_heads * g.latent_width, g.query_rank) and ov.shape == (
        g.hidden_size,
        g.num_heads * g.kv_lora_rank,
    )
    assert qk.is_contiguous() and ov.is_contiguous()

    heads = qk.double().view(g.num_heads, g.latent_width, g.query_rank)
    reference = expected_qk(kv_b, q_b, g)
    content = q_b.double().view(g.num_heads, g.qk_head_dim, -1)[:, : g.qk_nope_head_dim]
    bound = rounding_bound(w_uk.double().mT, content, g.qk_nope_head_dim, stored, wide)
    assert ((heads - reference)[:, : g.kv_lora_rank].abs() <= bound).all()
    rotary = q_b.view(g.num_heads, g.qk_head_dim, -1)[:, g.qk_nope_head_dim :]
    assert torch.equal(qk.view(g.num_heads, g.latent_width, -1)[:, g.kv_lora_rank :], rotary.to(stored))

    w_o = o.double().view(g.hidden_size, g.num_heads, g.v_head_dim).transpose(0, 1)
    bound = rounding_bound(w_o, w_uv.double(), g.v_head_dim, stored, wide).transpose(0, 1)
    error = ov.double().view(g.hidden_size, g.num_heads, g.kv_lora_rank) - expected_ov(kv_b, o, g)
    assert (error.abs() <= bound).all()


def test_attention_is_the_same_with_either_order_of_brackets(g: MLAGeometry) -> None:
    """One new token against 9 cached ones: expanded, factored and fused, in float64."""
    kv_b, q_b, o = weights(g, torch.float64)
    w_uk, w_uv = absorption.split_kv_b(kv_b, g)
    make = torch.Generator().manual_seed(1)
    latent = torch.randn(9, g.kv_lora_rank, generator=make, dtype=torch.float64)
    k_rope = torch.randn(9, g.qk_rope_head_dim, generator=make, dtype=torch.float64)
    x = torch.randn(g.query_rank, generator=make, dtype=torch.float64) / g.query_rank**0.5

    query = (q_b @ x).view(g.num_heads, g.qk_head_dim)
    q_nope, q_rope = query[:, : g.qk_nope_head_dim], query[:, g.qk_nope_head_dim :]
    key = torch.cat([torch.einsum("hnc,tc->htn", w_uk, latent), k_rope.expand(g.num_heads, *k_rope.shape)], dim=-1)
    value = torch.einsum("hvc,tc->htv", w_uv, latent)
    p = torch.softmax(g.scale * torch.einsum("hk,htk->ht", query, key), dim=-1)
    expanded = o @ torch.einsum("ht,htv->hv", p, value).flatten()

    def absorbed(q_latent: Tensor, rope: Tensor) -> Tensor:
        p = torch.softmax(g.scale * (q_latent @ latent.T + rope @ k_rope.T), dim=-1)
        return p @ latent  # [H, C]

    average = absorbed(torch.einsum("hnc,hn->hc", w_uk, q_nope), q_rope)
    factored = o @ torch.einsum("hvc,hc->hv", w_uv, average).flatten()
    lifted = (absorption.fuse_qk(w_uk, q_b, g, torch.float64) @ x).view(g.num_heads, g.latent_width)
    average = absorbed(lifted[:, : g.kv_lora_rank], lifted[:, g.kv_lora_rank :])
    fused = absorption.fuse_ov(w_uv, o, g, torch.float64) @ average.flatten()
    torch.testing.assert_close(factored, expanded, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(fused, expanded, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_are_exact_views_and_exact_rows(g: MLAGeometry, dtype: torch.dtype) -> None:
    kv_b, _, _ = weights(g, dtype)
    w_uk, w_uv = absorption.split_kv_b(kv_b, g)
    assert w_uk.untyped_storage().data_ptr() == kv_b.untyped_storage().data_ptr() == w_uv.untyped_storage().data_ptr()
    rows = kv_b.split([g.qk_nope_head_dim, g.v_head_dim] * g.num_heads)
    k_b, v_b = absorption.slice_rows(w_uk, dtype), absorption.slice_rows(w_uv, dtype)
    assert torch.equal(k_b.view(torch.uint8), torch.cat(rows[0::2]).view(torch.uint8))
    assert torch.equal(v_b.view(torch.uint8), torch.cat(rows[1::2]).view(torch.uint8))
    assert k_b.is_contiguous() and k_b.shape == (g.num_heads * g.qk_nope_head_dim, g.kv_lora_rank)
    assert k_b.data_ptr() != kv_b.data_ptr() or k_b.numel() == 0 or g.num_heads == 1


def test_rounding_figures_are_those_of_the_whole_tensor(g: MLAGeometry) -> None:
    kv_b, q_b, _ = weights(g, torch.float32)
    w_uk, _ = absorption.split_kv_b(kv_b, g)
    rounding = Rounding("x")
    stored = absorption.fuse_qk(w_uk, q_b, g, torch.bfloat16, rounding).double()
    reference = expected_qk(kv_b, q_b, g).flatten(0, 1)
    error = stored - reference
    assert rounding.largest == pytest.approx(float(error.abs().max() / reference.abs().max()), rel=1e-3)
    assert rounding.frobenius == pytest.approx(float(error.norm() / reference.norm()), rel=1e-3)
    assert 0 < rounding.largest <= 2**-8

    exact = Rounding("x")
    absorption.fuse_qk(w_uk, q_b, g, torch.float32, exact)
    assert exact.largest == exact.frobenius == 0.0


def test_cast_slices_are_rounded_once_and_measured(g: MLAGeometry) -> None:
    kv_b, _, _ = weights(g, torch.float32)
    _, w_uv = absorption.split_kv_b(kv_b, g)
    rounding = Rounding("x")
    v_b = absorption.slice_rows(w_uv, torch.float16, rounding)
    assert torch.equal(v_b, w_uv.flatten(0, 1).half())
    assert 0 < rounding.largest <= 2**-11 and 0 < rounding.frobenius <= 2**-11


def test_products_are_not_rounded_twice_or_accumulated_in_16_bits() -> None:
    """1 + 2^-9 + … summed over N terms: bfloat16 accumulation would stay at 1, float32 does not."""
    g = geometry(8, 1, 4, 128, 0, 128, 8)
    w_uk = torch.full((1, 128, 4), 2**-9, dtype=torch.bfloat16)
    w_uk[:, 0] = 1.0
    q_b = torch.ones(128, 8, dtype=torch.bfloat16)
    assert torch.equal(
        absorption.fuse_qk(w_uk, q_b, g, torch.float32), torch.full((4, 8), 1 + 127 * 2**-9, dtype=torch.float32)
    )


@pytest.mark.parametrize("api", ["one setting", "per backend"])
def test_lowered_matmul_precision_does_not_reach_the_products(api: str) -> None:
    g = geometry(*SHAPES["both fused"])
    kv_b, q_b, _ = weights(g, torch.float32)
    w_uk, _ = absorption.split_kv_b(kv_b, g)
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        if api == "one setting":
            torch.set_float32_matmul_precision("medium")
        else:
            backend.fp32_precision = "bf16"
        lowered = absorption.fuse_qk(w_uk, q_b, g, torch.float32)
    finally:
        if api == "one setting":
            torch.set_float32_matmul_precision("highest")
        backend.fp32_precision = before
    reference = expected_qk(kv_b, q_b, g).flatten(0, 1)
    assert torch.equal(lowered, reference.float()), "float64 products rounded once"


@pytest.mark.parametrize(
    ("shape", "forms"),
    [
        ((7168, 128, 512, 128, 64, 128, 1536), ("factored", "factored")),  # V3
        ((2048, 16, 512, 128, 64, 128, 0), ("factored", "factored")),  # V2-Lite
        ((256, 2, 64, 128, 16, 128, 256), ("fused", "fused")),
        ((256, 2, 64, 128, 16, 32, 256), ("fused", "factored")),
        ((256, 2, 64, 32, 16, 128, 256), ("factored", "fused")),
        ((64, 2, 64, 32, 16, 32, 64), ("factored", "factored")),  # C·Q = N·(C + Q): a tie
    ],
    ids=["V3", "V2-Lite", "both", "key side", "value side", "tie"],
)
def test_choice_of_form(shape: tuple[int, ...], forms: tuple[str, str]) -> None:
    choice = choose_form(geometry(*shape))
    assert (choice.qk, choice.vo) == forms


def test_figures_of_deepseek_v3() -> None:
    figures = reads(V3)
    assert (figures.qk.factored, figures.qk.fused) == (33_554_432, 100_663_296)
    assert (figures.vo.factored, figures.vo.fused) == (125_829_120, 469_762_048)


def test_figures_count_the_stored_numbers(g: MLAGeometry) -> None:
    kv_b, q_b, o = weights(g, torch.float32)
    w_uk, w_uv = absorption.split_kv_b(kv_b, g)
    figures = reads(g)
    rotary = g.num_heads * g.qk_rope_head_dim * g.query_rank
    assert figures.qk.fused == absorption.fuse_qk(w_uk, q_b, g, torch.float32).numel() - rotary
    assert figures.qk.factored == absorption.slice_rows(w_uk, torch.float32).numel() + q_b.numel() - rotary
    assert figures.vo.fused == absorption.fuse_ov(w_uv, o, g, torch.float32).numel()
    assert figures.vo.factored == absorption.slice_rows(w_uv, torch.float32).numel() + o.numel()


WRONG = {
    "kv_b": lambda g, kv_b, q_b, o: absorption.split_kv_b(kv_b[:-1], g),
    "kv_b transposed": lambda g, kv_b, q_b, o: absorption.split_kv_b(kv_b.T, g),
    "q_b": lambda g, kv_b, q_b, o: absorption.fuse_qk(absorption.split_kv_b(kv_b, g)[0], q_b[:, 1:], g, torch.float32),
    "w_uk": lambda g, kv_b, q_b, o: absorption.fuse_qk(kv_b, q_b, g, torch.float32),
    "o": lambda g, kv_b, q_b, o: absorption.fuse_ov(absorption.split_kv_b(kv_b, g)[1], o[1:], g, torch.float32),
    "w_uv": lambda g, kv_b, q_b, o: absorption.fuse_ov(kv_b, o, g, torch.float32),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_name_both_shapes(case: str) -> None:
    g = geometry(*SHAPES["tiny"])
    with pytest.raises(UsageError, match=r"has shape \[.*\]; the config's dimensions make it \[.*\]"):
        WRONG[case](g, *weights(g, torch.float32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    g = geometry(*SHAPES["tiny"])
    kv_b, q_b, _ = weights(g, torch.float32)
    w_uk, _ = absorption.split_kv_b(kv_b, g)
    with pytest.raises(UsageError, match="dequantize"):
        absorption.fuse_qk(w_uk.to(dtype), q_b, g, torch.float32)
    with pytest.raises(UsageError, match="reads and writes bfloat16"):
        absorption.fuse_qk(w_uk, q_b, g, dtype)


def test_overflow_of_the_stored_dtype_is_an_error() -> None:
    g = geometry(*SHAPES["tiny"])
    kv_b, q_b, o = weights(g, torch.float32)
    w_uk, w_uv = absorption.split_kv_b(kv_b * 300, g)
    for product in (
        lambda: absorption.fuse_qk(w_uk, q_b * 300, g, torch.float16, Rounding("layer 3 qk")),
        lambda: absorption.fuse_ov(w_uv, o * 300, g, torch.float16, Rounding("layer 3 qk")),
        lambda: absorption.slice_rows(w_uv * 300, torch.float16, Rounding("layer 3 qk")),
    ):
        with pytest.raises(UsageError, match=r"layer 3 qk: .* float16 ends at 6.55e\+04; store bfloat16"):
            product()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_no_dtype_holds_is_not_sent_to_another(dtype: torch.dtype) -> None:
    wide = torch.full((1, 2, 3), 1e200, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"largest magnitude is 1e\+200, and .*; no dtype that is stored reaches"):
        absorption.slice_rows(wide, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sources_that_are_not_finite_are_refused(bad: float) -> None:
    g = geometry(*SHAPES["tiny"])
    kv_b, q_b, _ = weights(g, torch.float32)
    kv_b[0, 0] = bad
    with pytest.raises(FormatError, match="not finite") as caught:
        absorption.fuse_qk(absorption.split_kv_b(kv_b, g)[0], q_b, g, torch.float32)
    assert isinstance(caught.value, MLAConvertError)


MEASURE = """
import re, resource, sys
import torch
from mla_convert import absorption
from mla_convert.geometry import MLAGeometry
torch.set_num_threads(1)
g = MLAGeometry(1024, 64, 256, 64, 32, 64, 768, 1.0)
q_b, w_uk = torch.ones(g.q_b_shape, dtype=torch.bfloat16), torch.ones(64, 64, 256, dtype=torch.bfloat16)
o, w_uv = torch.ones(g.o_shape, dtype=torch.bfloat16), torch.ones(64, 64, 256, dtype=torch.bfloat16)
small = MLAGeometry(1024, 1, 256, 64, 32, 64, 768, 1.0)
def peak():
    try:  # ru_maxrss starts at the parent's on Linux
        return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
# one head first: what the libraries keep for themselves is then there
absorption.fuse_qk(w_uk[:1], q_b[:96].clone(), small, torch.bfloat16)
absorption.fuse_ov(w_uv[:1], o[:, :64].clone(), small, torch.bfloat16)
before = peak()
if sys.argv[1] == "qk":
    absorption.fuse_qk(w_uk, q_b, g, torch.bfloat16)
else:
    absorption.fuse_ov(w_uv, o, g, torch.bfloat16)
print(peak() - before)
"""


@pytest.mark.parametrize("side", ["qk", "ov"])
def test_memory_is_the_output_and_one_head(side: str) -> None:
    """Peak resident memory of a process: the output, and a few float32 copies of one head; never of all heads."""
    found = subprocess.run([sys.executable, "-c", MEASURE, side], capture_output=True, text=True, check=True)
    out = 2 * (64 * (256 + 32) * 768 if side == "qk" else 1024 * 64 * 256)
    head = 4 * 256 * (768 if side == "qk" else 1024)
    # product, its magnitude, the stored head and its error are alive at once; the allocator keeps as much again
    allowed = out + 8 * head
    assert allowed < out * 2, "the bound must lie below what float32 copies of all heads would take"
    assert out * 0.9 < int(found.stdout) < allowed
