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

#: Below any logit that float32 can hold in practice, and still finite: differences of two are not NaN.
_LOWEST = tl.constexpr(-3.0e38)
_LN2 = tl.constexpr(0.6931471805599453)
#: Numbers that change while a text is generated. Triton would compile a kernel anew whenever one becomes, or ceases to
#: be, 1 or a multiple of 16; strides that loads depend on are given in units instead (``LATENT_UNIT``, ``ROPE_UNIT``).
CHANGING = (
    "kv_len", "q_len", "count", "parts", "latent_s0", "latent_s1", "rope_s0", "rope_s1", "scale_s0", "scale_s1",
    "mask_s0", "mask_s1", "table_s0",
)  # fmt: skip
#: Tensors of which single numbers are read: where in memory they begin makes no difference.
ANYWHERE = ("kv_lens", "mask", "block_table", "indices", "latent_scale", "sinks")


@triton.jit
def _numbers(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Codes of a cached latent as numbers of ``dtype``, without their scale.

    Those of FP8 are a power of two too small, which ``_factors`` makes good.
    """
    if FORM == "fp8" or FORM == "fp8fnuz":
        # e4m3 placed into float16's fields is the value times 2 ** -8 (2 ** -7 for fnuz): exact, subnormals too.
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        if FORM == "fp8":
            # NaN is 0x7F with any sign: one more overflows into the exponent's highest bit, which makes it NaN again.
            bits = bits | ((((wide & 0x7F) + 1) & 0x80) << 7)
        else:
            bits = tl.where(wide == 0x80, 0x7E00, bits).to(tl.uint16)
        numbers = bits.to(tl.float16, bitcast=True)
    else:
        numbers = codes
    return numbers.to(dtype)


@triton.jit
def _factors(p_scales, there, FORM: tl.constexpr):
    """Scales of codes as float32, for numbers as ``_numbers`` gives them."""
    unit: tl.constexpr = 256.0 if FORM == "fp8" else 128.0 if FORM == "fp8fnuz" else 1.0
    return tl.load(p_scales, mask=there, other=0.0).to(tl.float32) * unit


@triton.jit
def _along_rows(x, TRANSPOSED: tl.constexpr):
    """One value per row, shaped for the scores' tile."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def _along_tokens(x, TRANSPOSED: tl.constexpr):
    """One value per token (or per latent column), shaped for the scores' (or the result's) tile."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def _scores(q, k, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` (None for zero) and rows [BR, W] against tokens [BN, W]: [BR, BN], or transposed [BN, BR]."""
    if TRANSPOSED:
        s = tl.dot(k, tl.trans(q), acc, input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)
    return s


@triton.jit
def _columns(i: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """Columns [BC] of a piece of the latent, and which of them there are."""
    w = tl.arange(0, BC)
    return i * W + w, (w < W) & (i * W + w < C)


@triton.jit
def _across(columns, stride, FAR: tl.constexpr):
    """Offsets of columns that lie ``stride`` apart, in 64 bits where the last one needs them."""
    if FAR:
        columns = tl.cast(columns, tl.int64)
    return columns * stride


@triton.jit
def _query(
    q_latent, flat_row, i: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, IN_LOOP: tl.constexpr
):
    """Rows [BR, BC] of a piece of the queries; volatile in the loop, else the compiler would move it in front."""
    c, c_in = _columns(i, C, W, BC)
    return tl.load(q_latent + flat_row[:, None] * C + c[None, :], mask=c_in[None, :], other=0.0, volatile=IN_LOOP)


@triton.jit
def _join_sink(log_sum, sink):
    """Log-sum-exp with one more logit, and what share of the result the rest keeps."""
    higher = tl.maximum(tl.maximum(log_sum, sink), _LOWEST)
    total = tl.exp(log_sum - higher) + tl.exp(sink - higher)
    some = total != 0  # so that a NaN stays one
    joint = tl.where(some, higher + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    kept = tl.where(some, tl.exp(log_sum - higher) / tl.where(some, total, 1.0), 0.0)
    return joint, kept


@triton.jit
def _extent(kv_lens, sequence, kv_len, q_len, PER_TOKEN: tl.constexpr, HAS_LENS: tl.constexpr):
    """Which entry of the batch a sequence's rows read, their (last) new token, tokens stored, positions it may see."""
    b = sequence
    token = q_len - 1
    if PER_TOKEN:
        b = sequence // q_len
        token = sequence % q_len
    stored = kv_len
    if HAS_LENS:
        stored = tl.load(kv_lens + b).to(tl.int32)
    return b.to(tl.int64), token, stored, tl.minimum(stored - q_len + token + 1, kv_len)


@triton.jit
def _positions(p_indices, start, last, limit, BN: tl.constexpr, HAS_INDICES: tl.constexpr):
    """Logical positions [BN] of a tile of history, and which of them count."""
    n = start + tl.arange(0, BN)
    there = n < last
    position = n
    if HAS_INDICES:
        position = tl.load(p_indices + n, mask=there, other=-1).to(tl.int32)
        there = (position >= 0) & (position < limit)
        position = tl.where(there, position, 0)
    return position, there


@triton.jit
def _places(p_table, b, start, position, there, BN: tl.constexpr, PAGE: tl.constexpr, HAS_INDICES: tl.constexpr):
    """Where positions are in the cache: entry or page (one for the tile, or [BN]), and token inside it [BN]; int64."""
    outer = b
    inner = position.to(tl.int64)
    if PAGE > 0 and PAGE % BN == 0 and not HAS_INDICES:
        outer = tl.load(p_table + start // PAGE).to(tl.int64)
        inner = (start % PAGE + tl.arange(0, BN)).to(tl.int64)
    elif PAGE > 0:
        outer = tl.load(p_table + position // PAGE, mask=there, other=0).to(tl.int64)
        inner = (position % PAGE).to(tl.int64)
    return outer, inner


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
    b, last_token, stored, limit = _extent(kv_lens, sequence, kv_len, q_len, PER_TOKEN, HAS_LENS)
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
            q = q + (_query(q_latent, flat_row, i, C, W, BC, False),)
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

    top = tl.full([BR], _LOWEST, dtype=tl.float32)
    total = tl.zeros([BR], dtype=tl.float32)
    for start in range(first, last, BN):
        position, there = _positions(p_indices, start, last, limit, BN, HAS_INDICES)
        counts = there
        if HAS_MASK:
            counts = there & (tl.load(p_mask + position.to(tl.int64) * mask_s2, mask=there, other=0) != 0)
        outer, inner = _places(p_table, b, start, position, there, BN, PAGE, HAS_INDICES)
        at = outer * latent_outer + inner * latent_inner
        p_factors = latent_scale + outer * scale_s0 + inner * scale_s1
        k = ()
        factors = ()
        s = tl.zeros([BN, BR] if TRANSPOSED else [BR, BN], dtype=tl.float32)
        for i in tl.static_range(PIECES):
            c, c_in = _columns(i, C, W, BC)
            p_codes = latent + at[:, None] + _across(c, latent_s2, FAR)[None, :]
            codes = tl.load(p_codes, mask=there[:, None] & c_in[None, :], other=0)  # [BN, BC]
            k = k + (_numbers(codes, FORM, q_latent.dtype.element_ty),)
            qi = _query(q_latent, flat_row, i, C, W, BC, True) if RELOAD else q[i]
            if GROUP > 0:
                p_factor = p_factors + _across(i * W // GROUP, scale_s2, FAR)
                factors = factors + (_along_tokens(_factors(p_factor, there, FORM), TRANSPOSED),)
                s += _scores(qi, k[i], None, TRANSPOSED, PRECISION) * factors[i]
            else:
                s = _scores(qi, k[i], s, TRANSPOSED, PRECISION)  # [BR, BN], or [BN, BR]
        if R > 0:
            rope_at = outer * rope_outer + inner * rope_inner
            r_there = there[:, None] & r_in[None, :]
            p_rope = k_rope + rope_at[:, None] + _across(r, rope_s2, FAR)[None, :]
            kr = tl.load(p_rope, mask=r_there, other=0.0)  # [BN, BP]
            s = _scores(qr, kr.to(qr.dtype), s, TRANSPOSED, PRECISION)
        seen = _along_tokens(counts, TRANSPOSED)
        if not PER_TOKEN:
            seen = seen & (_along_tokens(position, TRANSPOSED) < _along_rows(row_limit, TRANSPOSED))
        s = tl.where(seen, s * scale, _LOWEST)
        new_top = tl.maximum(top, tl.max(s, axis=0 if TRANSPOSED else 1))
        p = tl.where(seen, tl.exp2(s - _along_rows(new_top, TRANSPOSED)), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=0 if TRANSPOSED else 1)
        moved = ()
        for i in tl.static_range(PIECES):
            weights = (p * factors[i] if GROUP > 0 else p).to(k[i].dtype)
            kept = acc[i] * _along_rows(shrink, TRANSPOSED)
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
        log_sum, share = _join_sink(log_sum, sink)
    target = (sequence.to(tl.int64) * tl.num_programs(1) + part) * rows_here + row
    tl.store(lse + target, log_sum, mask=row_in)
    for i in tl.static_range(PIECES):
        c, c_in = _columns(i, C, W, BC)
        place = out + _along_rows(target, TRANSPOSED) * C + _along_tokens(c, TRANSPOSED)
        result = acc[i] * _along_rows(norm, TRANSPOSED)
        if SINGLE and HAS_SINKS:
            # In join_kernel's order, so that the bits do not depend on how many parts the cache has room for.
            result = result * _along_rows(share, TRANSPOSED)
        result = result.to(out.dtype.element_ty)
        tl.store(place, result, mask=_along_tokens(c_in, TRANSPOSED) & _along_rows(row_in, TRANSPOSED))


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
    _, _, _, limit = _extent(kv_lens, sequence, kv_len, q_len, PER_TOKEN, HAS_LENS)
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
        log_sum, kept = _join_sink(log_sum, tl.load(sinks + row % heads).to(tl.float32))
    # Divided by the weights' own sum: far from zero, a rounded log-sum-exp would not make them add up to one.
    acc = acc * (kept / tl.where(some, total, 1.0))
    target = sequence.to(tl.int64) * rows_here + row
    tl.store(out + target * C + c, acc.to(out.dtype.element_ty), mask=c < C)
    tl.store(lse + target, log_sum)
