"""The README's table of families is that of the code."""

from __future__ import annotations

import pathlib

import pytest

from mla_convert.families import FAMILIES
from mla_convert.family_table import family_table, with_table

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_the_readme_has_the_table_of_the_code() -> None:
    text = README.read_text("utf-8")
    assert with_table(text) == text, "run python -m mla_convert.family_table README.md"


def test_every_family_has_a_line_and_every_reason_a_number() -> None:
    table = family_table()
    for family in FAMILIES.values():
        (line,) = (line for line in table.splitlines() if line.startswith(f"| `{family.model_type}`"))
        assert line.count("no (") == bool(family.between_qk) + bool(family.between_vo)
        assert all(reason in table for reason in (family.between_qk, family.between_vo))


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="families: begin"):
        with_table("# Nothing")
