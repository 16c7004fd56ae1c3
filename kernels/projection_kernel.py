"""The Triton kernel of the per-head products; :mod:`mla_convert.kernels.projection` launches it.

Triton is needed to import this module. A weight tile is always [BR, BC] of the stored matrix (BR stored rows of one
head, BC of its C columns), and the larger operand: it takes the M side of the matrix instruction, and the few rows of
activations the N side, so that a row's result does not depend on how many others there are.

Scales, by what is exact where:

- the value side (contraction over C) multiplies the float32 product of a column block by its rows' scales;
- the key side (contraction over stored rows) folds the rows' scales, divided by their largest, into the query,
  and the largest into the float32 result: no float16 underflow, whatever the size of the weights;
- several column blocks in one tile (small groups) fold into neither, and the tile itself is scaled.

Codes themselves are exact in float16 and bfloat16.
"""

# Triton reads the arguments of kernels itself, and allows no types of Python beside them.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

#: Whether kernels run in Triton's interpreter, which takes tensors on any device (TRITON_INTERPRET was set at import).
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def numbers_of(codes, KIND: tl.constexpr, NATIVE_FP8: tl.constexpr, dtype: tl.constexpr):
    """The numbers that codes stand for, unscaled: [BR, BC] in ``dtype`` from [BR, BC], or [BR, BC / 2] in int4."""
    if KIND == "int4":
        low = (codes & 15).to(tl.int8) - 8
        high = (codes >> 4).to(tl.int8) - 8
        numbers = tl.interleave(low, high).to(dtype)
    elif KIND == "fp8" and NATIVE_FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif KIND == "fp8":
        # A code is its sign, then the top bits of a float16 2⁸ too small; sign extension puts a second copy of the
        # sign into bit 15, and the mask clears the first one in bit 14.
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385
        numbers = (bits.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        numbers = codes.to(dtype)
    return numbers


@triton.jit
def largest_scale(p_scales, first, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest scale of a head's ROWS stored rows, the first of which is ``first``; 1 where all are zero."""
    o_all = tl.arange(0, triton.next_power_of_2(ROWS))
    scales = tl.load(p_scales + (first + o_all) // BLOCK * stride, mask=o_all < ROWS, other=0.0)
    largest = tl.max(tl.abs(scales), 0)
    return tl.where(largest > 0, largest, 1.0)


@triton.jit
def columns_of(i_tile, COLUMNS: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr):
    """First column of a column tile, and the end of what it may hold: spans are divided into tiles separately."""
    TILES_IN_SPAN: tl.constexpr = (SPAN + BC - 1) // BC
    i_span = i_tile // TILES_IN_SPAN
    return i_span * SPAN + i_tile % TILES_IN_SPAN * BC, tl.minimum((i_span + 1) * SPAN, COLUMNS)


# Numbers of activations change while a text is generated; their divisors would each compile a kernel of their own.
@triton.jit(do_not_specialize=("rows", "q_len"))
def project_heads(
    x,  # [B, S, H, K] activations; K = ROWS or COLUMNS
    codes,  # [H, ROWS, COLUMNS] plain weights or codes (COLUMNS / 2 bytes in int4)
    scales,  # [ceil(H · ROWS / BLOCK_ROWS), ceil(COLUMNS / BLOCK_COLUMNS)] float32; unused for plain weights
    out,  # [B · S, H, J] with J = COLUMNS or ROWS, contiguous along J
    rows,  # B · S
    q_len,  # S
    stride_xb,
    stride_xs,
    stride_xh,
    stride_xk,
    stride_wh,
    stride_wr,
    stride_wc,
    stride_sr,
    stride_sc,
    stride_om,
    stride_oh,
    ROWS: tl.constexpr,  # N or V: stored rows of one head
    COLUMNS: tl.constexpr,  # C
    OVER_ROWS: tl.constexpr,  # contraction over stored rows (key side), else over columns (value side)
    KIND: tl.constexpr,  # "plain", "int8", "fp8" or "int4"
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,  # BLOCK_COLUMNS where a column tile lies inside one block, BC where it holds several whole ones
    NATIVE_FP8: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """``x @ weight`` of each head over its stored rows, or ``x @ weight.T`` over its columns; sums are in float32.

    One program makes BM rows of one head's result, and one tile of its columns: BC, or BR over columns.
    """
    GROUPS: tl.constexpr = SPAN // BLOCK_COLUMNS
    TILES_IN_SPAN: tl.constexpr = (SPAN + BC - 1) // BC
    COLUMN_TILES: tl.constexpr = (COLUMNS + SPAN - 1) // SPAN * TILES_IN_SPAN
    ROW_TILES: tl.constexpr = (ROWS + BR - 1) // BR
    PACKED: tl.constexpr = 2 if KIND == "int4" else 1
    dtype: tl.constexpr = x.dtype.element_ty

    i_kept = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    first = i_head * ROWS  # this head's first stored row
    o_m = tl.program_id(2) * BM + tl.arange(0, BM)
    m_m = o_m < rows
    # Divided in 32 bits, multiplied in 64: a division of 64 bits is a subroutine on GPUs.
    p_x = x + i_head * stride_xh + (o_m // q_len).to(tl.int64) * stride_xb + (o_m % q_len).to(tl.int64) * stride_xs
    p_codes = codes + i_head * stride_wh

    largest = 1.0
    if OVER_ROWS and KIND != "plain" and GROUPS == 1:
        p_block = scales + i_kept // TILES_IN_SPAN * stride_sc
        largest = largest_scale(p_block, first, stride_sr, ROWS, BLOCK_ROWS)

    acc = tl.zeros([BC if OVER_ROWS else BR, BM], dtype=tl.float32)
    for i in range(ROW_TILES if OVER_ROWS else COLUMN_TILES):
        o_r = (i if OVER_ROWS else i_kept) * BR + tl.arange(0, BR)
        m_r = o_r < ROWS
        start, stop = columns_of(i_kept if OVER_ROWS else i, COLUMNS, SPAN, BC)
        o_c = start + tl.arange(0, BC)
        m_c = o_c < stop
        # Packed pairs never straddle a boundary: blocks are even along C.
        o_p = start // PACKED + tl.arange(0, BC // PACKED)
        m_p = o_p < stop // PACKED

        p_tile = p_codes + o_r.to(tl.int64)[:, None] * stride_wr + o_p.to(tl.int64)[None, :] * stride_wc
        tile = tl.load(p_tile, mask=m_r[:, None] & m_p[None, :], other=0)
        w = numbers_of(tile, KIND, NATIVE_FP8, dtype)  # [BR, BC]

        o_k = o_r if OVER_ROWS else o_c
        m_k = m_r if OVER_ROWS else m_c
        p_xt = p_x[None, :] + o_k.to(tl.int64)[:, None] * stride_xk
        xt = tl.load(p_xt, mask=m_k[:, None] & m_m[None, :], other=0.0)  # [BR or BC, BM]

        if KIND == "plain":
            acc = tl.dot(tl.trans(w) if OVER_ROWS else w, xt, acc, input_precision="ieee")
        else:
            p_s = scales + (first + o_r) // BLOCK_ROWS * stride_sr + start // BLOCK_COLUMNS * stride_sc
            if GROUPS > 1:
                o_g = tl.arange(0, GROUPS)
                m_g = start // BLOCK_COLUMNS + o_g < (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
                s = tl.load(p_s[:, None] + o_g[None, :] * stride_sc, mask=m_r[:, None] & m_g[None, :], other=0.0)
                scaled = tl.reshape(w.to(tl.float32), [BR, GROUPS, BLOCK_COLUMNS]) * s[:, :, None]
                w = tl.reshape(scaled, [BR, BC]).to(dtype)
                acc = tl.dot(tl.trans(w) if OVER_ROWS else w, xt, acc, input_precision="ieee")
            else:
                s = tl.load(p_s, mask=m_r, other=0.0)  # [BR]
                if OVER_ROWS:
                    xt = (xt.to(tl.float32) * (s / largest)[:, None]).to(dtype)
                    acc = tl.dot(tl.trans(w), xt, acc, input_precision="ieee")
                else:
                    acc += tl.dot(w, xt, input_precision="ieee") * s[:, None]

    if OVER_ROWS:
        start, stop = columns_of(i_kept, COLUMNS, SPAN, BC)
        o_j = start + tl.arange(0, BC)
        m_j = o_j < stop
    else:
        o_j = i_kept * BR + tl.arange(0, BR)
        m_j = o_j < ROWS
    p_out = out + i_head * stride_oh + (o_m.to(tl.int64) * stride_om)[None, :] + o_j[:, None]
    tl.store(p_out, (acc * largest).to(dtype), mask=m_j[:, None] & m_m[None, :])
