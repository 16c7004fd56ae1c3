"""How a projection may hold its weight: the description of one form, and the plain one.

Classes of other libraries are known by name, so that none is imported for a model that does not use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from mla_convert.absorption import FLOAT_DTYPES

#: A projection of an attention module: ``nn.Linear``, or what a library put in its place.
Projection = Any


def _no_state(linear: Projection) -> Hashable:
    return None


def _never(linear: Projection) -> bool:
    return False


def weight_shape(weight: Tensor) -> tuple[int, int]:
    """[out, in] of a weight as it lies there."""
    return int(weight.shape[0]), int(weight.shape[1])


def _out_in(linear: Projection) -> tuple[int, int]:
    return int(linear.out_features), int(linear.in_features)


@dataclasses.dataclass(frozen=True)
class Reader:
    """One form of holding a weight.

    Attributes:
        label: for people.
        holds: whether a projection is of this form.
        parts: the tensors that the weight follows from, by name; whoever changes the weight changes one of them.
        read: the effective weight [out, in], in a float dtype at least as wide as what it was made from.
        shape: of the effective weight, without reading it.
        state: what else the weight depends on.
        varies: whether, as things stand, no one weight stands for the projection's forward.
    """

    label: str
    holds: Callable[[Projection], bool]
    parts: Callable[[Projection], Mapping[str, Tensor]]
    read: Callable[[Projection], Tensor]
    shape: Callable[[Projection], tuple[int, int]] = _out_in
    state: Callable[[Projection], Hashable] = _no_state
    varies: Callable[[Projection], bool] = _never


def kinds(thing: object) -> tuple[str, ...]:
    """Full names of a thing's class and of the classes that it derives from."""
    found: Any = type(thing)  # a class is hashable, whatever a type checker makes of object's
    return _names(found)


@functools.cache  # asked in each step
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__)


LINEAR = "torch.nn.modules.linear.Linear"
PLAIN_TENSORS = ("torch.nn.parameter.Parameter", "torch.Tensor")


def exactly(name: str) -> Callable[[Projection], bool]:
    """Whether a projection is of the class ``name`` itself: what derives from it may mean something else."""
    return lambda linear: kinds(linear)[0] == name


def linear_of(name: str) -> Callable[[Projection], bool]:
    """Whether a projection is ``nn.Linear`` itself with a weight of the class ``name``, or one that derives from it."""
    return lambda linear: kinds(linear)[0] == LINEAR and name in kinds(getattr(linear, "weight", None))


def _is_plain(linear: Projection) -> bool:
    if kinds(linear)[0] != LINEAR or hasattr(linear, "quantization_scheme"):
        return False
    weight = linear.weight
    return kinds(weight)[0] in PLAIN_TENSORS and weight.dtype in FLOAT_DTYPES


PLAIN = Reader(
    "plain weights",
    holds=_is_plain,
    parts=lambda linear: {"weight": linear.weight},
    read=lambda linear: linear.weight.detach(),
    shape=lambda linear: weight_shape(linear.weight),
)

#: Attributes of an instance by which a plain projection becomes something else.
_MARKS = frozenset(("_hf_hook", "quantization_scheme", "weight"))


def bare_weight(linear: Projection) -> Tensor | None:
    """The weight of a projection that is ``nn.Linear`` itself, with a plain weight and nothing inside; else None.

    Most projections are. It is asked in each step, and says what :data:`READERS` and a walk through the modules inside
    would, in a tenth of the time. Hooks are not looked at.
    """
    if type(linear) is not nn.Linear or linear._modules or not _MARKS.isdisjoint(linear.__dict__):
        return None
    weight = linear._parameters.get("weight")
    return weight if type(weight) is nn.Parameter and weight.dtype in FLOAT_DTYPES else None
