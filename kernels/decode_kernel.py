"""The Triton kernel: attention of packed (new token, head) rows over a latent history shared by all heads.

One tile of the latent is loaded once and serves as key and as value. The history is divided every
``split_tokens``; each part is one program, and a second kernel joins the parts. Grids depend on
shapes only, lengths are read on the device: launches can be captured in a CUDA graph.

The rows of a program are the heads of one new token where ``PER_TOKEN`` holds (one new token, a mask or
indices: whether a position counts is then the same for all rows), else of all new tokens of a sequence.
"Sequence" in the code is what the rows belong to: a new token of one in the first case.

The latent's columns come in pieces of W, each with products and a result of its own: a piece lies inside one group
of scales, which then multiply scores and weights rather than the numbers, and few columns are in registers at once.

Shapes in comments: BR rows, BN tokens, BC and BP the padded widths of a piece and of the rotary key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_convert.kernels.kernel_steps import (
    LOWEST,
    along_rows,
    along_tokens,
    cache_places,
    code_factors,
    code_numbers,
    column_offsets,
    extent_of,
    join_sink,
    piece_columns,
    query_piece,
    row_scores,
    tile_positions,
)

_LN2 = tl.constexpr(0.6931471805599453)
#: Numbers that change while a text is generated. Triton would compile a kernel anew whenever one becomes, or ceases to
#: be, 1 or a multiple of 16; strides that loads depend on are given in units instead (``LATENT_UNIT``, ``ROPE_UNIT``).
CHANGING = (
    "kv_len", "q_len", "count", "parts", "latent_s0", "latent_s1", "rope_s0", "rope_s1", "scale_s0", "scale_s1",
    "mask_s0", "mask_s1", "table_s0",
)  # fmt: skip
#: Tensors of which single numbers are read: where in memory they begin makes no difference.
ANYWHERE = ("kv_lens", "mask", "block_table", "indices", "latent_scale", "sinks")


# fmt: off
@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def part_kernel(
    q_latent, q_rope,  # [B, S, H, C] and [B, S, H, R], contiguous
    latent, k_rope,  # [B or pages, T or page, C] and [..., R]
    out, lse,  # [sequences, parts, rows, C] and [sequences, parts, rows], contiguous
    kv_lens, mask, block_table, indices, latent_scale, sinks,
    scale,  # of the logits, times log2(e)
    kv_len, q_len, heads, count,  # T, S, H and K
    latent_s0, latent_s1, latent_s2, rope_s0, rope_s1, rope_s2,  # the first two in units
    scale_s0, scale_s1, scale_s2, mask_s0, mask_s1, mask_s2, table_s0,
    C: tl.constexpr, R: tl.constexpr, LATENT_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr,
    PAGE: tl.constexpr,  # tokens in a page, 0 without pages
    FORM: tl.constexpr, GROUP: tl.constexpr,  # numbers per scale (scale_s2 is 0 where groups share one), 0 for none
    FAR: tl.constexpr,  # the last column, rotary number or group lies past 2 ** 31 elements behind the first
    TRANSPOSED: tl.constexpr, RELOAD: tl.constexpr,  # RELOAD: of the queries
    PER_TOKEN: tl.constexpr, SINGLE: tl.constexpr,
    HAS_LENS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_INDICES: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows over one part of one sequence's history."""
    # fmt: on
    sequence = tl.program_id(2)
    part = tl.program_id(1)
    b, last_token, stored, limit = extent_of(kv_lens, sequence, kv_len, q_len, PER_TOKEN, HAS_LENS)
    rows_here = heads if PER_TOKEN else q_len * heads
    first = part * SPLIT
    last = tl.minimum(first + SPLIT, count if HAS_INDICES else limit)
    if (not SINGLE) and (first >= last):
        return

    row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    row_limit = stored - q_len + row // heads + 1  # [BR], where rows are of several tokens
    # Rows past the last repeat it, and are not stored: nothing about them has to be kept through the loop.
    flat_row = sequence.to(tl.int64) * rows_here + tl.minimum(row, rows_here - 1)
    q = ()
    acc = ()
    for i in tl.static_range(PIECES):
        if not RELOAD:
            q = q + (query_piece(q_latent, flat_row, i, C, W, BC, False),)
        acc = acc + (tl.zeros([BC, BR] if TRANSPOSED else [BR, BC], dtype=tl.float32),)
    r = tl.arange(0, BP)
    r_in = r < R
    if R > 0:
        qr = tl.load(q_rope + flat_row[:, None] * R + r[None, :], mask=r_in[None, :], other=0.0)
    latent_outer, latent_inner = latent_s0.to(tl.int64) * LATENT_UNIT, latent_s1.to(tl.int64) * LATENT_UNIT
    rope_outer, rope_inner = rope_s0.to(tl.int64) * ROPE_UNIT, rope_s1.to(tl.int64) * ROPE_UNIT
    p_indices = indices + sequence.to(tl.int64) * count
    p_table = block_table + b * table_s0
    p_mask = mask + b * mask_s0 + last_token.to(tl.int64) * mask_s1

    top = tl.full([BR], LOWEST, dtype=tl.float32)
    total = tl.zeros([BR], dtype=tl.float32)
    for start in range(first, last, BN):
        position, there = tile_positions(p_indices, start, last, limit, BN, HAS_INDICES)
        counts = there
        if HAS_MASK:
            counts = there & (tl.load(p_mask + position.to(tl.int64) * mask_s2, mask=there, other=0) != 0)
        outer, inner = cache_places(p_table, b, start, position, there, BN, PAGE, HAS_INDICES)
        at = outer * latent_outer + inner * latent_inner
        p_factors = latent_scale + outer * scale_s0 + inner * scale_s1
        k = ()
        factors = ()
        s = tl.zeros([BN, BR] if TRANSPOSED else [BR, BN], dtype=tl.float32)
        for i in tl.static_range(PIECES):
            c, c_in = piece_columns(i, C, W, BC)
            p_codes = latent + at[:, None] + column_offsets(c, latent_s2, FAR)[None, :]
            codes = tl.load(p_codes, mask=there[:, None] & c_in[None, :], other=0)  # [BN, BC]
            k = k + (code_numbers(codes, FORM, q_latent.dtype.element_ty),)
            qi = query_piece(q_latent, flat_row, i, C, W, BC, True) if RELOAD else q[i]
            if GROUP > 0:
                p_factor = p_factors + column_offsets(i * W // GROUP, scale_s2, FAR)
                factors = factors + (along_tokens(code_factors(p_factor, there, FORM), TRANSPOSED),)
                s += row_scores(qi, k[i], None, TRANSPOSED, PRECISION) * factors[i]
            else:
                s = row_scores(qi, k[i], s, TRANSPOSED, PRECISION)  # [BR, BN], or [BN, BR]
        if R > 0:
            rope_at = outer * rope_outer + inner * rope_inner
            r_there = there[:, None] & r_in[None, :]
            p_rope = k_rope + rope_at[:, None] + column_offsets(r, rope_s2, FAR)[None, :]
            kr = tl.load(p_rope, mask=r_there, other=0.0)  # [BN, BP]
            s = row_scores(qr, kr.to(qr.dtype), s, TRANSPOSED, PRECISION)
        seen = along_tokens(counts, TRANSPOSED)
        if not PER_TOKEN:
            seen = seen & (along_tokens(position, TRANSPOSED) < along_rows(row_limit, TRANSPOSED))
        s = tl.where(seen, s * scale, LOWEST)
        new_top = tl.maximum(top, tl.max(s, axis=0 if TRANSPOSED else 1))
        p = tl.where(seen, tl.exp2(s - along_rows(new_top, TRANSPOSED)), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=0 if TRANSPOSED else 1)
        moved = ()
        for i in tl.static_range(PIECES):
            weights = (p * factors[i] if GROUP > 0 else p).to(k[i].dtype)
            kept = acc[i] * along_rows(shrink, TRANSPOSED)
            if TRANSPOSED:
                moved = moved + (tl.dot(tl.trans(k[i]), weights, kept, input_precision=PRECISION),)
            else:
                moved = moved + (tl.dot(weights, k[i], kept, input_precision=PRECISION),)
        acc = moved
        top = new_top

    some = total != 0  # so that a NaN stays one
    norm = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    log_sum = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * _LN2, -float("inf"))
    row_in = row < rows_here
    if SINGLE and HAS_SINKS:
        sink = tl.load(sinks + row % heads, mask=row_in, other=0.0).to(tl.float32)
        log_sum, share = join_sink(log_sum, sink)
    target = (sequence.to(tl.int64) * tl.num_programs(1) + part) * rows_here + row
    tl.store(lse + target, log_sum, mask=row_in)
    for i in tl.static_range(PIECES):
        c, c_in = piece_columns(i, C, W, BC)
        place = out + along_rows(target, TRANSPOSED) * C + along_tokens(c, TRANSPOSED)
        result = acc[i] * along_rows(norm, TRANSPOSED)
        if SINGLE and HAS_SINKS:
            # In join_kernel's order, so that the bits do not depend on how many parts the cache has room for.
            result = result * along_rows(share, TRANSPOSED)
        result = result.to(out.dtype.element_ty)
        tl.store(place, result, mask=along_tokens(c_in, TRANSPOSED) & along_rows(row_in, TRANSPOSED))


# fmt: off
@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=ANYWHERE)
def join_kernel(
    parts_out, parts_lse,  # [sequences, parts, rows, C] and [sequences, parts, rows] of part_kernel
    out, lse,  # [sequences, rows, C] and [sequences, rows]
    kv_lens, sinks,
    kv_len, q_len, heads, count, parts,
    C: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr,
    PER_TOKEN: tl.constexpr, HAS_LENS: tl.constexpr, HAS_INDICES: tl.constexpr, HAS_SINKS: tl.constexpr,
):
    """One row: its parts joined by their log-sum-exp; only parts that the sequence reaches are read."""
    # fmt: on
    row = tl.program_id(0)
    sequence = tl.program_id(1)
    rows_here = tl.num_programs(0)
    _, _, _, limit = extent_of(kv_lens, sequence, kv_len, q_len, PER_TOKEN, HAS_LENS)
    used = tl.cdiv(tl.maximum(count if HAS_INDICES else limit, 0), SPLIT)
    base = sequence.to(tl.int64) * parts * rows_here + row
    top = -float("inf")
    at = base
    for _ in range(0, used):
        top = tl.maximum(top, tl.load(parts_lse + at))
        at += rows_here
    shift = tl.where(top > -float("inf"), top, 0.0)
    c = tl.arange(0, BC)
    acc = tl.zeros([BC], dtype=tl.float32)
    # Added one after the other: a tree's order would depend on how many parts the cache has room for.
    total = 0.0
    at = base
    for _ in range(0, used):
        part_lse = tl.load(parts_lse + at)
        weight = tl.where(part_lse != -float("inf"), tl.exp(part_lse - shift), 0.0)
        total += weight
        acc += weight * tl.load(parts_out + at * C + c, mask=c < C, other=0.0)
        at += rows_here
    some = total != 0
    log_sum = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    kept = 1.0
    if HAS_SINKS:
        log_sum, kept = join_sink(log_sum, tl.load(sinks + row % heads).to(tl.float32))
    # Divided by the weights' own sum: far from zero, a rounded log-sum-exp would not make them add up to one.
    acc = acc * (kept / tl.where(some, total, 1.0))
    target = sequence.to(tl.int64) * rows_here + row
    tl.store(out + target * C + c, acc.to(out.dtype.element_ty), mask=c < C)
    tl.store(lse + target, log_sum)
