"""How messages name tensors, their dtypes, and options."""

from __future__ import annotations

import contextlib
import contextvars
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_AS_TYPED = contextvars.ContextVar("mla_convert_as_typed", default=False)
#: Options of the command line that are not called as the parameter is.
_TYPED = {"contexts": "context"}
_NO_VALUE = object()


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def found(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype: ``[2, 40] bfloat16``."""
    return f"{list(tensor.shape)} {plain(tensor.dtype)}"


@contextlib.contextmanager
def as_typed() -> Iterator[None]:
    """In this block messages name options as the command line has them."""
    before = _AS_TYPED.set(True)
    try:
        yield
    finally:
        _AS_TYPED.reset(before)


def option(name: str, value: Any = _NO_VALUE) -> str:
    """A parameter of ours, with its value if one is given, as the caller wrote it.

    ``qk_bits=5`` for a call from Python, and ``--qk-bits 5`` on the command line (:func:`as_typed`).
    """
    if not _AS_TYPED.get():
        return name if value is _NO_VALUE else f"{name}={_in_python(value)}"
    typed = _TYPED.get(name, name).replace("_", "-")
    if value is _NO_VALUE or value is True:
        return f"--{typed}"
    if value is False:
        return f"--no-{typed}"
    listed = value if isinstance(value, list | tuple) else [value]
    return f"--{typed} {shlex.quote(','.join(map(str, listed)))}"


def _in_python(value: Any) -> str:
    # A word of the command line's own kind is a str, too, and its repr would say more.
    return repr(str(value)) if isinstance(value, str) else repr(value)
