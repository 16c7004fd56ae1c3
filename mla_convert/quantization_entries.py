"""Entries of a config's ``quantization_config``, each checked as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_convert.errors import FormatError
from mla_convert.source_schemes import CHANNEL, Block

INSTEAD = "dequantize the checkpoint with its own tools, or take one in another form"


def refuse(what: str, supported: str) -> FormatError:
    """The error for a block that has ``what``."""
    return FormatError(f"the config's quantization_config has {what}; supported are {supported}: {INSTEAD}")


def strings(given: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The lists under ``keys`` put together, each a list of strings or absent."""
    found: list[str] = []
    for key in keys:
        entries = given.get(key) or ()
        if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
            raise refuse(f"{key} = {entries!r:.80}", "lists of names")
        found += entries
    return tuple(found)


def pair(given: Mapping[str, Any], key: str) -> Block:
    """Two positive whole numbers, rows and columns of a block."""
    block = given.get(key)
    sound = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not isinstance(block, list | tuple) or not sound:
        raise refuse(f"{key} = {block!r}", "blocks of [rows, columns], such as [128, 128]")
    return block[0], block[1]


def group_block(given: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> Block:
    """The block that groups of so many columns are; −1 stands for whole rows."""
    size = given.get(key, default)
    if type(size) is not int or (size <= 0 and size != -1):
        raise refuse(f"{key} = {size!r}", "positive whole numbers, and -1 for a scale per row")
    return CHANNEL if size == -1 else (1, size)


def one_of(given: Mapping[str, Any], key: str, default: Any, supported: tuple[Any, ...]) -> Any:
    """An entry that has to be one of ``supported``."""
    value = given.get(key, default)
    if value not in supported:
        raise refuse(f"{key} = {value!r}", ", ".join(map(repr, supported)))
    return value


def mapping(given: Any, what: str) -> Mapping[str, Any]:
    """``given``, which has to be an object."""
    if not isinstance(given, Mapping):
        raise refuse(f"{what} = {given!r:.80}", "objects")
    return given
