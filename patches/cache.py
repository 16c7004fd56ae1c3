"""``LatentCache``: latents and rotary keys side by side, appended in place.

transformers' ``DynamicLayer`` copies the whole history whenever a token is appended. Here one buffer
holds a row [c ; k_rope] per token, with room to grow, so that appending writes one row; and since both
halves of a row lie side by side, the CPU kernel reads them as one key without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from mla_convert.errors import UsageError

#: Tokens of room behind a newly allocated history: this many, or a quarter of it.
SMALLEST_ROOM = 128


class LatentLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's latents [B, T, C] and rotary keys [B, T, R], as rows [B, capacity, C + R] of which T are used.

    ``keys`` and ``values`` are what transformers calls them: [B, 1, T, C] and [B, 1, T, R], as views. A view
    handed out before is still valid after an append, but not after ``crop`` and a further append.
    """

    def __init__(self, **_: Any) -> None:
        # The base class assigns keys and values, which are derived here.
        self.rows: torch.Tensor | None = None
        self.length = 0
        self.latent_width = 0
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self.rows is None else self.rows[:, None, : self.length, : self.latent_width]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self.rows is None else self.rows[:, None, : self.length, self.latent_width :]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember the device; the buffer is made by the first ``update``, which knows the widths."""
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``key_states`` [B, 1, S, C] and ``value_states`` [B, 1, S, R]; return all of both.

        Raises:
            UsageError: when they are not latents, or differ in batch, width or dtype from what is stored.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        stop = self.length + key_states.shape[2]
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._append_differentiably(key_states, value_states)
        else:
            rows = self._room_for(stop, key_states, value_states)
            rows[:, self.length : stop, : self.latent_width] = key_states[:, 0]
            rows[:, self.length : stop, self.latent_width :] = value_states[:, 0]
        self.length = stop
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys, values

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[1] != 1 or value_states.shape[:3] != key_states.shape[:3]:
            raise UsageError(
                f"LatentCache stores [B, 1, S, C] latents and [B, 1, S, R] rotary keys; found "
                f"{list(key_states.shape)} and {list(value_states.shape)}. Use DynamicCache for models without latents."
            )
        if self.rows is None:
            self.latent_width = key_states.shape[3]
            return
        stored = (self.rows.shape[0], self.latent_width, self.rows.shape[2] - self.latent_width, self.rows.dtype)
        found = (key_states.shape[0], key_states.shape[3], value_states.shape[3], key_states.dtype)
        if stored != found:
            raise UsageError(
                f"this LatentCache holds (batch, C, R, dtype) = {stored}, the new tokens have {found}: "
                "a cache belongs to one model and one batch"
            )

    def _room_for(self, tokens: int, key_states: torch.Tensor, value_states: torch.Tensor) -> torch.Tensor:
        """The buffer, with room for ``tokens`` and writable here."""
        rows = self.rows
        if rows is not None and tokens <= rows.shape[1] and not rows.requires_grad:
            if rows.is_inference() and not torch.is_inference_mode_enabled():
                rows = rows.clone()
            self.rows = rows
            return rows
        capacity = tokens + max(SMALLEST_ROOM, tokens // 4)
        width = key_states.shape[3] + value_states.shape[3]
        grown = key_states.new_zeros(key_states.shape[0], capacity, width)
        if rows is not None:
            grown[:, : self.length] = rows[:, : self.length].detach()
        self.rows = grown
        return grown

    def _append_differentiably(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Where gradients flow through the history, nothing may be written in place."""
        new = torch.cat((key_states[:, 0], value_states[:, 0]), dim=-1)
        self.rows = new if self.rows is None else torch.cat((self.rows[:, : self.length], new), dim=1)

    def get_seq_length(self) -> int:
        """T: stored tokens."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (a negative number, as transformers passes it)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, found {tokens_to_remove}")
        if -tokens_to_remove > self.length and self.is_initialized:
            raise UsageError(f"crop({tokens_to_remove}) on a cache of {self.length} tokens")
        self.length = max(0, self.length + tokens_to_remove)

    def _map(self, change: Any) -> None:
        if self.rows is not None:
            self.rows = change(self.rows)

    def offload(self) -> None:
        """Move the rows to the CPU."""
        self._map(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the rows back to the device they came from."""
        self._map(lambda rows: rows.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the sequences ``beam_idx`` [B], for beam search."""
        self._map(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times, from one.

        Raises:
            UsageError: for fewer, which would leave a cache of no sequences.
        """
        if repeats < 1:
            raise UsageError(
                f"batch_repeat_interleave({repeats}): a sequence is kept once or more; use reset() to empty"
            )
        self._map(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences ``indices`` only."""
        self._map(lambda rows: rows[indices, ...])


class LatentCache(DynamicCache):
    """A transformers cache whose full-attention layers are :class:`LatentLayer`; other layers stay as they are.

    Args:
        config: the model's config; without it every layer is a latent layer.
        offloading: as for ``DynamicCache``.
    """

    def __init__(self, config: PreTrainedConfig | None = None, *, offloading: bool = False) -> None:
        super().__init__(config=config, offloading=offloading)
        for index in range(len(self.layers)):
            adopt(self, index)
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = LatentLayer


def adopt(cache: Cache, index: int) -> None:
    """Make layer ``index`` of ``cache`` a latent layer if it is a plain, still empty ``DynamicLayer``."""
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]
    if index >= len(cache.layers):
        return
    layer = cache.layers[index]
    if type(layer) is DynamicLayer and not layer.is_initialized:
        cache.layers[index] = LatentLayer()
