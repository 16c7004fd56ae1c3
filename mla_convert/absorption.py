r"""Moving the up-projections of keys and values out of the history: the mathematics, and the products.

Letters and tensor names are those of :mod:`mla_convert.geometry`. Everything else in this package
refers to this text instead of repeating it.

**What the layer defines.** For every token t the cache keeps a latent ``c_t`` of C numbers and one
rotary key ``r_t`` of R numbers that all heads share. Head i makes its key and value from them,

    k[t, i] = [ W_UK_i · c_t ; r_t ]        (N + R numbers)
    v[t, i] =   W_UV_i · c_t                (V numbers)

and the new token's query, from its own query latent x (Q numbers), is ``[a_i ; b_i]`` with content
``a_i = W_UQ_i · x`` and rotary part ``b_i = RoPE(W_QR_i · x)``. With weights
``p_t = softmax_t(scale · (a_i · (W_UK_i c_t) + b_i · r_t))`` the layer returns
``Σ_i W_O_i · Σ_t p_t v[t, i]``. Computed in this order, each step multiplies the whole history by W_UK
and W_UV again: T · C · (N + V) multiplications a head for a single new token.

**What absorption changes.** Only where the brackets stand; matrix products are associative, so
nothing is approximated.

*Key side.* ``a_i · (W_UK_i c_t) = (W_UK_iᵀ a_i) · c_t``. The query is lifted into the latent space
once, ``z_i = W_UK_iᵀ a_i`` (C numbers), and then meets the cached latents as they are.

*Value side.* ``Σ_t p_t (W_UV_i c_t) = W_UV_i (Σ_t p_t c_t)``. The latents are averaged first, and the
one average is lifted to V numbers.

*What stays.* ``b_i · r_t`` is added as before: the rotation between the two depends on the distance
of the tokens, so no constant matrix can stand for it. ``scale`` stays as well. It belongs to the
width N + R of the query as the model defines it, not to the C + R numbers multiplied now.

Per head the history is now read as it is cached, [c_t ; r_t] for the scores and c_t for the average:
attention with one shared key of width C + R and one shared value of width C.

**Two forms of the weights**, independent for the two sides:

=========  ======================  =====================================  =========================
side       form                    what is kept per head                  numbers read per step
=========  ======================  =====================================  =========================
key        factored                W_UK_i [N, C], beside W_UQ_i [N, Q]    H · N · (C + Q)
key        fused                   W_QK_i = W_UK_iᵀ · W_UQ_i  [C, Q]      H · C · Q
value      factored                W_UV_i [V, C], beside W_O_i [D, V]     H · V · (D + C)
value      fused                   W_OV_i = W_O_i · W_UV_i  [D, C]        D · H · C
=========  ======================  =====================================  =========================

(The rotary rows W_QR, H · R · Q numbers, are read in both forms of the key side and left out.) The
factored form is a set of exact row slices of ``kv_b_proj``. The fused form saves one product per
step, yet its matrices have rank N or V at most, so it stores the same map with more numbers unless C
is small: it reads fewer exactly where ``C·Q < N·(C + Q)``, or ``D·C < V·(D + C)``. Where a model does
something between the two matrices of a side (a scale on the query, an elementwise gate before
``o_proj``) the bracket cannot be moved, and that side cannot be fused.

**Rounding.** A product is formed in float32, or in float64 where an input is float64 or where
float32 products have been allowed to lose bits, a few heads at a time, and rounded once to the dtype
it is stored in. In large ones a part of the rows tells what that costs (:mod:`mla_convert.rounding`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.formats import plain
from mla_convert.geometry import MLAGeometry
from mla_convert.rounding import Rounding, rows_compared

#: What the products read and write.
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Rows and heads of a fused value side that are formed at a time. A row of one head is short and lies far from the next
# head's same row: several together are written in longer runs, and are still in the processor's cache when they are.
_ROWS, _HEADS = 256, 2


def split_kv_b(weight: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor]:
    """Views W_UK [H, N, C] and W_UV [H, V, C] of ``kv_b_proj.weight`` [H·(N + V), C], any dtype.

    Raises UsageError where the shape is not the geometry's.
    """
    _expect("kv_b_proj.weight", weight, g.kv_b_shape, "[H·(N+V), C]")
    heads = weight.reshape(g.num_heads, g.qk_nope_head_dim + g.v_head_dim, g.kv_lora_rank)
    return heads[:, : g.qk_nope_head_dim], heads[:, g.qk_nope_head_dim :]


def split_q_b(weight: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor]:
    """Views W_UQ [H, N, Q] and W_QR [H, R, Q] of ``q_b_proj.weight`` or ``q_proj.weight`` [H·(N + R), Q]."""
    _expect("the query projection's weight", weight, g.q_b_shape, "[H·(N+R), Q]")
    heads = weight.reshape(g.num_heads, g.qk_head_dim, g.query_rank)
    return heads[:, : g.qk_nope_head_dim], heads[:, g.qk_nope_head_dim :]


def fuse_qk(
    w_uk: Tensor,
    q_b: Tensor,
    g: MLAGeometry,
    dtype: torch.dtype,
    rounding: Rounding | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The fused key side [H·(C + R), Q] in ``dtype``: per head C rows of W_UKᵀ·W_UQ, then its R rotary rows.

    ``w_uk`` is [H, N, C] and ``q_b`` [H·(N + R), Q], both of a float dtype, on one device. The rotary
    rows are only cast. ``rounding`` collects the error figures, and ``out`` is memory for the result. Raises
    UsageError for shapes and dtypes that do not fit, and for values that ``dtype`` cannot hold.
    """
    _expect("W_UK", w_uk, (g.num_heads, g.qk_nope_head_dim, g.kv_lora_rank), "[H, N, C]")
    w_uq, w_qr = split_q_b(q_b, g)
    wide = _product_dtype(w_uk, q_b, dtype=dtype)
    rounding = rounding or Rounding()
    out = _result(out, (g.num_heads, g.latent_width, g.query_rank), dtype, q_b.device)
    # Memory that is new for each head costs more than what is done in it: pages have to be cleared first.
    product = torch.empty(g.kv_lora_rank, g.query_rank, dtype=wide, device=q_b.device)
    widened = torch.empty(g.qk_head_dim, g.query_rank, dtype=wide, device=q_b.device)
    content, rotary = widened[: g.qk_nope_head_dim], widened[g.qk_nope_head_dim :]
    for head in range(g.num_heads):
        every = rows_compared(head, product.numel())
        torch.mm(w_uk[head].to(wide).T, content.copy_(w_uq[head]), out=product)
        rounding.round_into(out[head, : g.kv_lora_rank], product, every=every)
        if g.qk_rope_head_dim:
            rounding.round_into(out[head, g.kv_lora_rank :], rotary.copy_(w_qr[head]), every=every)
    return out.flatten(0, 1)


def fuse_ov(
    w_uv: Tensor,
    o: Tensor,
    g: MLAGeometry,
    dtype: torch.dtype,
    rounding: Rounding | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The fused value side [D, H·C] in ``dtype``: per head the C columns of W_O·W_UV.

    ``w_uv`` is [H, V, C] and ``o`` [D, H·V]; otherwise as :func:`fuse_qk`.
    """
    _expect("W_UV", w_uv, (g.num_heads, g.v_head_dim, g.kv_lora_rank), "[H, V, C]")
    _expect("o_proj.weight", o, g.o_shape, "[D, H·V]")
    wide = _product_dtype(w_uv, o, dtype=dtype)
    rounding = rounding or Rounding()
    w_o = o.reshape(g.hidden_size, g.num_heads, g.v_head_dim)
    out = _result(out, (g.hidden_size, g.num_heads, g.kv_lora_rank), dtype, o.device)
    rows, heads = min(_ROWS, g.hidden_size), min(_HEADS, g.num_heads)
    product = torch.empty(heads, rows, g.kv_lora_rank, dtype=wide, device=o.device)
    widened = torch.empty(rows, heads, g.v_head_dim, dtype=wide, device=o.device)
    for number, first in enumerate(range(0, g.num_heads, _HEADS)):
        every = rows_compared(number, product.numel())
        right = w_uv[first : first + _HEADS].to(wide)
        for top in range(0, g.hidden_size, _ROWS):
            target = out[top : top + _ROWS, first : first + _HEADS]
            left = widened[: target.shape[0], : target.shape[1]].copy_(w_o[top : top + _ROWS, first : first + _HEADS])
            part = product[: target.shape[1], : target.shape[0]]
            torch.bmm(left.transpose(0, 1), right, out=part)
            rounding.round_into(target, part.transpose(0, 1), every=every)
    return out.flatten(1, 2)


def slice_rows(
    heads: Tensor, dtype: torch.dtype, rounding: Rounding | None = None, out: Tensor | None = None
) -> Tensor:
    """The factored store of one side: W_UK or W_UV [H, N or V, C] as contiguous rows [H·N or H·V, C] in ``dtype``.

    Where ``dtype`` is already the tensor's own, the rows are exact copies. ``out`` is memory for the result.
    """
    out = _result(out, tuple(heads.shape), dtype, heads.device)
    if heads.dtype == dtype:
        return out.copy_(heads).flatten(0, 1)
    rounding = rounding or Rounding()
    for head, rows in enumerate(heads):
        rounding.round_into(out[head], rows.to(_product_dtype(heads, dtype=dtype)))
    return out.flatten(0, 1)


def _result(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``out`` in ``shape``, or new memory."""
    return torch.empty(shape, dtype=dtype, device=device) if out is None else out.view(shape)


def _product_dtype(*inputs: Tensor, dtype: torch.dtype) -> torch.dtype:
    """float32 or float64 for products of ``inputs``; refuses dtypes that are not plain floats."""
    for found in (*(tensor.dtype for tensor in inputs), dtype):
        if found not in FLOAT_DTYPES:
            raise UsageError(
                f"absorption reads and writes {', '.join(map(plain, FLOAT_DTYPES))}, found {plain(found)}; "
                "dequantize the weight first"
            )
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in inputs) else product_dtype()


def product_dtype() -> torch.dtype:
    """What products of inputs below float64 are formed in: float32, or float64 where those may lose bits."""
    try:
        full = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # raised where precisions were set per backend: somebody lowered one
        full = False
    return torch.float32 if full else torch.float64


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], letters: str) -> None:
    if tuple(tensor.shape) != shape:
        raise UsageError(
            f"{what} has shape {list(tensor.shape)}; the config's dimensions make it {list(shape)} = {letters}: "
            "the weight and the config are of different models"
        )
