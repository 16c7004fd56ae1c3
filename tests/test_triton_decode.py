"""The Triton kernel in its interpreter against the float64 reference: float16 and float32, everything poisoned.

bfloat16 is left to machines with a GPU: the interpreter multiplies its bit patterns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import hypothesis
import hypothesis.strategies as st
import interpreter  # noqa: F401  # before the kernel
import models
import pytest
import torch
from decode_cases import HOSTILE, Case, build
from test_decode import assert_close, run
from transformers import DynamicCache, StaticCache

import mla_convert
from mla_convert.errors import UsageError
from mla_convert.kernels import dispatch, merge, triton_decode
from mla_convert.kernels.arguments import DecodeArguments, check
from mla_convert.kernels.device import on_device
from mla_convert.kernels.tiles import Tile

SMALL = Tile(16, 16, 1, 1, split_tokens=32)
TURNED = Tile(16, 16, 1, 1, transposed=True, split_tokens=32)
WHOLE = Tile(32, 32, 1, 1, split_tokens=4096)
TILES = {"small": SMALL, "transposed": TURNED, "whole": WHOLE}

#: Chosen so that each pair of dimensions of the grid meets at least once.
CASES = [
    *HOSTILE,
    Case(latent=512, rope=64, heads=12, lens=(64, 140), q_len=8),
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


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case: Case, tile: Tile) -> None:
    args = build(case)
    assert_close(args, *launched(args, tile))


@pytest.mark.parametrize("tile", [SMALL, TURNED], ids=["small", "transposed"])
@pytest.mark.parametrize("codes", [None, "fp8/group"])
def test_reloading_the_queries_changes_nothing(codes: str | None, tile: Tile) -> None:
    args = build(Case(latent=192, codes=codes, q_len=2, heads=20, lens=(33, 70)))
    tile = dataclasses.replace(tile, piece=64)
    found = launched(args, dataclasses.replace(tile, reload_query=True))
    assert all(torch.equal(a, b) for a, b in zip(found, launched(args, tile), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "q_len"), list(itertools.product((1, 3, 6, 12, 16, 32, 63, 64, 126, 128), (1, 2, 4, 8)))
)
@pytest.mark.parametrize("dims", [(512, 64), (256, 64), (256, 32), (128, 32), (1024, 64), (192, 32), (64, 0)], ids=str)
def test_whole_grid(heads: int, q_len: int, dims: tuple[int, int]) -> None:
    """Every head count, number of new tokens and width; lengths, pages, dtypes and codes in turn."""
    turn = itertools.cycle(
        itertools.product((1, 16, 64), (torch.float32, torch.float16), (None, "fp8/group", "int8/token", "fp8/tensor"))
    )
    lens = [(0, 1), (20, 63), (64, 65), (140, 33)]
    for i, pair in enumerate(lens):
        page, dtype, codes = next(itertools.islice(turn, (heads + q_len + dims[0]) % 7 + i, None))
        layout = ("joint", "paged", "strided", "separate")[(i + heads) % 4]
        case = Case(
            heads=heads,
            q_len=q_len,
            latent=dims[0],
            rope=dims[1],
            lens=pair,
            layout=layout,
            page=page,
            dtype=dtype,
            codes=codes,
            masked=(i + q_len) % 3 == 0,
        )
        args = build(case)
        assert_close(args, *launched(args, (SMALL, TURNED, WHOLE)[i % 3]))


@pytest.mark.slow
def test_long_history() -> None:
    args = build(Case(batch=1, heads=16, lens=(4096,), latent=512, rope=64))
    assert_close(args, *launched(args, Tile(16, 64, 1, 1, split_tokens=512)))


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


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(cases(), st.sampled_from(list(TILES.values())))
def test_any_case(case: Case, tile: Tile) -> None:
    args = build(case)
    assert_close(args, *launched(args, tile))


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(cases(), st.randoms(use_true_random=False))
def test_permutations_of_heads_and_sequences(case: Case, random: object) -> None:
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


@pytest.mark.parametrize("tile", [SMALL, TURNED], ids=["small", "transposed"])
def test_bit_equal_whatever_is_around(tile: Tile) -> None:
    """Alone or in a batch, any page size, any stride, more capacity behind, run after run."""
    case = Case(batch=3, lens=(65, 20, 110), q_len=2, heads=5, rope=16)
    args = build(case)
    out, lse = launched(args, tile)
    assert all(torch.equal(a, b) for a, b in zip(launched(args, tile), (out, lse), strict=True))
    for layout, page in (("separate", 16), ("strided", 16), ("paged", 1), ("paged", 13), ("paged", 64)):
        other = build(dataclasses.replace(case, layout=layout, page=page))
        other = dataclasses.replace(other, q_latent=args.q_latent, q_rope=args.q_rope)
        found = launched(other, tile)
        assert torch.equal(found[0], out) and torch.equal(found[1], lse), (layout, page)
    for b in range(3):
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


def test_permuted_pages_change_nothing() -> None:
    args = build(Case(layout="paged", page=8, lens=(40, 50), q_len=2))
    assert args.block_table is not None
    order = torch.randperm(args.latent.shape[0], generator=torch.Generator().manual_seed(1))
    inverse = torch.argsort(order).to(torch.int32)
    used = args.block_table < args.latent.shape[0]
    table = torch.where(used, inverse[torch.where(used, args.block_table, 0).long()], args.block_table)
    moved = dataclasses.replace(args, latent=args.latent[order], k_rope=args.k_rope[order], block_table=table)
    for a, b in zip(launched(moved), launched(args), strict=True):
        assert torch.equal(a, b)


def test_parts_merge_into_the_whole() -> None:
    args = build(Case(batch=1, lens=(90,), sinks=True))
    latent, k_rope = args.latent[:, :90], args.k_rope[:, :90]
    whole = run(args, latent=latent, k_rope=k_rope, kv_lens=None, backend="triton")
    a = run(args, latent=latent[:, :37], k_rope=k_rope[:, :37], kv_lens=None, backend="triton")
    b = run(args, latent=latent[:, 37:], k_rope=k_rope[:, 37:], kv_lens=None, sinks=None, backend="triton")
    torch.testing.assert_close(merge(*a, *b), whole, rtol=1e-5, atol=1e-6)


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


def test_int4_is_left_to_pytorch() -> None:
    args = build(Case(codes="int4/token"))
    with pytest.raises(UsageError, match="int4"):
        run(args, backend="triton")
    assert dispatch.choose_backend("auto", torch.device("cuda"), torch.uint8) == "torch"
    assert dispatch.choose_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert dispatch.choose_backend("auto", torch.device("cpu")) == "torch"


def test_forcing_triton_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_interpreted", lambda: False)
    with pytest.raises(UsageError, match="runs on CUDA and ROCm devices, found cpu"):
        dispatch.choose_backend("triton", torch.device("cpu"))
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(UsageError, match="needs the triton package"):
        dispatch.choose_backend("triton", torch.device("cuda"))
    assert dispatch.choose_backend("auto", torch.device("cuda")) == "torch"


def test_empty_inputs() -> None:
    args = build(Case())
    nothing = dataclasses.replace(args, q_latent=args.q_latent[:, :0], q_rope=args.q_rope[:, :0])
    out, lse = triton_decode.decode(check(nothing))
    assert out.shape == (2, 0, 3, 64) and lse.shape == (2, 0, 3)


def test_warming_up_runs_every_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part and several, with and without a mask, in the model's dims."""
    launches: list[DecodeArguments] = []
    launch = triton_decode.launch
    monkeypatch.setattr(triton_decode, "launch", lambda args, tile: launches.append(args) or launch(args, tile))
    model = models.deepseek_v3()
    with mla_convert.patched(model, backend="triton") as handle:
        handle.warmup()
    split = triton_decode.tile_for(launches[0]).split_tokens
    assert [(a.kv_len > split, a.mask is not None, a.kv_lens is not None) for a in launches] == [
        (False, False, False),
        (False, True, True),
        (True, False, False),
        (True, True, True),
    ]
    assert {(a.q_latent.shape[2], a.q_latent.shape[3], a.q_rope.shape[3]) for a in launches} == {(3, 40, 8)}
    with mla_convert.patched(model, backend="torch") as handle:
        handle.warmup()
    assert len(launches) == 4


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
    """A history of one token is its own average."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes.masked_fill(codes.view(kind).float().isnan(), 0).view(kind)
    query = torch.zeros(1, 1, 1, 256)
    args = DecodeArguments(query, query[..., :0], codes.view(1, 1, 256), query[0, :, :, :0], 1.0, latent_scale=1.0)
    assert torch.equal(launched(args)[0].flatten(), codes.float())


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
