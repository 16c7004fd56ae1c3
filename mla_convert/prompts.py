"""What models are compared on: real text where a tokenizer is there, random token numbers otherwise.

The text is, in this order: the file that the call names; ``held_out.txt`` in the checkpoint's folder; the text that
ships with this package.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import UsageError
from mla_convert.paths import path_of
from mla_convert.wording import option

TOKENIZER = "tokenizer.json"
HELD_OUT = "held_out.txt"
_SEED = 0


class Prompts:
    """A stream of token numbers that is cut into rows; past its end it begins again.

    ``origin`` says what it is made of, ``description`` also how much was taken, and ``random`` whether it is no text.
    """

    def __init__(self, stream: Tensor, description: str, *, random: bool) -> None:
        self.stream = stream
        self.random = random
        self.origin = description
        self._taken = 0

    def take(self, rows: int, length: int) -> Tensor:
        """The next ``rows`` pieces of ``length`` tokens: int64 [rows, length]."""
        at = torch.arange(self._taken, self._taken + rows * length) % len(self.stream)
        self._taken += rows * length
        return self.stream[at].view(rows, length)

    @property
    def description(self) -> str:
        """What the tokens are, how many were used, and whether they had to be repeated."""
        again = f", repeated: it has {len(self.stream)}" if self._taken > len(self.stream) else ""
        return f"{self.origin} ({self._taken} tokens{again})"


def read_prompts(
    folder: str | os.PathLike[str] | None, vocabulary: int, prompts: str | os.PathLike[str] | None = None
) -> Prompts:
    """Tokens of text, if ``folder`` has a ``tokenizer.json``, or seeded random numbers below ``vocabulary``.

    Raises:
        UsageError: ``prompts`` is given and cannot be read or there is no tokenizer for it; or the tokenizer gives
            numbers that the model does not have.
    """
    tokenizer = None if folder is None else pathlib.Path(folder) / TOKENIZER
    if tokenizer is None or not tokenizer.is_file():
        if prompts is not None:
            raise UsageError(
                f"{prompts} is text, and there is no {TOKENIZER} in {folder or 'the place the model came from'}: put "
                f"the model's tokenizer there, or leave {option('prompts')} out to compare on random tokens"
            )
        stream = torch.randint(vocabulary, (1 << 16,), generator=torch.Generator().manual_seed(_SEED))
        return Prompts(stream, f"random tokens, seed {_SEED}, since there is no tokenizer", random=True)
    file = text_file(tokenizer.parent, prompts)
    stream = _tokenize(tokenizer, file)
    if int(stream.max()) >= vocabulary:
        raise UsageError(
            f"{tokenizer} gives the token {int(stream.max())}, and the model's vocabulary has {vocabulary}: it is the "
            "tokenizer of another model"
        )
    return Prompts(stream, f"text of {file}", random=False)


def text_file(folder: pathlib.Path, prompts: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """The text that models are compared on: ``prompts``, or what stands in for it."""
    if prompts is not None:
        return path_of(prompts, option("prompts"))
    own = folder / HELD_OUT
    return own if own.is_file() else pathlib.Path(__file__).parent / "example" / HELD_OUT


def _tokenize(tokenizer: pathlib.Path, file: pathlib.Path) -> Tensor:
    """int64 [n], n > 0."""
    from tokenizers import Tokenizer

    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as text ({error}); give a text file in UTF-8") from error
    try:
        reader = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises nothing more precise
        raise UsageError(
            f"{tokenizer} cannot be read ({error}); take the file that belongs to the checkpoint"
        ) from error
    ids: list[Any] = reader.encode(text, add_special_tokens=False).ids
    if not ids:
        raise UsageError(f"{file} holds no text; give a file with some")
    return torch.tensor(ids, dtype=torch.int64)
