"""The steps of the Triton kernel (:mod:`mla_convert.kernels.decode_kernel`), compiled into it.

Shapes in comments: BR rows, BN tokens, BC the padded width of a piece of the latent's columns, which has W of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Below any logit that float32 can hold in practice, and still finite: differences of two are not NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def code_numbers(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Codes of a cached latent as numbers of ``dtype``, without their scale.

    Those of FP8 are a power of two too small, which ``code_factors`` makes good.
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
def code_factors(p_scales, there, FORM: tl.constexpr):
    """Scales of codes as float32, for numbers as ``code_numbers`` gives them."""
    unit: tl.constexpr = 256.0 if FORM == "fp8" else 128.0 if FORM == "fp8fnuz" else 1.0
    return tl.load(p_scales, mask=there, other=0.0).to(tl.float32) * unit


@triton.jit
def along_rows(x, TRANSPOSED: tl.constexpr):
    """One value per row, shaped for the scores' tile."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def along_tokens(x, TRANSPOSED: tl.constexpr):
    """One value per token (or per latent column), shaped for the scores' (or the result's) tile."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def row_scores(q, k, acc, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` (None for zero) and rows [BR, W] against tokens [BN, W]: [BR, BN], or transposed [BN, BR]."""
    if TRANSPOSED:
        s = tl.dot(k, tl.trans(q), acc, input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)
    return s


@triton.jit
def piece_columns(i: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr):
    """Columns [BC] of a piece of the latent, and which of them there are."""
    w = tl.arange(0, BC)
    return i * W + w, (w < W) & (i * W + w < C)


@triton.jit
def column_offsets(columns, stride, FAR: tl.constexpr):
    """Offsets of columns that lie ``stride`` apart, in 64 bits where the last one needs them."""
    if FAR:
        columns = tl.cast(columns, tl.int64)
    return columns * stride


@triton.jit
def query_piece(
    q_latent, flat_row, i: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, IN_LOOP: tl.constexpr
):
    """Rows [BR, BC] of a piece of the queries; volatile in the loop, else the compiler would move it in front."""
    c, c_in = piece_columns(i, C, W, BC)
    return tl.load(q_latent + flat_row[:, None] * C + c[None, :], mask=c_in[None, :], other=0.0, volatile=IN_LOOP)


@triton.jit
def join_sink(log_sum, sink):
    """Log-sum-exp with one more logit, and what share of the result the rest keeps."""
    higher = tl.maximum(tl.maximum(log_sum, sink), LOWEST)
    total = tl.exp(log_sum - higher) + tl.exp(sink - higher)
    some = total != 0  # so that a NaN stays one
    joint = tl.where(some, higher + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    kept = tl.where(some, tl.exp(log_sum - higher) / tl.where(some, total, 1.0), 0.0)
    return joint, kept


@triton.jit
def extent_of(kv_lens, sequence, kv_len, q_len, PER_TOKEN: tl.constexpr, HAS_LENS: tl.constexpr):
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
def tile_positions(p_indices, start, last, limit, BN: tl.constexpr, HAS_INDICES: tl.constexpr):
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
def cache_places(p_table, b, start, position, there, BN: tl.constexpr, PAGE: tl.constexpr, HAS_INDICES: tl.constexpr):
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
