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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from mla_convert.errors import UnsupportedModelError, UsageError
from mla_convert.patches.cache import check_fits, expected_widths, made_for
from mla_convert.patches.cache_formats import parse_format
from mla_convert.patches.paged_layer import STAYS, Batch, PagedLayer
from mla_convert.patches.pages import PageTable, each_whole, whole


class PagedLatentCache(Cache):
    """A transformers cache for patched models in which each sequence has a length, and pages, of its own.

    Args:
        config: the model's config; all of its layers must be full attention.
        pages: how many pages there are, for all sequences together; allocated when first used.
        page: tokens of a page.
        format: as for ``LatentCache``.

    Raises:
        UsageError: for arguments that are not known, or groups that do not fit the model's latents.
        UnsupportedModelError: for a model with layers of other kinds.
    """

    def __init__(self, config: PreTrainedConfig, *, pages: int, page: int = 64, format: str = "model") -> None:
        plain = DynamicCache(config=config).layers
        kinds = {type(layer) for layer in plain}
        if kinds != {DynamicLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnsupportedModelError(f"a paged cache is for models of full attention alone, found {names}")
        self.table = PageTable(pages, page)
        self.format = parse_format(format)
        self.made_for = made_for(config)
        widths = expected_widths(config, len(plain))
        check_fits(self.format, widths)
        self._paged = [PagedLayer(self.table, self.format, each) for each in widths]
        super().__init__(layers=list(self._paged))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens of layer ``layer_idx``; see :meth:`PagedLayer.update`."""
        if layer_idx >= len(self._paged):
            raise UsageError(
                f"this PagedLatentCache was made for a model of {len(self._paged)} layers, and layer {layer_idx} was "
                "given tokens: make it from the config of the model it is used with"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def add(self) -> int:
        """The number of a new, empty sequence."""
        return self.table.add()

    def fork(self, sequence: int) -> int:
        """A new sequence that shares the pages of ``sequence`` until one of them writes into the last."""
        return self.table.fork(sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other one has are free again. UsageError for one of the present batch."""
        self._check_idle("removed", [sequence])
        self.table.remove(sequence)

    def crop_sequence(self, sequence: int, count: int) -> None:
        """Forget the last ``count`` tokens of one sequence. UsageError for one of the present batch."""
        self._check_idle("cropped", [sequence])
        self.table.crop(sequence, count)

    def reset(self) -> None:
        """Forget all sequences and their numbers; every page is free again, and stays allocated.

        UsageError inside a batch.
        """
        self._check_idle("removed", list(self.table.held))
        for sequence in list(self.table.held):
            self.table.remove(sequence)

    def _check_idle(self, what: str, sequences: Sequence[int]) -> None:
        """Lengths and pages of the present batch's sequences are in use until its block ends."""
        batch = self._paged[0].batch
        under_way = [] if batch is None else [each for each in self.table.check(sequences) if each in batch.sequences]
        if under_way:
            raise UsageError(
                f"sequences {under_way} cannot be {what} inside of the batch that they are in: end its block first"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Not for this cache: its sequences are cropped one by one."""
        raise UsageError("a paged cache has no common length: use crop_sequence(sequence, count)")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Not for this cache: a sequence is branched with :meth:`fork`."""
        raise self._no_common_batch("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not for this cache: a sequence is branched with :meth:`fork`."""
        raise self._no_common_batch("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not for this cache: sequences are chosen by :meth:`batch`, and dropped by :meth:`remove`."""
        raise self._no_common_batch("batch_select_indices")

    @staticmethod
    def _no_common_batch(what: str) -> UsageError:
        return UsageError(
            f"{what} is not for a paged cache, which has no common batch: branch a sequence with fork(sequence), drop "
            "one with remove(sequence), and name those of a call in batch(sequences, new_tokens)"
        )

    def offload(self, *_: Any, **__: Any) -> None:
        """Not for this cache."""
        raise UsageError(f"offload is not for a paged cache: {STAYS}")

    def prefetch(self, *_: Any, **__: Any) -> None:
        """Not for this cache."""
        raise UsageError(f"prefetch is not for a paged cache: {STAYS}")

    def length(self, sequence: int) -> int:
        """Stored tokens of one sequence."""
        (sequence,) = self.table.check([sequence])
        return self.table.lengths[sequence]

    @contextlib.contextmanager
    def batch(self, sequences: Sequence[int], new_tokens: int | Sequence[int]) -> Iterator[None]:
        """Call the model inside: row b of its batch is ``sequences[b]``, with ``new_tokens[b]`` tokens at the right.

        The tokens count as stored when the model was called in the block and it ends without an exception.

        Raises:
            UsageError: sequences that are not known, counts that don't fit, not enough free pages, or inside another
                batch.
        """
        if self._paged[0].batch is not None:
            raise UsageError("a batch is under way: end its block before the next one begins")
        sequences = self.table.check(sequences)
        many = isinstance(new_tokens, Iterable) and getattr(new_tokens, "ndim", 1) > 0
        counts = each_whole("new_tokens", new_tokens) if many else [whole("new_tokens", new_tokens)] * len(sequences)
        if not sequences or len(counts) != len(sequences) or min(counts) < 1:
            raise UsageError(f"a batch has at least one sequence, each with at least one new token; found {counts}")
        copies = self.table.reserve(sequences, counts)
        lengths = tuple(self.table.lengths[sequence] for sequence in sequences)
        for layer in self._paged:
            layer.copy_pages(copies)
            layer.batch, layer.written = Batch(tuple(sequences), tuple(counts), lengths), False
        try:
            yield
            if any(layer.written for layer in self._paged):
                self.table.advance(sequences, counts)
        finally:
            for layer in self._paged:
                layer.batch = None
            self.table.trim(sequences)

    def positions(self, tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """``position_ids`` int64 [B, S] of the present batch, padded at the left to S = ``tokens`` (with zeros)."""
        batch = self._paged[0].batch
        if batch is None:
            raise UsageError("positions belong to a batch: call it inside `with cache.batch(...):`")
        ends = torch.tensor([n + c for n, c in zip(batch.lengths, batch.counts, strict=True)], device=device)
        return (ends[:, None] + torch.arange(-tokens, 0, device=device)).clamp(min=0)
