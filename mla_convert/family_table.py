"""The README's table of families, made from the table in :mod:`mla_convert.families`.

``python -m mla_convert.family_table README.md`` writes it between its markers.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

from mla_convert.families import FAMILIES, Family

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def family_table() -> str:
    """A table in Markdown: a line for each family, with what it is called and which forms each side has."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| `model_type` | key side fused | value side fused | |"
    yield "|---|---|---|---|"
    reasons: list[str] = []
    for family in FAMILIES.values():
        cells = [_names(family), *(_fused(reason, reasons) for reason in (family.between_qk, family.between_vo))]
        yield f"| {' | '.join((*cells, family.notes))} |"
    yield ""
    yield from (f"{number}. Not fused: {reason}." for number, reason in enumerate(reasons, start=1))


def _names(family: Family) -> str:
    return ", ".join(f"`{name}`" for name in (family.model_type, *family.aliases))


def _fused(reason: str, reasons: list[str]) -> str:
    """Yes, or no with the number of its reason."""
    if not reason:
        return "yes"
    if reason not in reasons:
        reasons.append(reason)
    return f"no ({reasons.index(reason) + 1})"


def with_table(text: str) -> str:
    """``text`` with the table between its markers; ValueError where it has not both."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{family_table()}\n{END}{after}"


if __name__ == "__main__":
    file = pathlib.Path(sys.argv[1])
    file.write_text(with_table(file.read_text("utf-8")), "utf-8")
