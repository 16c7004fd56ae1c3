"""Positions that ``indices`` name, as a mask."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_convert.kernels.arguments import DecodeArguments


def chosen(indices: Tensor, kv_len: int) -> Tensor:
    """``indices`` [B,S,K] as bool [B,S,T]: True at the positions named; −1 and positions past the end name none."""
    inside = (indices >= 0) & (indices < kv_len)
    columns = torch.where(inside, indices, kv_len).to(torch.int64)
    out = torch.zeros(*indices.shape[:2], kv_len + 1, dtype=torch.bool, device=indices.device)
    return out.scatter_(-1, columns, True)[..., :kv_len]


def ungathered(args: DecodeArguments) -> DecodeArguments:
    """``args`` with a mask in the place of ``indices``, where reading all that is stored is no more than gathering.

    So it is as long as no sequence holds more tokens than are named, whatever the cache has room for. The lengths are
    read: for the CPU alone.
    """
    assert args.indices is not None
    stop = args.kv_len
    if args.kv_lens is not None and args.kv_lens.numel():
        stop = max(0, min(stop, int(args.kv_lens.max())))
    if stop > args.indices.shape[-1]:
        return args
    seen = chosen(args.indices, stop)
    return dataclasses.replace(args, indices=None, mask=seen if args.mask is None else seen & args.mask[..., :stop])
