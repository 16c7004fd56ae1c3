"""The Triton kernel: attention of packed (new token, head) rows over a latent history shared by all heads.

One tile of the latent is loaded once and serves as key and as value. The history is divided every
``split_tokens``; each part is one program, and a second kernel joins the parts. Grids depend on
shapes only, lengths are read on the device: launches can be captured in a CUDA graph.

Shapes in comments: BR rows, BN tokens, BC and BP the padded widths of latent and rotary key.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Below any logit that float32 can hold in practice, and still finite: differences of two are not NaN.
_LOWEST = tl.constexpr(-3.0e38)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _numbers(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Codes of a cached latent as numbers of ``dtype``, without their scale."""
    if FORM == "fp8" or FORM == "fp8fnuz":
        # e4m3 placed into float16's fields is the value times 2 ** -8 (2 ** -7 for fnuz): exact, subnormals too.
        bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        numbers = bits.to(tl.float16, bitcast=True) * (256.0 if FORM == "fp8" else 128.0)
    else:
        numbers = codes
    return numbers.to(dtype)


@triton.jit
def _along_rows(x, TRANSPOSED: tl.constexpr):
    """One value per row, shaped for the scores' tile."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def _along_tokens(x, TRANSPOSED: tl.constexpr):
    """One value per token (or per latent column), shaped for the scores' (or the result's) tile."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def _scores(q, k, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Rows [BR, W] against tokens [BN, W]: [BR, BN], or transposed [BN, BR]."""
    if TRANSPOSED:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return s


@triton.jit
def _join_sink(log_sum, sink):
    """Log-sum-exp with one more logit, and what share of the result the rest keeps."""
    higher = tl.maximum(tl.maximum(log_sum, sink), _LOWEST)
    total = tl.exp(log_sum - higher) + tl.exp(sink - higher)
    joint = tl.where(total > 0, higher + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    kept = tl.where(total > 0, tl.exp(log_sum - higher) / tl.where(total > 0, total, 1.0), 0.0)
    return joint, kept


@triton.jit
def part_kernel(
    q_latent,
    q_rope,
    latent,
    k_rope,
    out,
    lse,
    kv_lens,
    mask,
    block_table,
    indices,
    latent_scale,
    sinks,
    scale,
    kv_len,
    q_len,
    heads,
    count,
    latent_s0,
    latent_s1,
    latent_s2,
    rope_s0,
    rope_s1,
    rope_s2,
    scale_s0,
    scale_s1,
    scale_s2,
    mask_s0,
    mask_s1,
    mask_s2,
    table_s0,
    C: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows over one part of one sequence; with indices, of one new token.

    ``GROUP`` is 0 for one scale, 1 for one per token, else numbers per scale.
    """
    sequence = tl.program_id(2)
    part = tl.program_id(1)
    token0 = 0
    rows_here = q_len * heads
    b = sequence
    if HAS_INDICES:
        b = sequence // q_len
        token0 = sequence % q_len
        rows_here = heads
    row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    row_in = row < rows_here
    token = token0 + row // heads  # [BR]
    stored = kv_len
    if HAS_LENS:
        stored = tl.load(kv_lens + b).to(tl.int32)
    limit = tl.minimum(stored - q_len + token + 1, kv_len)  # [BR], positions a row may see
    end = tl.minimum(stored, kv_len)
    if HAS_INDICES:
        end = count
    first = part * SPLIT
    last = tl.minimum(first + SPLIT, end)
    if (not SINGLE) and (first >= end):
        return

    c = tl.arange(0, BC)
    c_in = c < C
    flat_row = sequence.to(tl.int64) * rows_here + row
    q = tl.load(q_latent + flat_row[:, None] * C + c[None, :], mask=row_in[:, None] & c_in[None, :], other=0.0)
    if R > 0:
        r = tl.arange(0, BP)
        r_in = r < R
        qr = tl.load(q_rope + flat_row[:, None] * R + r[None, :], mask=row_in[:, None] & r_in[None, :], other=0.0)
    code_scale = 1.0
    if FORM != "plain" and GROUP == 0:
        code_scale = tl.load(latent_scale).to(tl.float32)

    top = tl.full([BR], _LOWEST, dtype=tl.float32)
    total = tl.zeros([BR], dtype=tl.float32)
    if TRANSPOSED:
        acc = tl.zeros([BC, BR], dtype=tl.float32)
    else:
        acc = tl.zeros([BR, BC], dtype=tl.float32)

    for start in range(first, last, BN):
        n = start + tl.arange(0, BN)  # [BN]
        there = n < last
        position = n
        if HAS_INDICES:
            position = tl.load(indices + sequence.to(tl.int64) * count + n, mask=there, other=-1).to(tl.int32)
            there = there & (position >= 0) & (position < tl.minimum(stored - q_len + token0 + 1, kv_len))
            position = tl.where(there, position, 0)
        outer = tl.full([BN], 0, dtype=tl.int64) + b
        inner = position.to(tl.int64)
        if PAGE > 0:
            outer = tl.load(block_table + b.to(tl.int64) * table_s0 + position // PAGE, mask=there, other=0).to(
                tl.int64
            )
            inner = (position % PAGE).to(tl.int64)
        at = outer * latent_s0 + inner * latent_s1
        codes = tl.load(
            latent + at[:, None] + c[None, :] * latent_s2, mask=there[:, None] & c_in[None, :], other=0
        )  # [BN, BC]
        k = _numbers(codes, FORM, q.dtype)
        if GROUP > 1:
            group_at = outer * scale_s0 + inner * scale_s1
            factors = tl.load(
                latent_scale + group_at[:, None] + (c[None, :] // GROUP) * scale_s2,
                mask=there[:, None] & c_in[None, :],
                other=0.0,
            )
            k = (k.to(tl.float32) * factors.to(tl.float32)).to(q.dtype)
        s = _scores(q, k, TRANSPOSED, PRECISION)  # [BR, BN], or [BN, BR]
        if GROUP == 1:
            token_scale = tl.load(latent_scale + outer * scale_s0 + inner * scale_s1, mask=there, other=0.0)
            token_scale = _along_tokens(token_scale.to(tl.float32), TRANSPOSED)
            s = s * token_scale
        s = s * code_scale
        if R > 0:
            rope_at = outer * rope_s0 + inner * rope_s1
            kr = tl.load(
                k_rope + rope_at[:, None] + r[None, :] * rope_s2, mask=there[:, None] & r_in[None, :], other=0.0
            )  # [BN, BP]
            s += _scores(qr, kr.to(q.dtype), TRANSPOSED, PRECISION)
        where = _along_tokens(position, TRANSPOSED)
        seen = _along_tokens(there, TRANSPOSED) & _along_rows(row_in, TRANSPOSED)
        seen = seen & (where < _along_rows(limit, TRANSPOSED))
        if HAS_MASK:
            mask_row = b.to(tl.int64) * mask_s0 + token.to(tl.int64) * mask_s1
            mask_at = _along_rows(mask_row, TRANSPOSED) + where * mask_s2
            seen = seen & (tl.load(mask + mask_at, mask=seen, other=0) != 0)
        s = tl.where(seen, s * scale, _LOWEST)
        new_top = tl.maximum(top, tl.max(s, axis=0 if TRANSPOSED else 1))
        p = tl.where(seen, tl.exp2(s - _along_rows(new_top, TRANSPOSED)), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=0 if TRANSPOSED else 1)
        if GROUP == 1:
            p = p * token_scale
        acc = acc * _along_rows(shrink, TRANSPOSED)
        if TRANSPOSED:
            acc = tl.dot(tl.trans(k), p.to(k.dtype), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(k.dtype), k, acc, input_precision=PRECISION)
        top = new_top

    some = total > 0
    norm = tl.where(some, code_scale / tl.where(some, total, 1.0), 0.0)
    log_sum = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * _LN2, -float("inf"))
    if SINGLE and HAS_SINKS:
        sink = tl.load(sinks + row % heads, mask=row_in, other=0.0).to(tl.float32)
        log_sum, kept = _join_sink(log_sum, sink)
        norm = norm * kept
    target = flat_row
    if not SINGLE:
        target = (sequence.to(tl.int64) * tl.num_programs(1) + part) * rows_here + row
    tl.store(lse + target, log_sum, mask=row_in)
    width = _along_tokens(c, TRANSPOSED)
    place = out + _along_rows(target, TRANSPOSED) * C + width
    result = acc * _along_rows(norm, TRANSPOSED)
    tl.store(place, result.to(out.dtype.element_ty), mask=(width < C) & _along_rows(row_in, TRANSPOSED))


@triton.jit
def join_kernel(
    parts_out,
    parts_lse,
    out,
    lse,
    kv_lens,
    sinks,
    kv_len,
    q_len,
    heads,
    count,
    parts,
    C: tl.constexpr,
    BC: tl.constexpr,
    BPARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row: its parts joined by their log-sum-exp; only parts that the sequence reaches are read."""
    row = tl.program_id(0)
    sequence = tl.program_id(1)
    rows_here = tl.num_programs(0)
    end = kv_len
    if HAS_LENS:
        end = tl.minimum(tl.load(kv_lens + sequence).to(tl.int32), kv_len)
    if HAS_INDICES:
        end = count
    used = tl.cdiv(tl.maximum(end, 0), SPLIT)
    part = tl.arange(0, BPARTS)
    base = sequence.to(tl.int64) * parts * rows_here + row
    lses = tl.load(parts_lse + base + part.to(tl.int64) * rows_here, mask=part < used, other=-float("inf"))
    top = tl.max(lses, axis=0)
    some = top > -float("inf")
    c = tl.arange(0, BC)
    acc = tl.zeros([BC], dtype=tl.float32)
    # Added one after the other: a tree's order would depend on how many parts the cache has room for.
    total = 0.0
    at = base
    for _ in range(0, used):
        part_lse = tl.load(parts_lse + at)
        weight = tl.where(part_lse > -float("inf"), tl.exp(part_lse - tl.where(some, top, 0.0)), 0.0)
        total += weight
        acc += weight * tl.load(parts_out + at * C + c, mask=c < C, other=0.0)
        at += rows_here
    log_sum = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    kept = 1.0
    if HAS_SINKS:
        log_sum, kept = _join_sink(log_sum, tl.load(sinks + row % heads).to(tl.float32))
    # Divided by the weights' own sum: far from zero, a rounded log-sum-exp would not make them add up to one.
    acc = acc * (kept / tl.where(some, total, 1.0))
    target = sequence.to(tl.int64) * rows_here + row
    tl.store(out + target * C + c, acc.to(out.dtype.element_ty), mask=c < C)
    tl.store(lse + target, log_sum)
