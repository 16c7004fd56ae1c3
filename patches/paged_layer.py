"""One layer of a :class:`~mla_convert.patches.paged.PagedLatentCache`: the pages, and what a batch writes and reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from mla_convert.errors import UsageError
from mla_convert.patches.cache_formats import CacheFormat
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.call import Handover
from mla_convert.patches.pages import PageTable


@dataclasses.dataclass(frozen=True)
class Batch:
    """The sequences of one call of the model, and how many new tokens each has."""

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        """Whether a history exists, or padding: what only the absorbed path can read."""
        return any(self.lengths) or len(set(self.counts)) > 1


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's pages: rows [pages, page, width], filled where the table says.

    ``expected`` is (C, R) of the model that the cache is for, where they are known; ``written`` says whether the
    present batch has stored its tokens here.
    """

    def __init__(self, table: PageTable, form: CacheFormat, expected: tuple[int, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table, self.form, self.expected = table, form, expected
        self.batch: Batch | None = None
        self.written = False
        self.handover: Handover | None = None
        self.rows: Tensor | None = None
        self.layout: RowLayout | None = None

    hands_over = True

    @property
    def only_absorbed(self) -> bool:
        """Whether the present call reads a history or has padding."""
        return self.batch is not None and self.batch.ragged

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pages, once the widths are known."""
        self.layout = RowLayout(self.form, key_states.shape[-1], value_states.shape[-1], key_states.dtype)
        shape = len(self.table.users), self.table.page, self.layout.width
        self.rows = key_states.new_zeros(shape, dtype=self.layout.stored_dtype)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the last tokens of each row of [B, 1, S, C] and [B, 1, S, R], as many as the batch says.

        Raises:
            UsageError: outside ``cache.batch``, or a second time in one; where rows, tokens, widths or dtype are not
                those of the batch and the pages; or for a history that is to be read by anything but the absorbed path.
        """
        batch = self._batch_for(key_states)
        layout = self._layout_for(key_states, value_states)
        assert self.rows is not None
        new = self._write(key_states[:, 0], value_states[:, 0], batch)
        if self.handover is None:
            shape = *key_states.shape[:3], -1
            return layout.numbers(new).view(shape), layout.k_rope(new).reshape(shape[:3] + value_states.shape[3:])
        self.handover.fields.update(self._stored(batch))
        # Keys and values of the right length that nobody reads: what counts was handed over.
        longest = max(length + count for length, count in zip(batch.lengths, batch.counts, strict=True))
        one = self.rows[:1, :1]
        shape = len(key_states), 1, longest, -1
        return layout.codes(one)[:, None].expand(shape), layout.k_rope(one)[:, None].expand(shape)

    def _layout_for(self, key_states: Tensor, value_states: Tensor) -> RowLayout:
        """The layout of the pages, which are allocated where there are none yet."""
        widths = key_states.shape[-1], value_states.shape[-1]
        if self.expected not in (None, widths):
            raise UsageError(
                f"this PagedLatentCache was made for a model with (C, R) = {self.expected}, the new tokens have "
                f"{widths}: make it from the config of the model it is used with"
            )
        if self.rows is None:
            self.lazy_initialization(key_states, value_states)
        layout, found = self.layout, (*widths, key_states.dtype)
        assert layout is not None
        if (layout.latent, layout.rope, layout.dtype) != found:
            raise UsageError(
                f"these pages hold (C, R, dtype) = {(layout.latent, layout.rope, layout.dtype)}, the new tokens have "
                f"{found}: a cache belongs to one model"
            )
        return layout

    def _batch_for(self, key_states: Tensor) -> Batch:
        if self.batch is None:
            raise UsageError("a PagedLatentCache is used inside `with cache.batch(sequences, new_tokens):`")
        if self.written:
            raise UsageError(
                "this batch has stored its tokens already, and the model was called again: a batch is one call, open "
                "another for the tokens that follow"
            )
        rows, tokens = key_states.shape[0], key_states.shape[2]
        if rows != len(self.batch.sequences) or tokens < max(self.batch.counts):
            raise UsageError(
                f"the batch has {len(self.batch.sequences)} sequences with up to {max(self.batch.counts)} new tokens, "
                f"the model was called with {rows} of {tokens}"
            )
        if self.handover is None and (self.batch.ragged or tokens != self.batch.counts[0]):
            raise UsageError(
                "sequences with a history, or of unequal length, are read by the absorbed path alone: patch the model, "
                "and call it under torch.no_grad() or inference_mode()"
            )
        return self.batch

    def _write(self, latent: Tensor, k_rope: Tensor, batch: Batch) -> Tensor:
        """Store the new tokens; their rows [tokens, width]."""
        assert self.rows is not None and self.layout is not None
        device, tokens = latent.device, latent.shape[1]
        counts = torch.tensor(batch.counts, device=device)
        real = torch.arange(tokens, device=device) >= tokens - counts[:, None]
        new = latent.new_zeros(sum(batch.counts), self.layout.width, dtype=self.layout.stored_dtype)
        self.layout.write(new, latent[real], k_rope[real])
        slots = torch.tensor(self.table.slots(batch.sequences, batch.counts), device=device)
        self.rows.flatten(0, 1)[slots] = new
        self.written = True
        return new

    def _stored(self, batch: Batch) -> dict[str, Any]:
        assert self.rows is not None and self.layout is not None
        lengths = [length + count for length, count in zip(batch.lengths, batch.counts, strict=True)]
        return {
            "latent": self.layout.codes(self.rows),
            "k_rope": self.layout.k_rope(self.rows),
            "latent_scale": self.layout.scale(self.rows),
            "block_table": self.table.block_table(batch.sequences, self.rows.device),
            "kv_lens": torch.tensor(lengths, device=self.rows.device),
        }

    def get_seq_length(self) -> int:
        """The longest history in the present batch."""
        return 0 if self.batch is None else max(self.batch.lengths)

    def get_max_length(self) -> int:
        """Tokens that all pages hold together."""
        return len(self.table.users) * self.table.page

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if there were no history: no mask is made then, and lengths say what is visible."""
        return query_length, 0

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to)."""
        if copies and self.rows is not None:
            source, target = (torch.tensor(side, device=self.rows.device) for side in zip(*copies, strict=True))
            self.rows[target] = self.rows[source]

    def reset(self) -> None:
        """Not for one layer: what the pages hold is known to the table, which all layers share."""
        _refuse("reset()", "reset the cache, which forgets its sequences in all layers")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Not for pages: a sequence is branched with ``fork``."""
        _refuse(
            "reorder_cache", "its sequences are branched and dropped one by one: use fork(sequence), remove(sequence)"
        )

    def offload(self) -> None:
        """Not for pages, which stay on the model's device."""
        _refuse("offload", STAYS)

    def prefetch(self) -> None:
        """Not for pages, which stay on the model's device."""
        _refuse("prefetch", STAYS)


#: Why pages are not offloaded, and what to do.
STAYS = "its pages stay on the model's device: make it with fewer pages, or offload a LatentCache"


def _refuse(what: str, instead: str) -> NoReturn:
    raise UsageError(f"{what} is not for a paged cache: {instead}")
