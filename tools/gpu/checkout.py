"""Make the packages of this checkout importable, installed or not.

The repository root must not be on ``sys.path``: its folder ``kernels`` would stand in for Hugging Face's package of
that name, which transformers imports. So the packages are found by the mapping of ``pyproject.toml``, as an editable
installation finds them, and what is checked is this checkout whatever else is installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Checkout:
    """A finder of the packages that ``pyproject.toml`` maps to folders."""

    def __init__(self) -> None:
        mapping = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-dir"]
        self.folders = {name: ROOT / folder for name, folder in mapping.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The package ``name``, or None for whatever is no package of ours; modules inside are found the usual way."""
        folder = self.folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def use() -> None:
    """Take the root off ``sys.path``, and put on it the helpers of tests and benchmarks; import packages from here."""
    sys.path[:] = [entry for entry in sys.path if entry and pathlib.Path(entry).resolve() != ROOT]
    sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
    sys.meta_path.insert(0, Checkout())


use()
