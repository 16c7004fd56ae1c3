"""Features that are broken on purpose: every place that is changed, and every test that is named, is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import broken

    return broken


@pytest.mark.slow
def test_every_place_and_every_test_is_there(tool: ModuleType) -> None:
    for row in tool.ROWS:
        for where, _ in row.changes:
            holder, name = tool.place(where)
            assert hasattr(holder, name), where
    named = list(dict.fromkeys(test for row in tool.ROWS for test in row.tests))
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    run = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout[-2000:]
    found = run.stdout.splitlines()
    assert all(any(tool.is_of(node, test) for node in found) for test in named)


def test_a_row_that_stays_green_is_an_error(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two features, of which one is said to have been broken and was not noticed."""
    answers = {-1: [], 0: [], 1: ["tests/test_it.py::test_it"]}

    class Pool:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def imap_unordered(self, judge: object, chosen: list[int], chunksize: int) -> list[object]:
            return [(number, answers[number], 1.0, "") for number in chosen]

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "broken.md")
    monkeypatch.setattr(tool, "ROWS", tool.ROWS[:2])
    monkeypatch.setattr(tool, "prepare", lambda: None)
    monkeypatch.setattr(tool.test_all, "commit", lambda: "0123abc")
    monkeypatch.setattr(tool.multiprocessing, "get_context", lambda _: type("", (), {"Pool": Pool}))
    assert tool.main([]) == 1 and not tool.RECORD.exists()
    assert "still green: tests/test_it.py::test_it" in capsys.readouterr().out
    answers[1] = []
    assert tool.main([]) == 0
    text = tool.RECORD.read_text("utf-8")
    assert "| commit | 0123abc |" in text and text.count(tool.ROWS[1].feature) == 1


def test_a_test_is_red_when_one_of_its_parameters_is(tool: ModuleType) -> None:
    assert tool.is_of("tests/a.py::test_b", "tests/a.py::test_b")
    assert tool.is_of("tests/a.py::test_b[1]", "tests/a.py::test_b")
    assert not tool.is_of("tests/a.py::test_bc", "tests/a.py::test_b")
