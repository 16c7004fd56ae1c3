"""One layer of a :class:`~mla_convert.patches.cache.LatentCache`: a growing buffer with a row per token.

transformers' ``DynamicLayer`` copies the whole history whenever a token is appended. Here one buffer has room to
grow, so that appending writes one row; and since latent and rotary key lie side by side, the CPU kernel reads them as
one key without a copy. An append that finds no room left copies all rows into a buffer a quarter larger, and both are
there until it is done; a fixed capacity avoids that. Several layers may share a buffer after ``fork``: the first append
of each makes it its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mla_convert.errors import UsageError
from mla_convert.patches.cache_formats import CacheFormat
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.call import Handover
from mla_convert.patches.latent_checks import check_room, fitting_layout, refuse_length
from mla_convert.patches.rounding import with_gradient

#: Tokens of room behind a newly allocated history: this many, or a quarter of it.
SMALLEST_ROOM = 128


class LatentLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's latents [B, T, C] and rotary keys [B, T, R], as rows [B, capacity, width] of which T are used.

    ``keys`` and ``values`` are what transformers calls them: [B, 1, T, C] and [B, 1, T, R] in the model's dtype. In a
    format of codes ``keys`` are read back from them. A view handed out before is still valid after an append, but not
    after ``crop`` and a further append.

    Args:
        form: the format of the latents.
        capacity: tokens allocated at once, and never more; None grows by a quarter whenever the room is used up.
        expected: (C, R) of the model that the cache is for, where they are known.
    """

    def __init__(
        self,
        form: CacheFormat | None = None,
        capacity: int | None = None,
        expected: tuple[int, int] | None = None,
        **_: Any,
    ) -> None:
        # The base class assigns keys and values, which are derived here.
        self.form = form or CacheFormat()
        self.capacity = capacity
        self.expected = expected
        self.handover: Handover | None = None
        self._forget()

    def _forget(self) -> None:
        self.rows: Tensor | None = None
        self.layout: RowLayout | None = None
        self.length = 0
        self.shared = False
        self.is_initialized = False

    def _used(self) -> tuple[Tensor, RowLayout]:
        assert self.rows is not None and self.layout is not None
        return self.rows[:, : self.length], self.layout

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The latents [B, 1, T, C] in the model's dtype; None before the first ``update``.

        A view of the rows, or, in a format of codes, numbers that are made of them at each look.
        """
        if self.rows is None:
            return None
        rows, layout = self._used()
        return layout.numbers(rows)[:, None]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The rotary keys [B, 1, T, R] in the model's dtype, never codes; None before the first ``update``."""
        if self.rows is None:
            return None
        rows, layout = self._used()
        return layout.k_rope(rows)[:, None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember the device; the buffer is made by the first ``update``, which knows the widths."""
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``key_states`` [B, 1, S, C] and ``value_states`` [B, 1, S, R]; return all of both.

        In an absorbed call of a patched model the first of them is codes where the cache holds codes. Gradients reach
        the new tokens alone then, as if they had not been rounded.

        Raises:
            UsageError: when they are not latents, differ in batch, width or dtype from what is stored, or don't fit
                into a fixed capacity.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored = None if self.rows is None or self.layout is None else (self.rows.shape[0], self.layout)
        layout = fitting_layout(key_states, value_states, self.form, self.expected, stored)
        stop = self.length + key_states.shape[2]
        check_room(self.length, stop, self.capacity)
        graph = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if graph and not layout.form.coded:
            self._append_differentiably(key_states, value_states)
        else:
            rows = self._room_for(stop, layout, key_states)
            layout.write(rows[:, self.length : stop], key_states[:, 0], value_states[:, 0])
        self.layout, self.length = layout, stop
        if self.handover is not None:
            return self._hand_over(self.handover)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        if graph and layout.form.coded:
            return with_gradient(keys, key_states), with_gradient(values, value_states)
        return keys, values

    def _hand_over(self, handover: Handover) -> tuple[Tensor, Tensor]:
        """The history as it is stored, for the absorbed path: codes [B, 1, T, ·] and rotary keys; scales beside."""
        rows, layout = self._used()
        handover.fields["latent_scale"] = layout.scale(rows)
        return layout.codes(rows)[:, None], layout.k_rope(rows)[:, None]

    def _room_for(self, tokens: int, layout: RowLayout, like: Tensor) -> Tensor:
        """The buffer, with room for ``tokens``, this layer's alone, and writable here."""
        rows = self.rows
        if rows is None or tokens > rows.shape[1] or rows.requires_grad or self.shared:
            capacity = self.capacity or tokens + max(SMALLEST_ROOM, tokens // 4)
            grown = like.new_zeros(like.shape[0], capacity, layout.width, dtype=layout.stored_dtype)
            if rows is not None:
                grown[:, : self.length] = rows[:, : self.length].detach()
            rows = grown
        elif rows.is_inference() and not torch.is_inference_mode_enabled():
            rows = rows.clone()
        self.rows, self.shared = rows, False
        return rows

    def adopt_rows(self, rows: Tensor, layout: RowLayout) -> None:
        """Begin with ``rows`` [B, T, width], which this layer may write to from now on."""
        self.rows, self.layout, self.form, self.length = rows, layout, layout.form, rows.shape[1]
        self.device = rows.device
        self.shared, self.is_initialized = False, True

    def _append_differentiably(self, key_states: Tensor, value_states: Tensor) -> None:
        """Where gradients flow through the history, nothing may be written in place."""
        new = torch.cat((key_states[:, 0], value_states[:, 0]), dim=-1)
        self.rows = new if self.rows is None else torch.cat((self.rows[:, : self.length], new), dim=1)
        self.shared = False

    @property
    def hands_over(self) -> bool:
        """Whether what is stored needs more than keys and values to be read."""
        return self.form.coded

    @property
    def only_absorbed(self) -> bool:
        """Whether only the absorbed path can read what is stored: never, numbers can be made of it."""
        return False

    def get_seq_length(self) -> int:
        """T: stored tokens."""
        return self.length

    def get_max_length(self) -> int:
        """The fixed capacity; −1 without one."""
        return -1 if self.capacity is None else self.capacity

    def reset(self) -> None:
        """Forget everything that is stored."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (a negative number, as transformers passes it).

        Raises:
            ArgumentError: for a positive number, which once meant the length to keep; it is a ValueError as well, as
                transformers' own.
            UsageError: for more tokens than are stored.
        """
        refuse_length(tokens_to_remove)
        if -tokens_to_remove > self.length and self.is_initialized:
            raise UsageError(f"crop({tokens_to_remove}) on a cache of {self.length} tokens")
        self.length = max(0, self.length + tokens_to_remove)

    def fork(self) -> LatentLayer:
        """Another layer over the same rows, which neither writes to any more: whoever appends first copies them."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.handover = None
        self.shared = other.shared = self.rows is not None
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentLayer:
        shared, other = self.shared, self.fork()
        self.shared = shared
        other._replace(Tensor.clone)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: what is used of the rows, and nothing of a call under way."""
        rows = None if self.rows is None else self.rows[:, : self.length].clone()
        return self.__dict__ | {"rows": rows, "shared": False, "handover": None}

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Rows of this layer's own: ``change`` of the present ones."""
        if self.rows is not None:
            changed = change(self.rows)
            self.shared = self.shared and changed is self.rows
            self.rows = changed

    def offload(self) -> None:
        """Move the rows to the CPU."""
        self._replace(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the rows back to the device they came from."""
        self._replace(lambda rows: rows.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx`` [B], for beam search."""
        self._replace(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times, from one.

        Raises:
            UsageError: for fewer, which would leave a cache of no sequences.
        """
        if repeats < 1:
            raise UsageError(
                f"batch_repeat_interleave({repeats}): a sequence is kept once or more; use reset() to empty"
            )
        self._replace(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` only."""
        self._replace(lambda rows: rows[indices, ...])
