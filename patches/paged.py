"""``PagedLatentCache``: many sequences of unequal length in one pool of pages, without padding.

    cache = PagedLatentCache(model.config, pages=4096, page=64)
    first, second = cache.add(), cache.add()
    with cache.batch([first, second], [7, 5]):     # two prompts, padded at the left to 7 tokens
        model(ids, cache=cache, position_ids=cache.positions(7))
    with cache.batch([first, second], 1):          # a step of both
        model(ids, cache=cache, position_ids=cache.positions(1))
    branch = cache.fork(first)                     # shares first's pages until one of them writes

Padding is not stored, and there is no attention mask: the lengths say what is visible. A history is only ever read by
the absorbed path of a patched model; what has none yet may run expanded. ``generate()`` doesn't drive this cache: it
is for a loop of one's own that lets sequences come and go. ``latent``, ``k_rope``, ``latent_scale``, ``block_table``
and ``kv_lens`` are what ``absorbed_decode`` takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from mla_convert.errors import UnsupportedModelError, UsageError
from mla_convert.patches.cache_formats import CacheFormat, parse_format
from mla_convert.patches.cache_rows import RowLayout
from mla_convert.patches.call import Handover
from mla_convert.patches.pages import PageTable


@dataclasses.dataclass(frozen=True)
class _Batch:
    """The sequences of one call of the model, and how many new tokens each has."""

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ragged(self) -> bool:
        """Whether a history exists, or padding: what only the absorbed path can read."""
        return any(self.lengths) or len(set(self.counts)) > 1


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's pages: rows [pages, page, width], filled where the table says."""

    def __init__(self, table: PageTable, form: CacheFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table, self.form = table, form
        self.batch: _Batch | None = None
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
            UsageError: outside ``cache.batch``; where rows, tokens, widths or dtype are not those of the batch and the
                pages; or for a history that is to be read by anything but the absorbed path.
        """
        batch = self._batch_for(key_states)
        if self.rows is None:
            self.lazy_initialization(key_states, value_states)
        assert self.rows is not None and self.layout is not None
        layout, found = self.layout, (key_states.shape[-1], value_states.shape[-1], key_states.dtype)
        if (layout.latent, layout.rope, layout.dtype) != found:
            raise UsageError(
                f"these pages hold (C, R, dtype) = {(layout.latent, layout.rope, layout.dtype)}, the new tokens have "
                f"{found}: a cache belongs to one model"
            )
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

    def _batch_for(self, key_states: Tensor) -> _Batch:
        if self.batch is None:
            raise UsageError("a PagedLatentCache is used inside `with cache.batch(sequences, new_tokens):`")
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

    def _write(self, latent: Tensor, k_rope: Tensor, batch: _Batch) -> Tensor:
        """Store the new tokens; their rows [tokens, width]."""
        assert self.rows is not None and self.layout is not None
        device, tokens = latent.device, latent.shape[1]
        counts = torch.tensor(batch.counts, device=device)
        real = torch.arange(tokens, device=device) >= tokens - counts[:, None]
        new = latent.new_zeros(sum(batch.counts), self.layout.width, dtype=self.layout.stored_dtype)
        self.layout.write(new, latent[real], k_rope[real])
        slots = torch.tensor(self.table.slots(batch.sequences, batch.counts), device=device)
        self.rows.flatten(0, 1)[slots] = new
        return new

    def _stored(self, batch: _Batch) -> dict[str, Any]:
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


class PagedLatentCache(Cache):
    """A transformers cache for patched models in which each sequence has a length, and pages, of its own.

    Args:
        config: the model's config; all of its layers must be full attention.
        pages: how many pages there are, for all sequences together; allocated when first used.
        page: tokens of a page.
        format: as for ``LatentCache``.

    Raises:
        UsageError: for arguments that are not known.
        UnsupportedModelError: for a model with layers of other kinds.
    """

    def __init__(self, config: PreTrainedConfig, *, pages: int, page: int = 64, format: str = "model") -> None:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
        if kinds != {DynamicLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedModelError(f"a paged cache is for models of full attention alone, found {names}")
        self.table = PageTable(pages, page)
        self.format = parse_format(format)
        layers = len(DynamicCache(config=config).layers)
        self._paged = [PagedLayer(self.table, self.format) for _ in range(layers)]
        super().__init__(layers=list(self._paged))

    def add(self) -> int:
        """The number of a new, empty sequence."""
        return self.table.add()

    def fork(self, sequence: int) -> int:
        """A new sequence that shares the pages of ``sequence`` until one of them writes into the last."""
        return self.table.fork(sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other one has are free again."""
        self.table.remove(sequence)

    def crop_sequence(self, sequence: int, count: int) -> None:
        """Forget the last ``count`` tokens of one sequence."""
        self.table.crop(sequence, count)

    def crop(self, tokens_to_remove: int) -> None:
        """Not for this cache: its sequences are cropped one by one."""
        raise UsageError("a paged cache has no common length: use crop_sequence(sequence, count)")

    def length(self, sequence: int) -> int:
        """Stored tokens of one sequence."""
        self.table.check([sequence])
        return self.table.lengths[sequence]

    @contextlib.contextmanager
    def batch(self, sequences: Sequence[int], new_tokens: int | Sequence[int]) -> Iterator[None]:
        """Call the model inside: row b of its batch is ``sequences[b]``, with ``new_tokens[b]`` tokens at the right.

        The tokens count as stored when the block ends without an exception.

        Raises:
            UsageError: sequences that are not known, counts that don't fit, or not enough free pages.
        """
        self.table.check(sequences)
        counts = [new_tokens] * len(sequences) if isinstance(new_tokens, int) else list(new_tokens)
        if not sequences or len(counts) != len(sequences) or min(counts) < 1:
            raise UsageError(f"a batch has at least one sequence, each with at least one new token; found {counts}")
        copies = self.table.reserve(sequences, counts)
        lengths = tuple(self.table.lengths[sequence] for sequence in sequences)
        for layer in self._paged:
            layer.copy_pages(copies)
            layer.batch = _Batch(tuple(sequences), tuple(counts), lengths)
        try:
            yield
            self.table.advance(sequences, counts)
        finally:
            for layer in self._paged:
                layer.batch = None

    def positions(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """``position_ids`` int64 [B, S] of the present batch, padded at the left to S = ``tokens`` (with zeros)."""
        batch = self._paged[0].batch
        if batch is None:
            raise UsageError("positions belong to a batch: call it inside `with cache.batch(...):`")
        ends = torch.tensor([n + c for n, c in zip(batch.lengths, batch.counts, strict=True)], device=device)
        return (ends[:, None] + torch.arange(-tokens, 0, device=device)).clamp(min=0)
