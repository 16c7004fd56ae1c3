"""``absorbed_decode`` in PyTorch against the float64 reference, with everything around it poisoned."""

from __future__ import annotations

import dataclasses
import inspect

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from decode_bounds import bounds, logit_rounding
from decode_cases import HOSTILE, Case, build, flashmla_problem, flashmla_rows

from mla_convert.errors import UsageError
from mla_convert.kernels import absorbed_decode, dense, flashmla_views, merge, torch_decode
from mla_convert.kernels.arguments import DecodeArguments
from mla_convert.kernels.history import decode_latent
from mla_convert.kernels.reference import (
    absorbed_decode_reference,
    decode_by_definition,
    expanded_attention,
    visible_positions,
)

CASES = [
    *HOSTILE,
    Case(latent=512, rope=64, heads=12, lens=(64, 300), batch=2, q_len=8),
    Case(masked=True, q_len=3, lens=(30, 30)),
    Case(layout="paged", codes="int8/token", lens=(33, 0)),
    *[Case(codes=f"{kind}/{spread}") for kind in ("fp8", "int8", "int4") for spread in ("tensor", "token", "group")],
    Case(batch=1, lens=(1500,), heads=4, q_len=1),
    Case(batch=1, lens=(1501,), heads=4, q_len=1, masked=True),
    Case(dtype=torch.float64, q_len=2),
    Case(dtype=torch.bfloat16, heads=16, latent=512, rope=64),
    Case(dtype=torch.bfloat16, masked=True, q_len=4, layout="paged"),
]


def run(args: DecodeArguments, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
    fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)} | changes
    return absorbed_decode(**fields)


def assert_close(args: DecodeArguments, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Errors within :func:`decode_bounds.bounds`, written so that a NaN fails."""
    limits = bounds(args)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(limits.exact_lse))
    error, lse_error = limits.errors(out, lse)
    assert error <= limits.out and lse_error <= limits.lse, (error, lse_error, limits.out, limits.lse)
    assert lse.dtype == torch.float32 and out.dtype == args.q_latent.dtype


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case: Case) -> None:
    args = build(case)
    assert_close(args, *run(args))


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype != torch.float64], ids=str)
def test_products_against_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of other devices and of compiled code: shapes do not depend on values, no flash kernel."""
    for module in (torch_decode, dense):
        monkeypatch.setattr(module, "being_traced", lambda: True)
    args = build(case)
    assert_close(args, *run(args))


def test_what_is_chosen_but_not_seen_is_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are −1, past the end or masked: bit for bit as though they had never been chosen."""
    args = build(Case(batch=1, lens=(40,), q_len=2, layout="separate"))
    mask = torch.ones(1, 2, args.kv_len, dtype=torch.bool)
    mask[..., 3:6] = False
    chosen = torch.tensor([[[7, -1, 3, 38, 44, 0, 5, 12], [4, 9, 46, 39, -1, 2, 3, 20]]])
    seen = torch.tensor([[[7, 38, 0, 12], [9, 39, 2, 20]]])
    widths, attend = [], torch_decode.attend

    def noting(q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, *rest: object) -> object:
        widths.append(latent.shape[1])
        return attend(q_latent, q_rope, latent, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_decode, "attend", noting)
    found, alone = run(args, mask=mask, indices=chosen), run(args, mask=mask, indices=seen)
    assert widths == [4, 4] and all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    assert_close(dataclasses.replace(args, mask=mask, indices=seen), *found)


@pytest.mark.parametrize(
    "args",
    [
        flashmla_problem(paged=True),
        build(Case(codes="int8/tensor", layout="paged", lens=(3, 0))),
        build(Case(codes="fp8/group", layout="strided", dtype=torch.float16)),
    ],
    ids=["flashmla", "int8", "fp8"],
)
def test_bounds_know_nothing_of_what_lies_past_the_end(args: DecodeArguments) -> None:
    """Whatever numbers stand there, a wrong result is refused, and bounds that would let it pass are none."""
    past = {"latent": args.latent.clone(), "k_rope": args.k_rope.clone()}
    lens, table = args.kv_lens, args.block_table
    assert lens is not None
    for b, length in enumerate(lens.tolist()):
        for stored in past.values():
            if table is None:
                stored[b, length:].view(torch.uint8).fill_(0x7E)
            elif length:
                page = stored[int(table[b, (length - 1) // stored.shape[1]])]
                page[(length - 1) % stored.shape[1] + 1 :].view(torch.uint8).fill_(0x7E)
    other = dataclasses.replace(args, **past)
    assert logit_rounding(other) == logit_rounding(args) < 1e-3
    out, lse = run(args)
    assert_close(other, out, lse)
    for wrong in ((out * 0 + 2 * out.abs().max(), lse), (out, lse + 100)):
        with pytest.raises(AssertionError):
            assert_close(other, *wrong)
    huge = dataclasses.replace(args, q_latent=args.q_latent * 1e4, q_rope=args.q_rope * 1e4)
    with pytest.raises(AssertionError, match="would pass"):
        bounds(dataclasses.replace(huge, scale=1e6))


def test_the_definition_takes_the_same_arguments() -> None:
    ours, reference = (list(inspect.signature(f).parameters.values()) for f in (absorbed_decode, decode_by_definition))
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in reference[:-1]]
    assert (ours[-1].name, reference[-1].name) == ("backend", "dtype")
    for case in (Case(masked=True, sinks=True), Case(indices=9, codes="fp8/group", layout="paged")):
        args = build(case)
        fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
        tensors = [fields.pop(name) for name in ("q_latent", "q_rope", "latent", "k_rope")]
        assert_close(args, *absorbed_decode(*tensors, **fields))
        found, wanted = decode_by_definition(*tensors, **fields), absorbed_decode_reference(args)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_expanded_form_is_the_same() -> None:
    """Lifting the query and the average, as mla.md's identities say, equals rebuilding keys and values."""
    generator = torch.Generator().manual_seed(0)
    b, s, h, n, r, c, v, t = 2, 3, 5, 12, 8, 24, 10, 19

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q_nope, q_rope, latent, k_rope = rand(b, s, h, n), rand(b, s, h, r), rand(b, t, c), rand(b, t, r)
    w_uk, w_uv = rand(h, n, c), rand(h, v, c)
    visible = torch.arange(t) < torch.arange(t - s + 1, t + 1)[:, None]
    expanded = expanded_attention(
        q_nope, q_rope, latent, k_rope, w_uk, w_uv, scale=0.3, visible=visible.expand(b, s, t)
    )
    q_latent = torch.einsum("bshn,hnc->bshc", q_nope, w_uk)
    out, _ = absorbed_decode(q_latent, q_rope, latent, k_rope, scale=0.3)
    absorbed = torch.einsum("bshc,hvc->bshv", out, w_uv)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-12, atol=1e-12)


def test_lengths_beyond_the_cache_leave_everything_to_the_mask() -> None:
    args = build(Case(lens=(40, 40), q_len=4))
    latent, k_rope = args.latent[:, :40], args.k_rope[:, :40]
    mask = torch.rand(2, 4, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    open_args = dataclasses.replace(args, latent=latent, k_rope=k_rope, mask=mask, kv_lens=torch.tensor([43, 43]))
    out, lse = run(open_args)
    for b in range(2):
        for s in range(4):
            assert torch.equal(visible_positions(open_args, b, s), mask[b, s].nonzero()[:, 0])
    assert_close(open_args, out, lse)


def test_history_divided_among_threads_is_the_same() -> None:
    case = Case(batch=1, heads=4, lens=(2051,), masked=True)
    args = build(case)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert_close(args, *run(args))
        assert_close(dataclasses.replace(args, mask=None), *run(args, mask=None))
    finally:
        torch.set_num_threads(before)


def test_joint_rows_are_not_copied() -> None:
    rows = torch.randn(2, 9, 80)
    joint = dense._joint_rows(rows[..., :64], rows[..., 64:])
    assert joint.data_ptr() == rows.data_ptr() and torch.equal(joint, rows)
    apart = dense._joint_rows(rows[..., :64].clone(), rows[..., 64:])
    assert torch.equal(apart, rows)
    other = dense._joint_rows(rows[..., :63], rows[..., 64:79])
    assert torch.equal(other, torch.cat((rows[..., :63], rows[..., 64:79]), -1))


def test_merge_of_parts_is_the_whole() -> None:
    args = build(Case(batch=1, lens=(50,), dtype=torch.float64))
    latent, k_rope = args.latent[:, :50], args.k_rope[:, :50]
    whole, whole_lse = run(args, latent=latent, k_rope=k_rope, kv_lens=None)
    a = run(args, latent=latent[:, :13], k_rope=k_rope[:, :13], kv_lens=None)
    b = run(args, latent=latent[:, 13:], k_rope=k_rope[:, 13:], kv_lens=None)
    out, lse = merge(*a, *b)
    torch.testing.assert_close(out, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_merge_never_reads_an_empty_part() -> None:
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    nothing, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    torch.testing.assert_close(merge(out, lse, nothing, none), (out, lse))
    torch.testing.assert_close(merge(nothing, none, out, lse), (out, lse))
    empty, empty_lse = merge(nothing, none, nothing, none)
    assert torch.equal(empty, torch.zeros_like(out)) and torch.equal(empty_lse, none)


def test_logits_far_below_zero() -> None:
    """A model can have all logits near -1e5, where float32 resolves a log-sum-exp to 0.008 only."""
    before = torch.get_num_threads()
    latent, k_rope = torch.full((1, 1100, 64), 50.0), torch.randn(1, 1100, 16)
    try:
        torch.set_num_threads(2)
        out, lse = absorbed_decode(
            torch.full((1, 1, 3, 64), -400.0), torch.randn(1, 1, 3, 16), latent, k_rope, scale=0.1
        )
    finally:
        torch.set_num_threads(before)
    assert float(lse.max()) < -1e5
    torch.testing.assert_close(out, torch.full_like(out, 50.0))
    half = (out, lse - 0.7)
    torch.testing.assert_close(merge(*half, *half)[0], out)


def test_sinks_go_to_one_part_only() -> None:
    args = build(Case(batch=1, lens=(50,), sinks=True))
    latent, k_rope = args.latent[:, :50], args.k_rope[:, :50]
    whole = run(args, latent=latent, k_rope=k_rope, kv_lens=None)
    a = run(args, latent=latent[:, :13], k_rope=k_rope[:, :13], kv_lens=None)
    b = run(args, latent=latent[:, 13:], k_rope=k_rope[:, 13:], kv_lens=None, sinks=None)
    torch.testing.assert_close(merge(*a, *b), whole, rtol=1e-5, atol=1e-6)


def test_codes_by_definition() -> None:
    """int8: the code; int4: nibble minus 8, low first; FP8: PyTorch's own type. Scales: one, per token, per group."""
    int8 = torch.tensor([[[-127, 0, 5, 127]]], dtype=torch.int8)
    assert decode_latent(int8, 0.5, torch.float32).tolist() == [[[-63.5, 0.0, 2.5, 63.5]]]
    assert decode_latent(int8, torch.tensor([[2.0]]), torch.float32).tolist() == [[[-254.0, 0.0, 10.0, 254.0]]]
    groups = torch.tensor([[[2.0, 10.0]]])
    assert decode_latent(int8, groups, torch.float32).tolist() == [[[-254.0, 0.0, 50.0, 1270.0]]]
    int4 = torch.tensor([[[0x0F, 0x81]]], dtype=torch.uint8)
    assert decode_latent(int4, 1.0, torch.float32).tolist() == [[[7.0, -8.0, -7.0, 0.0]]]
    assert decode_latent(int4, groups, torch.float32).tolist() == [[[14.0, -16.0, -70.0, 0.0]]]
    fp8 = torch.tensor([[[1.5, -448.0]]]).to(torch.float8_e4m3fn)
    assert decode_latent(fp8, torch.tensor(2.0), torch.float32).tolist() == [[[3.0, -896.0]]]


def test_flashmla_rows() -> None:
    rows, codes, scales, rope = flashmla_rows()
    latent, latent_scale, k_rope = flashmla_views(rows)
    assert (
        torch.equal(latent.float(), codes.float()) and torch.equal(latent_scale, scales) and torch.equal(k_rope, rope)
    )
    for paged in (False, True):
        args = flashmla_problem(paged)
        assert_close(args, *run(args))
    with pytest.raises(UsageError, match="656"):
        flashmla_views(torch.zeros(2, 3, 655, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_rope": torch.zeros(2, 1, 3, 16).double()}, "q_rope must be"),
        ({"latent": torch.zeros(2, 72, 63)}, "latent must end in 64"),
        ({"latent": torch.zeros(2, 72, 64).double()}, "coded form"),
        ({"latent": torch.zeros(3, 72, 64), "k_rope": torch.zeros(3, 72, 16)}, "2 sequences, the cache 3"),
        ({"k_rope": torch.zeros(2, 71, 16)}, r"k_rope must be \[2, 72, 16\]"),
        ({"latent": torch.zeros(2, 72, 64, dtype=torch.int8)}, "latent_scale goes with codes"),
        ({"latent_scale": 1.0}, "latent_scale goes with codes"),
        ({"latent": torch.zeros(2, 72, 64, dtype=torch.int8), "latent_scale": torch.ones(2, 72, 5)}, "divide 64"),
        ({"kv_lens": torch.zeros(3, dtype=torch.int64)}, r"kv_lens must be \[2\]"),
        ({"kv_lens": torch.zeros(2)}, "int32 or int64"),
        ({"mask": torch.ones(2, 1, 71, dtype=torch.bool)}, r"mask must be \[2, 1, 72\]"),
        ({"mask": torch.ones(2, 1, 72)}, "bool"),
        ({"indices": torch.zeros(2, 2, 4, dtype=torch.int64)}, "indices must be"),
        ({"sinks": torch.zeros(4)}, r"sinks must be \[3\]"),
        ({"block_table": torch.zeros(3, 4, dtype=torch.int32)}, "block_table must be"),
        ({"backend": "cuda"}, "choose one of"),
        ({"scale": None}, "scale must be a finite number"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"q_rope": None}, "q_rope must be a dense tensor, found NoneType"),
        ({"kv_lens": [1, 2]}, "kv_lens must be a dense tensor, found list"),
        ({"latent_scale": "a"}, "latent_scale must be a dense tensor, found str"),
        ({"q_latent": torch.zeros(2, 1, 3, 0), "latent": torch.zeros(2, 72, 0)}, "C = 0"),
        (
            {
                "q_latent": torch.zeros(2, 1, 3, 5),
                "latent": torch.zeros(2, 72, 2, dtype=torch.uint8),
                "latent_scale": 1.0,
            },
            "C must be even",
        ),
        (
            {"latent": torch.zeros(0, 4, 64), "k_rope": torch.zeros(0, 4, 16), "block_table": torch.zeros(2, 3).int()},
            "one page",
        ),
    ],
)
def test_refuses(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(build(Case()), **changes)


def test_nothing_stored_and_nothing_chosen() -> None:
    """Empty histories, also with indices, give zeros and −inf: never a crash."""
    q_latent, q_rope = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 4)
    for indices in (None, torch.full((1, 2, 4), -1), torch.zeros(1, 2, 0, dtype=torch.int64)):
        out, lse = absorbed_decode(
            q_latent, q_rope, torch.randn(1, 0, 16), torch.randn(1, 0, 4), scale=0.2, indices=indices
        )
        assert torch.equal(out, torch.zeros_like(q_latent)) and bool(torch.isneginf(lse).all())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.integers(1, 3))
    return Case(
        batch=batch,
        q_len=draw(st.integers(1, 5)),
        heads=draw(st.sampled_from((1, 2, 3, 7))),
        latent=draw(st.sampled_from((8, 24, 64))),
        rope=draw(st.sampled_from((0, 4, 16))),
        lens=tuple(draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))),
        layout=draw(st.sampled_from(("joint", "separate", "strided", "paged"))),
        page=draw(st.integers(1, 17)),
        codes=draw(st.sampled_from((None, None, "int8/token", "int4/group"))),
        masked=draw(st.booleans()),
        indices=draw(st.sampled_from((0, 0, 5))),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(cases())
def test_any_case(case: Case) -> None:
    args = build(case)
    assert_close(args, *run(args))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(cases(), st.randoms(use_true_random=False))
def test_permuted_heads_and_sequences_permute_the_result(case: Case, random: object) -> None:
    args = build(case)
    out, lse = run(args)
    heads = torch.randperm(case.heads, generator=torch.Generator().manual_seed(case.seed))
    changes: dict[str, object] = {"q_latent": args.q_latent[:, :, heads], "q_rope": args.q_rope[:, :, heads]}
    if args.sinks is not None:
        changes["sinks"] = args.sinks[heads]
    again, lse_again = run(args, **changes)
    torch.testing.assert_close(again, out[:, :, heads], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_again, lse[:, :, heads], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entry", [-1, 10**6])
def test_page_numbers_that_are_used_are_pages(entry: int) -> None:
    """Refused by every backend and the reference on a CPU; entries past a sequence's end are nobody's business."""
    args = build(Case(layout="paged", page=4, lens=(9, 8)))
    assert args.block_table is not None and args.kv_lens is not None
    table = args.block_table.clone()
    run(args, block_table=table)
    table[1, 1] = entry
    for backend in ("torch", "triton"):
        with pytest.raises(UsageError, match=rf"block_table\[1, 1\] is {entry}, and the cache has pages 0 to"):
            run(args, block_table=table, backend=backend)
    with pytest.raises(UsageError, match="block_table"):
        absorbed_decode_reference(dataclasses.replace(args, block_table=table))
    table[1, 1] = args.block_table[1, 1]
    table[1, 2:] = entry
    out, _ = run(args, block_table=table)
    assert torch.equal(out, run(args)[0])
    with pytest.raises(UsageError, match=r"block_table\[0, 3\] is"):
        run(args, block_table=table, kv_lens=None)


MERGED = (torch.zeros(2, 3, 4), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("position", "given", "words"),
    [
        (0, None, "out_a must be a tensor, found NoneType"),
        (2, torch.zeros(2, 3, 5), r"out_a and out_b must be .* found \[2, 3, 4\] float32 and \[2, 3, 5\] float32"),
        (2, torch.zeros(1, 3, 4), "of one shape"),
        (2, torch.zeros(2, 3, 4, dtype=torch.float16), "in one floating dtype"),
        (1, torch.zeros(2, 3, 1), r"lse_a must be \[2, 3\] in float32"),
        (3, torch.zeros(3), r"lse_b must be \[2, 3\]"),
        (3, torch.zeros(2, 3, dtype=torch.bfloat16), r"found \[2, 3\] bfloat16"),
        (3, torch.zeros(2, 3, device="meta"), "lse_b is on meta, out_a on cpu"),
    ],
    ids=str,
)
def test_merge_refuses_what_does_not_fit(position: int, given: torch.Tensor, words: str) -> None:
    arguments: list[torch.Tensor] = [*MERGED, *MERGED]
    arguments[position] = given
    with pytest.raises(UsageError, match=f"merge: .*{words}"):
        merge(*arguments)
