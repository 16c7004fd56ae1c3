"""A device that is not there: tensors that say they are on it, and whose numbers this machine computes all the same.

What an accelerator does not take is an error here, too: operations between its tensors and the host's, and reading its
memory as the host's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

#: The only one beside the host that PyTorch has everywhere; it knows shapes, and the numbers are here.
DEVICE = torch.device("meta")
#: What moves numbers between devices.
_MOVING = ("aten::copy_", "aten::_to_copy")


class Away(Tensor):
    """A tensor on the device; ``held`` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:  # noqa: PYI034
        made: Away = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    # One number comes to the host without being asked twice; PyTorch would look for the device's own way.
    def __float__(self) -> float:
        return float(self.held)

    def __int__(self) -> int:
        return int(self.held)

    def __bool__(self) -> bool:
        return bool(self.held)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """In this thread, tensors can be made on the device and moved to it; ``done`` are operations by whether they
    were done there, or on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[bool, list[str]] = {True: [], False: []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = any(isinstance(each, Away) for each in tree_flatten((args, kwargs))[0])
        self.done[there].append(func._schema.name)
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    away = {id(each.held): each for each in tensors if isinstance(each, Away)}
    name = func._schema.name
    if away and name not in _MOVING:
        assert all(isinstance(each, Away) or not each.dim() for each in tensors), f"{name} of tensors on two devices"
    target = kwargs.get("device")
    there = bool(away) if target is None else torch.device(target).type == DEVICE.type
    here = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    args, here = tree_map(lambda each: each.held if isinstance(each, Away) else each, (args, here))
    found = func(*args, **here)
    if name == "aten::copy_":
        return away.get(id(found), found)
    return tree_map(lambda each: _placed(each, away), found) if there else found


def _placed(found: Any, away: dict[int, Away]) -> Any:
    """A result on the device: one of the operands, where the operation was done in place."""
    if not isinstance(found, Tensor):
        return found
    return away[id(found)] if id(found) in away else Away(found)
