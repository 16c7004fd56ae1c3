"""The Triton kernel in its interpreter against the float64 reference: float16 and float32, everything poisoned.

bfloat16 is left to machines with a GPU: the interpreter multiplies its bit patterns.
"""

from __future__ import annotations

import contextlib
import dataclasses

import hypothesis
import hypothesis.strategies as st
import interpreter  # noqa: F401  # before the kernel
import models
import pytest
import torch
from decode_cases import HOSTILE, Case, build, flashmla_problem
from decode_pairs import PAIRS, unmet
from test_decode import assert_close, run
from transformers import DynamicCache, StaticCache

import mla_convert
from mla_convert.kernels import merge, triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check
from mla_convert.kernels.device import on_device
from mla_convert.kernels.tiles import Tile

SMALL = Tile(16, 16, 1, 1, split_tokens=32)
TURNED = Tile(16, 16, 1, 1, transposed=True, split_tokens=32)
WHOLE = Tile(32, 32, 1, 1, split_tokens=4096)
TILES = {"small": SMALL, "transposed": TURNED, "whole": WHOLE}

#: Each two choices of a call meet at least once.
CASES = [
    *HOSTILE,
    *PAIRS,
    Case(latent=512, rope=64, heads=12, lens=(64, 70), q_len=3),
    Case(latent=96, rope=16, heads=6, q_len=3),
    Case(sinks=True, q_len=2, lens=(12, 70)),
    Case(indices=70, q_len=2, sinks=True, lens=(100, 0)),
    Case(layout="paged", page=7, codes="int8/token", lens=(33, 0)),
    *[Case(codes=f"{kind}/{spread}", q_len=2) for kind in ("fp8", "int8") for spread in ("tensor", "token", "group")],
    Case(latent=512, rope=64, codes="fp8/group", heads=4, layout="paged"),
    Case(batch=1, lens=(400,), heads=4),
    Case(dtype=torch.float16, codes="fp8/group", latent=128, layout="paged"),
    Case(dtype=torch.float16, masked=True, q_len=16, heads=2, lens=(16, 20)),
]


def launched(args: DecodeArguments, tile: Tile = SMALL) -> tuple[torch.Tensor, torch.Tensor]:
    return triton_decode.launch(check(args), tile)


def test_the_cases_bring_every_two_choices_together() -> None:
    """Whole grids of head counts, widths and pages are the slow tests'."""
    assert not list(unmet(CASES))
    assert all(list(unmet(case for case in CASES if case is not pair)) for pair in PAIRS)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case: Case, tile: Tile) -> None:
    args = build(case)
    assert_close(args, *launched(args, tile))


@pytest.mark.parametrize("tile", [SMALL, TURNED], ids=["small", "transposed"])
@pytest.mark.parametrize("codes", [None, "fp8/group"])
def test_reloading_the_queries_changes_nothing(codes: str | None, tile: Tile) -> None:
    args = build(Case(latent=192, codes=codes, q_len=2, heads=10, lens=(0, 40)))
    tile = dataclasses.replace(tile, piece=64)
    found = launched(args, dataclasses.replace(tile, reload_query=True))
    assert all(torch.equal(a, b) for a, b in zip(found, launched(args, tile), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 3))
    return Case(
        batch=batch,
        q_len=draw(st.integers(1, 4)),
        heads=draw(st.sampled_from((1, 2, 3, 7, 17))),
        latent=draw(st.sampled_from((8, 24, 64))),
        rope=draw(st.sampled_from((0, 4, 16))),
        lens=tuple(draw(st.lists(st.integers(0, 70), min_size=batch, max_size=batch))),
        layout=draw(st.sampled_from(("joint", "separate", "strided", "paged"))),
        page=draw(st.integers(1, 17)),
        codes=draw(st.sampled_from((None, None, "int8/token", "fp8/group", "fp8/tensor"))),
        masked=draw(st.booleans()),
        indices=draw(st.sampled_from((0, 0, 5))),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.float32, torch.float16))),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.slow
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(cases(), st.sampled_from(list(TILES.values())))
def test_any_case(case: Case, tile: Tile) -> None:
    args = build(case)
    assert_close(args, *launched(args, tile))


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(cases())
def test_permutations_of_heads_and_sequences(case: Case) -> None:
    """Bit-equal: no result depends on its neighbours."""
    args = build(case)
    out, lse = launched(args)
    gen = torch.Generator().manual_seed(case.seed)
    heads, batch = torch.randperm(case.heads, generator=gen), torch.randperm(case.batch, generator=gen)
    changes: dict[str, object] = {"q_latent": args.q_latent[:, :, heads], "q_rope": args.q_rope[:, :, heads]}
    if args.sinks is not None:
        changes["sinks"] = args.sinks[heads]
    again = launched(dataclasses.replace(args, **changes))  # type: ignore[arg-type]
    assert torch.equal(again[0], out[:, :, heads]) and torch.equal(again[1], lse[:, :, heads])
    changes = {}
    for name in ("q_latent", "q_rope", "kv_lens", "mask", "indices", "block_table"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)[batch]
    if args.block_table is None:
        changes |= {"latent": args.latent[batch], "k_rope": args.k_rope[batch]}
        if isinstance(args.latent_scale, torch.Tensor) and args.latent_scale.dim():
            changes["latent_scale"] = args.latent_scale[batch]
    again = launched(dataclasses.replace(args, **changes))  # type: ignore[arg-type]
    assert torch.equal(again[0], out[batch]) and torch.equal(again[1], lse[batch])


@pytest.mark.parametrize(
    ("tile", "sinks", "dtype"),
    [
        (SMALL, True, torch.float16),
        (TURNED, True, torch.float32),
        pytest.param(SMALL, False, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bit_equal_whatever_is_around(tile: Tile, sinks: bool, dtype: torch.dtype) -> None:
    """Alone or in a batch, any page size, any stride, more capacity behind, run after run."""
    case = Case(batch=2, lens=(20, 70), q_len=2, heads=5, rope=16, sinks=sinks, dtype=dtype)
    args = build(case)
    out, lse = launched(args, tile)
    assert all(torch.equal(a, b) for a, b in zip(launched(args, tile), (out, lse), strict=True))
    for layout, page in (("separate", 16), ("strided", 16), ("paged", 1), ("paged", 13), ("paged", 64)):
        other = build(dataclasses.replace(case, layout=layout, page=page))
        other = dataclasses.replace(other, q_latent=args.q_latent, q_rope=args.q_rope, sinks=args.sinks)
        found = launched(other, tile)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse), (layout, page)
    for b in range(2):
        one = {name: getattr(args, name)[b : b + 1] for name in ("q_latent", "q_rope", "latent", "k_rope", "kv_lens")}
        found = launched(dataclasses.replace(args, **one), tile)
        assert torch.equal(found[0], out[b : b + 1]) and torch.equal(found[1], lse[b : b + 1])
        short = {name: one[name][:, : case.lens[b]] for name in ("latent", "k_rope")}
        found = launched(dataclasses.replace(args, **one | short), tile)
        assert torch.equal(found[0], out[b : b + 1]) and torch.equal(found[1], lse[b : b + 1])


def test_sequences_that_share_a_prefix_page() -> None:
    args = build(Case(layout="paged", page=16, lens=(40, 50)))
    assert args.block_table is not None
    table = args.block_table.clone()
    table[1, 0] = table[0, 0]
    shared = dataclasses.replace(args, block_table=table)
    assert_close(shared, *launched(shared))


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(cases(), st.integers(0, 1000))
def test_permuted_pages_change_nothing(case: Case, seed: int) -> None:
    """Bit-equal wherever the pages of a sequence lie: codes and their scales too."""
    args = build(dataclasses.replace(case, layout="paged", page=min(case.page, 9)))
    table, pages = args.block_table, args.latent.shape[0]
    assert table is not None
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    used = table < pages
    places = torch.where(used, torch.argsort(order).to(torch.int32)[torch.where(used, table, 0).long()], table)
    changes: dict[str, object] = {"latent": args.latent[order], "k_rope": args.k_rope[order], "block_table": places}
    if isinstance(args.latent_scale, torch.Tensor) and args.latent_scale.dim():
        changes["latent_scale"] = args.latent_scale[order]
    moved = dataclasses.replace(args, **changes)  # type: ignore[arg-type]
    for a, b in zip(launched(moved), launched(args), strict=True):
        assert torch.equal(a, b)


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(cases(), st.floats(0, 1), st.sampled_from([SMALL, TURNED]))
def test_parts_merge_into_the_whole(case: Case, share: float, tile: Tile) -> None:
    """A history cut anywhere, at its ends too; each half has its own mask, and the first alone the sinks."""
    args = build(dataclasses.replace(case, batch=1, lens=(1 + max(case.lens),), q_len=1, layout="separate", indices=0))
    length = 1 + max(case.lens)
    cut = round(share * length)

    def part(start: int, stop: int) -> DecodeArguments:
        """Positions from ``start`` to ``stop`` as a history of their own."""
        scale = args.latent_scale
        if isinstance(scale, torch.Tensor) and scale.dim():
            scale = scale[:, start:stop]
        return dataclasses.replace(
            args,
            latent=args.latent[:, start:stop],
            k_rope=args.k_rope[:, start:stop],
            mask=None if args.mask is None else args.mask[..., start:stop],
            latent_scale=scale,
            kv_lens=None,
            sinks=args.sinks if start == 0 else None,
        )

    assert_close(part(0, length), *merge(*launched(part(0, cut), tile), *launched(part(cut, length), tile)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
def test_flashmla_rows(paged: bool, dtype: torch.dtype) -> None:
    """Codes, scales and rotary keys out of rows of 656 bytes, as they lie there."""
    args = flashmla_problem(paged, dtype)
    assert_close(args, *run(args, backend="triton"))
    for tile in (SMALL, TURNED):
        assert_close(args, *launched(args, tile))


def test_a_sink_of_minus_infinity_is_none() -> None:
    args = build(Case(sinks=True, lens=(0, 70)))
    silent = dataclasses.replace(args, sinks=torch.full_like(args.sinks, -torch.inf))  # type: ignore[arg-type]
    for tile in (SMALL, WHOLE):
        found, expected = launched(silent, tile), launched(dataclasses.replace(args, sinks=None), tile)
        torch.testing.assert_close(found, expected)


def test_logits_far_below_zero() -> None:
    """A model can have all logits near -1e5: sentinels lie below them."""
    args = build(Case(lens=(40, 33)))
    ones = torch.ones_like(args.latent)
    far = dataclasses.replace(
        args,
        q_latent=torch.full_like(args.q_latent, -400.0),
        latent=torch.where(args.latent.isnan(), args.latent, 50 * ones),
    )
    out, lse = launched(far)
    assert float(lse.max()) < -1e5
    torch.testing.assert_close(out, torch.full_like(out, 50.0))


def test_empty_inputs() -> None:
    args = build(Case())
    nothing = dataclasses.replace(args, q_latent=args.q_latent[:, :0], q_rope=args.q_rope[:, :0])
    out, lse = triton_decode.decode(check(nothing))
    assert out.shape == (2, 0, 3, 64) and lse.shape == (2, 0, 3)


@torch.inference_mode()
def test_a_patched_model_on_the_kernel() -> None:
    model, ids = models.deepseek_v3(), models.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    for form in ({}, {"form": "fused"}):
        with mla_convert.patched(model, backend="triton", **form) as handle:
            assert handle.describe().backend == "triton (interpreted)"
            for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=40)):
                logits = [model(ids[:, :8], attention_mask=mask[:, :8], cache=cache).logits]
                for at in (8, 10):
                    step = model(ids[:, at : at + 2], attention_mask=mask[:, : at + 2], cache=cache)
                    logits.append(step.logits)
                assert models.relative(torch.cat(logits, 1)[mask.bool()], expected) <= 1e-4


@torch.inference_mode()
def test_one_operator_in_compiled_code() -> None:
    """No graph break, and the same result as outside; shapes of the fake are those of the real one."""
    args = build(Case(masked=True, sinks=True))
    expected = run(args, backend="triton")

    def call(q_latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(args, q_latent=q_latent * 1, backend="triton")

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(args.q_latent)
    torch.testing.assert_close(found, expected)
    torch.library.opcheck(
        torch.ops.mla_convert.absorbed_decode.default,
        (
            args.q_latent,
            args.q_rope,
            args.latent,
            args.k_rope,
            0.1,
            args.kv_lens,
            args.mask,
            None,
            None,
            args.sinks,
            None,
            "triton",
        ),
    )


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_every_fp8_code_as_pytorch_reads_it(kind: torch.dtype) -> None:
    """A history of one token is its own average; a NaN would spoil the scores of others beside it, and comes alone."""
    codes = torch.arange(256, dtype=torch.uint8)
    nan = codes.view(kind).float().isnan()
    for some in (codes.masked_fill(nan, 0).view(1, 1, 256), codes[nan].view(-1, 1, 1)):
        query = torch.zeros(len(some), 1, 1, some.shape[2], dtype=torch.float16)
        latent = some.view(kind)
        args = DecodeArguments(query, query[..., :0], latent, query[:, 0, :, :0], 1.0, latent_scale=1.0)
        for found in (launched(args)[0], run(args, backend="torch")[0]):
            torch.testing.assert_close(found[:, 0].float(), latent.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's maximum
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_comes_out_as_nan(backend: str) -> None:
    """Of a query, or of a token that a query sees: in the output, the log-sum-exp and what they are merged to."""
    args = build(Case(lens=(70, 70), sinks=True))
    spoilt_query, spoilt_latent = args.q_latent.clone(), args.latent.clone()
    spoilt_query[0, 0, 1] = torch.nan
    spoilt_latent[0, 66] = torch.nan
    for sinks in (args.sinks, None):
        usual = run(args, sinks=sinks, backend=backend)
        out, lse = run(args, q_latent=spoilt_query, sinks=sinks, backend=backend)
        assert bool(out[0, 0, 1].isnan().all()) and bool(lse[0, 0, 1].isnan())
        assert bool(merge(out, lse, *usual)[0][0, 0, 1].isnan().all())
        for other in ((0, 0, 0), (0, 0, 2), (1, 0, 1)):
            assert torch.equal(out[other], usual[0][other]) and torch.equal(lse[other], usual[1][other])
        out, lse = run(args, latent=spoilt_latent, sinks=sinks, backend=backend)
        assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all()) and torch.equal(out[1], usual[0][1])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_is_masked_must_be_finite(backend: str) -> None:
    """Whatever finite numbers a masked token holds, the result is the same to the bit; a NaN comes out, as is said."""
    args = build(Case(masked=True, q_len=2, lens=(70, 40)))
    assert args.mask is not None
    mask = args.mask.clone()
    mask[:, :, (3, 33)] = False
    found = []
    for value in (0.0, 1e4, torch.nan):
        latent, k_rope = args.latent.clone(), args.k_rope.clone()
        latent[:, (3, 33)], k_rope[:, (3, 33)] = value, -value
        found.append(run(args, latent=latent, k_rope=k_rope, mask=mask, backend=backend))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not bool(found[0][0].isnan().any()) and bool(found[2][0].isnan().any())


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_nan_in_one_part_of_the_history(tile: Tile) -> None:
    args = build(Case(lens=(70, 70), q_len=2))
    latent = args.latent.clone()
    latent[0, 3] = torch.nan
    out, lse = launched(dataclasses.replace(args, latent=latent), tile)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all()) and not bool(out[1].isnan().any())


def test_a_launch_is_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several GPUs are, the current one need not be theirs; other devices are not asked."""
    entered: list[torch.device] = []

    class Entered(contextlib.nullcontext[None]):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            entered.append(device)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    for device in ("cpu", "meta", "cuda:1"):
        with on_device(torch.device(device)):
            pass
    assert entered == [torch.device("cuda:1")]
    monkeypatch.setattr(triton_decode, "on_device", lambda device: entered.append(device) or contextlib.nullcontext())
    triton_decode.decode(build(Case(latent=16, rope=0, heads=1, batch=1, lens=(3,))))
    assert entered[1:] == [torch.device("cpu")]
