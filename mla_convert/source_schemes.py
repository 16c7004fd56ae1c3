"""How weights are stored in codes, as data: a scheme, and which modules of a checkpoint are stored in which.

What a config says becomes these in :mod:`mla_convert.quantization_config`; how the stored tensors of a scheme become
numbers stands in :mod:`mla_convert.code_formats`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re

from mla_convert.errors import FormatError

#: Rows and columns of a weight that share one scale; None stands for all of them.
Block = tuple[int | None, int | None]
TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)


@dataclasses.dataclass(frozen=True)
class SourceScheme:
    """How the weights of some modules are stored.

    ``format`` names a row of :data:`mla_convert.code_formats.FORMATS`. ``block`` is how many rows and columns share a
    scale. ``zero_offset`` is added to a stored zero point.
    """

    format: str
    bits: int = 8
    block: Block = TENSOR
    symmetric: bool = True
    zero_offset: int = 0

    @property
    def label(self) -> str:
        """The scheme in a few words; two schemes that give other numbers have other labels."""
        shared = {TENSOR: "one scale", CHANNEL: "a scale per row", (None, 1): "a scale per column"}
        rows, columns = self.block
        size = f"groups of {columns}" if rows == 1 else f"blocks of {rows}×{columns}"
        zero = "" if self.symmetric else ", zero points" + (f" {self.zero_offset:+d}" if self.zero_offset else "")
        return f"{self.format}, {self.bits} bits, {shared.get(self.block, size)}{zero}"

    @property
    def is_fp8(self) -> bool:
        """Whether the codes are FP8 numbers that are multiplied by one scale."""
        return self.format in ("float8", "float-quantized")

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Scales down and across a weight [rows, columns], partial blocks at the edges included."""
        rows, columns = self.sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a block of a weight [rows, columns]."""
        return self.block[0] or max(shape[0], 1), self.block[1] or max(shape[1], 1)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A config's ``quantization_config``: schemes with the modules they are for, and the modules left as they were.

    Modules are named exactly, by ``re:`` and an expression that matches from the start, by wildcards, or by whole
    words of their path; a name without dots that begins with a capital stands for a class (:func:`stands_for`). An
    exact name goes before a pattern, and that before a class; of several of one kind the first in the alphabet decides,
    and of several groups with one target the last, as in compressed-tensors. ``literal`` says that modules are not
    ignored for some words of their path. ``rotated`` are modules whose activations are transformed before or after, so
    that their weights alone are not the model's. ``unreadable`` says why nothing stored in codes can be read, where
    that is so; plain weights can be all the same.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], SourceScheme], ...] = ()
    ignored: tuple[str, ...] = ()
    literal: bool = False
    rotated: tuple[str, ...] = ()
    unreadable: str | None = None

    def scheme(self, module: str) -> SourceScheme | None:
        """The scheme of a module that is stored in codes; None where the config has none for it."""
        schemes = {target: scheme for targets, scheme in self.groups for target in targets}
        fitting = [(_rank(target), target) for target in schemes if stands_for(target, module)]
        return schemes[min(fitting)[1]] if fitting else None

    def ignores(self, module: str) -> bool:
        """Whether the config lists the module among those left as they were."""
        entries = self.ignored if not self.literal else [e for e in self.ignored if e == module or _rank(e)]
        return any(stands_for(entry, module) for entry in entries)

    def rotates(self, module: str) -> bool:
        """Whether the config says that the module's activations are transformed when the model runs."""
        return any(stands_for(entry, module) for entry in self.rotated)


def _rank(target: str) -> int:
    return 2 if _is_class(target) else 1 if target.startswith("re:") or "*" in target else 0


def _is_class(target: str) -> bool:
    return target[:1].isupper() and "." not in target


def stands_for(pattern: str, module: str) -> bool:
    """Whether an entry of a config's list stands for a module.

    Files do not say of which class a module is: ``Embedding`` stands for those that embed, a class with ``Linear`` in
    its name for all others, and any other class, which has no weight of its own, for none.
    """
    if pattern.startswith("re:"):
        return _expression(pattern.removeprefix("re:")).match(module) is not None
    if any(wildcard in pattern for wildcard in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    if _is_class(pattern):
        embeds = "embed" in module.rpartition(".")[2]
        return embeds if pattern == "Embedding" else "Linear" in pattern and not embeds
    return f".{pattern.strip('.')}." in f".{module}."


@functools.cache
def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(
            f"the config's quantization_config has the expression {text!r}, which is none: {error}"
        ) from None
