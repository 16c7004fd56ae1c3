"""``make test-all`` records a whole green run, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHOLE = ["tests", "--nbmake", "notebooks/01_absorption.ipynb"]


@pytest.fixture
def tool() -> ModuleType:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("record_test_all", ROOT / "tools" / "test_all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, arguments: list[str]
) -> str | None:
    """Run the tool over a pytest run that ended with ``code``; return the record, or None without one."""
    monkeypatch.setattr(tool, "ROOT", folder)
    monkeypatch.setattr(tool, "RECORD", folder / "results" / "test_all.md")
    monkeypatch.setattr(tool, "commit", lambda: "0123abc")
    monkeypatch.setattr(tool, "run_pytest", lambda _: (code, "7 passed in 1.00s"))
    assert tool.main(arguments) == code
    return tool.RECORD.read_text("utf-8") if tool.RECORD.exists() else None


def test_a_green_run_is_recorded(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = record(tool, monkeypatch, tmp_path, 0, WHOLE)
    assert text is not None
    assert "| commit | 0123abc |" in text and "| result | 7 passed in 1.00s |" in text


@pytest.mark.parametrize(
    ("code", "arguments"),
    [(1, WHOLE), (0, ["-k", "name", *WHOLE]), (0, ["tests/test_cli.py"])],
    ids=["red", "-k", "a file"],
)
def test_nothing_else_is(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, arguments: list[str]
) -> None:
    assert record(tool, monkeypatch, tmp_path, code, arguments) is None


def test_the_closing_line_is_pytests(
    tool: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # one process is enough for two tests
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n", "utf-8")
    code, closing = tool.run_pytest(
        [str(tmp_path / "test_two.py"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    )
    assert code == 0 and closing.startswith("2 passed in ")
    assert closing in capfd.readouterr().out


def test_the_commit_is_named(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full hash, with a remark when files differ from it; the record itself doesn't count."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("code.py", "record.md"):
        (tmp_path / name).write_text("1", "utf-8")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "record.md")
    (tmp_path / "record.md").write_text("2", "utf-8")
    assert re.fullmatch("[0-9a-f]{40}", tool.commit())
    (tmp_path / "code.py").write_text("2", "utf-8")
    assert re.fullmatch("[0-9a-f]{40} with uncommitted changes", tool.commit())
