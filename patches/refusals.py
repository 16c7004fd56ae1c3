"""What a patched model refuses at the call, with the reason."""

from __future__ import annotations

from typing import Any

from mla_convert.errors import PatchError

#: What a patched instance hides behind a function that refuses.
_METHOD = "init_continuous_batching"


def refuse_continuous_batching(*_: Any, **__: Any) -> Any:
    """Stands in for ``init_continuous_batching``, which ``generate_batch`` and the paged cache go through.

    Raises:
        PatchError: always.
    """
    raise PatchError(
        "continuous batching (generate_batch, cache_implementation='paged') is not supported for MLA models: "
        "transformers sizes the pages of its cache for keys and values of whole heads, and latents do not fit into "
        "them, patched or not; use generate() with a left-padded batch"
    )


def add_refusals(model: Any) -> None:
    """Refuse on this instance what cannot work on it."""
    if hasattr(type(model), _METHOD) and _METHOD not in vars(model):
        object.__setattr__(model, _METHOD, refuse_continuous_batching)


def remove_refusals(model: Any) -> None:
    """Undo :func:`add_refusals`."""
    if vars(model).get(_METHOD) is refuse_continuous_batching:
        object.__delattr__(model, _METHOD)
