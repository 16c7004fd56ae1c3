"""Rounding: its figures are held to in the tests of the products; here, what it does with memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_convert.absorption import fuse_qk
from mla_convert.geometry import MLAGeometry
from mla_convert.rounding import Rounding


class _Allocations(TorchDispatchMode):
    """Counts what is asked of the allocator by name."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(("aten::empty", "aten::new_empty"))
        return func(*args, **(kwargs or {}))


def allocations(heads: int, product: torch.dtype) -> int:
    """How often memory is asked for to make a fused key side of so many heads."""
    g = MLAGeometry(32, heads, 16, 8, 4, 8, 24, 1.0)
    w_uk = torch.ones(heads, 8, 16, dtype=product)
    q_b = torch.ones(g.q_b_shape, dtype=product)
    with _Allocations() as found:
        fuse_qk(w_uk, q_b, g, torch.bfloat16)
    return found.count


@pytest.mark.parametrize("product", [torch.float32, torch.float64])
def test_memory_is_made_once_for_all_heads(product: torch.dtype) -> None:
    """Products and rotary rows alternate, which are of different sizes."""
    assert 0 < allocations(2, product) == allocations(7, product)


def test_figures_do_not_depend_on_what_was_rounded_before() -> None:
    """In memory of a larger, a smaller and another kind of tensor."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in ((3, 5), (70, 9), (4, 2), (70, 9))]
    together, apart = Rounding(), Rounding()
    for dtype in (torch.bfloat16, torch.float16):
        for tensor in (*tensors, tensors[1].double(), tensors[1].T):
            alone = Rounding()
            assert torch.equal(together.round(tensor, dtype), tensor.to(dtype))
            alone.round(tensor, dtype)
            apart.add(alone)
    assert (together.largest, together.frobenius) == (apart.largest, apart.frobenius)
