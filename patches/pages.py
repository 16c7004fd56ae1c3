"""Which pages hold which sequence: block tables, a free list, and pages shared by reference. Plain bookkeeping."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import UsageError


def whole(what: str, found: Any) -> int:
    """``found`` as an int, of whatever library; UsageError, naming ``what``, where it is none, as a bool is none."""
    try:
        if not isinstance(found, bool):
            return operator.index(found)
    except TypeError:
        pass
    raise UsageError(f"{what} must be a whole number, found {found!r}")


def each_whole(what: str, found: Any) -> list[int]:
    """A list of ints; UsageError, naming ``what``, where ``found`` holds something else, or nothing to go through."""
    try:
        entries = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else None
    except TypeError:  # a tensor without dimensions
        entries = None
    if entries is None:
        raise UsageError(f"{what} must be a list of whole numbers, found {found!r}")
    return [whole(f"each of {what}", entry) for entry in entries]


class PageTable:
    """Sequences as lists of pages of ``page`` tokens each, out of ``pages`` in all.

    A page that several sequences begin with is counted once for each, and is free again when the last lets it go.
    """

    def __init__(self, pages: int, page: int) -> None:
        for name, value in (("pages", pages), ("page", page)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is a whole number from 1, found {value!r}")
        self.page = page
        self.free = list(range(pages))[::-1]
        self.users = [0] * pages
        self.held: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._next = 0

    def add(self) -> int:
        """The number of a new, empty sequence."""
        self._next += 1
        self.held[self._next], self.lengths[self._next] = [], 0
        return self._next

    def fork(self, sequence: int) -> int:
        """A new sequence that begins with all that ``sequence`` holds, in the same pages."""
        (sequence,) = self.check([sequence])
        other = self.add()
        length = self.lengths[sequence]
        self.held[other], self.lengths[other] = self.held[sequence][: self._needed(length)], length
        for number in self.held[other]:
            self.users[number] += 1
        return other

    def _needed(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def crop(self, sequence: int, count: int) -> None:
        """Forget the last ``count`` tokens, and let go of pages that are no longer needed.

        Raises:
            UsageError: for fewer than none, or more than there are.
        """
        (sequence,), count = self.check([sequence]), whole("the number of tokens to forget", count)
        length = self.lengths[sequence]
        if not 0 <= count <= length:
            raise UsageError(f"sequence {sequence} has {length} tokens, {count} cannot be removed")
        self.lengths[sequence] = length - count
        self._keep(sequence, self._needed(length - count))

    def remove(self, sequence: int) -> None:
        """Forget the sequence and its number."""
        (sequence,) = self.check([sequence])
        self._keep(sequence, 0)
        del self.held[sequence], self.lengths[sequence]

    def _keep(self, sequence: int, count: int) -> None:
        held = self.held[sequence]
        while len(held) > count:
            number = held.pop()
            self.users[number] -= 1
            if not self.users[number]:
                self.free.append(number)

    def check(self, sequences: Sequence[int]) -> list[int]:
        """The same numbers; UsageError unless these are sequences of this table, each once."""
        found = each_whole("sequences", sequences)
        if any(sequence not in self.held for sequence in found) or len(set(found)) != len(found):
            raise UsageError(f"sequences must be distinct and known: found {found}, known {sorted(self.held)}")
        return found

    def reserve(self, sequences: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for ``counts`` more tokens of each sequence.

        Returns:
            (from, to): pages to copy before anything is written, since others share their beginning.

        Raises:
            UsageError: there are not enough free pages; nothing has changed then.
        """
        missing = [
            max(0, self._needed(self.lengths[sequence] + count) - len(self.held[sequence]))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        ends = collections.Counter(
            number for sequence in sequences if (number := self._open_page(sequence)) is not None
        )
        needed = sum(missing) + sum(min(writers, self.users[number] - 1) for number, writers in ends.items())
        if needed > len(self.free):
            raise UsageError(
                f"{needed} pages of {self.page} tokens are needed and {len(self.free)} of {len(self.users)} are free: "
                "remove sequences, or make the cache with more pages"
            )
        copies = []
        for sequence, count in zip(sequences, missing, strict=True):
            number = self._open_page(sequence)
            if number is not None and self.users[number] > 1:
                copies.append((number, self._take()))
                self.users[number] -= 1
                self.held[sequence][self.lengths[sequence] // self.page] = copies[-1][1]
            self.held[sequence].extend(self._take() for _ in range(count))
        return copies

    def _open_page(self, sequence: int) -> int | None:
        """The page, filled in part, that the next token goes into."""
        length = self.lengths[sequence]
        return self.held[sequence][length // self.page] if length % self.page else None

    def _take(self) -> int:
        number = self.free.pop()
        self.users[number] = 1
        return number

    def advance(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Count tokens that have been written."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.lengths[sequence] += count

    def trim(self, sequences: Sequence[int]) -> None:
        """Let go of pages that were reserved and not written."""
        for sequence in sequences:
            self._keep(sequence, self._needed(self.lengths[sequence]))

    def slots(self, sequences: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Where the next ``counts`` tokens go: page number · page size + place in it, sequence by sequence."""
        found = []
        for sequence, count in zip(sequences, counts, strict=True):
            held, start = self.held[sequence], self.lengths[sequence]
            found += [held[at // self.page] * self.page + at % self.page for at in range(start, start + count)]
        return found

    def block_table(self, sequences: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """int32 [B, most pages of one of them]; 0 where a sequence has no more, which nobody reads."""
        width = max((len(self.held[sequence]) for sequence in sequences), default=0)
        rows = [self.held[sequence] + [0] * (width - len(self.held[sequence])) for sequence in sequences]
        return torch.tensor(rows, dtype=torch.int32, device=device).view(len(sequences), width)
