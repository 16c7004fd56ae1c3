"""PyTorch's packed int4 product on a CPU: its layout of the codes, the way back, and the product of all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_convert.kernels.tracing import being_traced


def pack(codes: Tensor) -> Tensor:
    """One head's codes [rows, columns / 2], as they are stored, as the product takes them."""
    return _pack(_nibbles(codes))


def _pack(nibbles: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.to(torch.int32), 1)
    return packed


def _nibbles(codes: Tensor) -> Tensor:
    """[rows, columns] of one nibble each."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def places_when_packed(rows: int, columns: int) -> Tensor:
    """int32 [rows · columns]: for each nibble of a packed weight, which of the stored ones it is.

    PyTorch does not say how it packs, and does it in other ways on other processors. The numbers' own places are
    packed, four bits of each at a time.
    """
    own = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    places = torch.zeros(rows * columns, dtype=torch.int32)
    for shift in range(0, (rows * columns - 1).bit_length(), 4):
        places |= _nibbles(_pack(own >> shift & 15)).flatten().to(torch.int32) << shift
    return places


def unpack(packed: Tensor, places: Tensor) -> Tensor:
    """What :func:`pack` was given; ``places`` are those of the weight's size."""
    found = torch.empty(len(places), dtype=torch.uint8)
    found[places] = _nibbles(packed).flatten()
    codes = (found[0::2] | found[1::2] << 4).view(packed.shape)
    assert torch.equal(pack(codes), packed), "PyTorch's packing does more than move nibbles"
    return codes


def scales_and_zeros(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[H, groups, rows, 2] as the product takes them, of scales [H, rows, groups]; codes mean code − 8."""
    by_group = scales.transpose(1, 2).to(dtype)
    return torch.stack((by_group, torch.zeros_like(by_group)), dim=-1).contiguous()


def multiply_packed(rows: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """[H, M, columns] by each head's packed codes: [H, M, rows of a head]."""
    return _operator(rows, codes, scales, group) if being_traced() else _multiply(rows, codes, scales, group)


def _multiply(rows: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    each = zip(rows.unbind(0), codes.unbind(0), scales.unbind(0), strict=True)
    return torch.stack([torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, group, scale) for x, w, scale in each])


# One operator for compiled code: what the compiler of torch 2.13 makes of the product itself is right for one head, and
# returns wrong numbers for the views that several heads are.
_operator = torch.library.custom_op("mla_convert::multiply_packed_int4", _multiply, mutates_args=())


@_operator.register_fake
def _shape(rows: Tensor, codes: Tensor, scales: Tensor, group: int) -> Tensor:
    return rows.new_empty(*rows.shape[:2], codes.shape[1])
