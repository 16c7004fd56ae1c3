"""What every backend of ``absorbed_decode`` takes: checked once, described once.

Letters as in :mod:`mla_convert.geometry`; K is the number of gathered positions of each new token.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from mla_convert.errors import UsageError
from mla_convert.kernels.tracing import being_traced
from mla_convert.wording import found

#: Storage of a latent that is not in the query's dtype, and how many numbers one element holds.
CODED = {torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 1, torch.int8: 1, torch.uint8: 2}
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)

LatentScale = float | torch.Tensor


@dataclasses.dataclass(frozen=True)
class DecodeArguments:
    """The arguments of ``absorbed_decode`` after :func:`check`; shapes are given there."""

    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latent: torch.Tensor
    k_rope: torch.Tensor
    scale: float
    kv_lens: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    latent_scale: LatentScale | None = None

    @property
    def kv_len(self) -> int:
        """T: positions that the cache can address per sequence."""
        if self.block_table is None:
            return self.latent.shape[1]
        return self.block_table.shape[1] * self.latent.shape[1]

    @property
    def coded(self) -> bool:
        """Whether the latent is stored as codes that ``latent_scale`` turns into numbers."""
        return self.latent.dtype in CODED


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(f"absorbed_decode: {message}")


def check(args: DecodeArguments) -> DecodeArguments:
    """Return ``args`` if shapes, dtypes and devices fit together.

    Shapes: ``q_latent`` [B,S,H,C], ``q_rope`` [B,S,H,R], ``latent`` [B,T,C] or [pages, page, C] (half as
    wide in int4), ``k_rope`` likewise with R, ``kv_lens`` [B], ``mask`` bool [B,S,T], ``block_table``
    [B, pages per sequence], ``indices`` [B,S,K], ``sinks`` [H], ``latent_scale`` a number, a scalar
    tensor, one per token or one per group of the latent's C numbers.

    Raises:
        UsageError: naming the argument, what was found and what it must be.
    """
    _check_types(args)
    _check_query(args)
    _check_cache(args)
    _check_scale(args)
    _check_positions(args)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, torch.Tensor) and value.device != args.q_latent.device:
            scalar = value.dim() == 0 and value.device.type == "cpu"
            _need(scalar, f"{field.name} is on {value.device}, the query on {args.q_latent.device}; move it there")
    return args


def _check_types(args: DecodeArguments) -> None:
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if field.name == "scale" or (field.name == "latent_scale" and isinstance(value, int | float)):
            usable = isinstance(value, int | float) and math.isfinite(value)
            _need(usable, f"{field.name} must be a finite number, found {value!r}")
        elif value is not None or field.default is dataclasses.MISSING:
            dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
            _need(dense, f"{field.name} must be a dense tensor, found {type(value).__name__}")


def _check_query(args: DecodeArguments) -> None:
    q, rope = args.q_latent, args.q_rope
    _need(q.dim() == 4 and q.dtype in FLOATING, f"q_latent must be [B,S,H,C] floating point, found {found(q)}")
    fits = rope.dim() == 4 and rope.shape[:3] == q.shape[:3] and rope.dtype == q.dtype
    _need(fits, f"q_rope must be {list(q.shape[:3])} + [R] in {q.dtype}, found {found(rope)}")


def _check_cache(args: DecodeArguments) -> None:
    latent, rope, batch, width = args.latent, args.k_rope, args.q_latent.shape[0], args.q_latent.shape[-1]
    stored = width // CODED.get(latent.dtype, 1)
    _need(width > 0, "q_latent has no latent columns (C = 0); a latent cache has at least one")
    _need(width % CODED.get(latent.dtype, 1) == 0, f"int4 holds two numbers a byte: C must be even, found {width}")
    _need(latent.dim() == 3 and latent.shape[-1] == stored, f"latent must end in {stored}, found {found(latent)}")
    known = latent.dtype == args.q_latent.dtype or args.coded
    _need(known, f"latent must be in the query's {args.q_latent.dtype} or in a coded form, found {found(latent)}")
    fits = rope.dim() == 3 and rope.shape[:2] == latent.shape[:2] and rope.shape[-1] == args.q_rope.shape[-1]
    wanted = [*latent.shape[:2], args.q_rope.shape[-1]]
    _need(fits, f"k_rope must be {wanted} (width 0 is allowed, None is not), found {found(rope)}")
    _need(rope.dtype in FLOATING, f"k_rope is never quantized, found {found(rope)}")
    if args.block_table is None:
        _need(latent.shape[0] == batch, f"the query has {batch} sequences, the cache {latent.shape[0]}")
    else:
        table = args.block_table
        fits = table.dim() == 2 and table.shape[0] == batch and table.dtype in _INTEGERS
        paged = latent.shape[0] > 0 and latent.shape[1] > 0
        _need(paged, f"a paged cache has at least one page of at least one token, found {found(latent)}")
        _need(fits, f"block_table must be [{batch}, pages] in int32 or int64, found {found(table)}")
        _check_pages(args)


def _check_pages(args: DecodeArguments) -> None:
    """On a CPU, where looking costs no wait: every entry that is used is a page. Elsewhere the caller answers for it.

    Not looked at while a graph is traced: what is checked there has no values.
    """
    table, (pages, page) = args.block_table, args.latent.shape[:2]
    if table is None or table.device.type != "cpu" or being_traced():
        return
    lens = args.kv_lens
    if lens is None:
        used = torch.ones_like(table, dtype=torch.bool)
    elif lens.device.type == "cpu" and lens.shape == table.shape[:1]:
        used = torch.arange(table.shape[1]) * page < lens[:, None]
    else:
        return
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        b, entry = (int(i) for i in wrong.nonzero()[0])
        _need(False, f"block_table[{b}, {entry}] is {int(table[b, entry])}, and the cache has pages 0 to {pages - 1}")


def _check_scale(args: DecodeArguments) -> None:
    scale = args.latent_scale
    _need(args.coded == (scale is not None), f"latent is {args.latent.dtype}: latent_scale goes with codes, only")
    if not isinstance(scale, torch.Tensor):
        return
    _need(scale.dtype in FLOATING, f"latent_scale must be floating point, found {found(scale)}")
    if scale.dim() == 0:
        return
    rows, width = args.latent.shape[:2], args.q_latent.shape[-1]
    per_token = scale.shape == rows
    per_group = scale.dim() == 3 and scale.shape[:2] == rows and scale.shape[2] and width % scale.shape[2] == 0
    _need(
        bool(per_token or per_group),
        f"latent_scale must be a number, {list(rows)} or {list(rows)} + [groups that divide {width}], "
        f"found {found(scale)}",
    )


def _check_positions(args: DecodeArguments) -> None:
    batch, q_len, heads = args.q_latent.shape[:3]
    if args.kv_lens is not None:
        fits = args.kv_lens.shape == (batch,) and args.kv_lens.dtype in _INTEGERS
        _need(fits, f"kv_lens must be [{batch}] in int32 or int64, found {found(args.kv_lens)}")
    if args.mask is not None:
        wanted = [batch, q_len, args.kv_len]
        fits = list(args.mask.shape) == wanted and args.mask.dtype == torch.bool
        _need(fits, f"mask must be {wanted} bool (True attends), found {found(args.mask)}")
    if args.indices is not None:
        fits = args.indices.dim() == 3 and args.indices.shape[:2] == (batch, q_len) and args.indices.dtype in _INTEGERS
        _need(fits, f"indices must be [{batch}, {q_len}, K] in int32 or int64, found {found(args.indices)}")
    if args.sinks is not None:
        fits = args.sinks.shape == (heads,) and args.sinks.dtype in FLOATING
        _need(fits, f"sinks must be [{heads}] floating point, found {found(args.sinks)}")
