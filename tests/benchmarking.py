"""The scripts in ``benchmarks/`` as modules."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
RESULTS = FOLDER / "results"


def script(name: str) -> ModuleType:
    """``benchmarks/NAME.py``, which finds the scripts beside it as it does when it is run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module
