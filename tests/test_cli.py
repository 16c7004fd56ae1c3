"""The command line: three ways to start it, what its help costs, its options and exit codes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mla_convert
from mla_convert import conversion, inspection
from mla_convert.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {
    "mla-convert": [str(Path(sys.executable).with_name("mla-convert"))],
    "python -m mla_convert": [sys.executable, "-m", "mla_convert"],
    "python cli.py": [sys.executable, "cli.py"],
}
HEAVY = {"torch", "transformers", "triton", "safetensors", "numpy", "huggingface_hub", "compressed_tensors"}


def run(program: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository root; nothing is asked on its standard input."""
    command = [*program, *map(str, arguments)]
    plain = os.environ | {"_TYPER_FORCE_DISABLE_TERMINAL": "1"}  # some CI services ask for colours by environment
    return subprocess.run(command, cwd=ROOT, env=plain, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    answers = {name: run(program, "--help") for name, program in PROGRAMS.items()}
    assert [answer.returncode for answer in answers.values()] == [0, 0, 0], answers
    return {name: answer.stdout for name, answer in answers.items()}


def test_three_names_one_program(helps: dict[str, str]) -> None:
    assert len(set(helps.values())) == 1
    (text,) = set(helps.values())
    for words in ("Usage: mla-convert ", "--quiet", "--verbose", "--version", "convert"):
        assert words in text


@pytest.mark.parametrize("command", ["inspect", "convert", "verify", "bench"])
def test_help_keeps_square_brackets(command: str) -> None:
    assert "org/name[@revision]" in " ".join(run(PROGRAMS["mla-convert"], command, "--help").stdout.split())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_version(name: str) -> None:
    answer = run(PROGRAMS[name], "--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"mla-convert {mla_convert.__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr))\n"
        f"from mla_convert.cli import app\napp({arguments!r})"
    )
    answer = run([sys.executable, "-P", "-c", code])
    loaded = set(answer.stderr.split())
    assert answer.returncode == 0 and {"mla_convert", "typer"} <= loaded
    assert not HEAVY & loaded


@pytest.mark.parametrize("program", [["cli.py"], ["-m", "mla_convert"]], ids=" ".join)
def test_without_an_installation_one_line_says_what_to_do(program: list[str]) -> None:
    answer = run([sys.executable, "-S", *program], "--version")  # -S: no site-packages, so nothing is installed
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.count("\n") == 1 and "pip install -e ." in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command"),
        (["--nonsense"], "No such option"),
        (["convert"], "Missing argument"),
        (["convert", "a", "b", "--form", "melted"], "'melted' is not one of 'auto'"),
        (["-q", "-v", "convert", "a", "b"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_exits_with_2_and_no_traceback(arguments: list[str], words: str) -> None:
    answer = run(PROGRAMS["mla-convert"], *arguments)
    assert answer.returncode == 2 and answer.stdout == ""
    assert words in " ".join(answer.stderr.split()) and "Traceback" not in answer.stderr


Invoke = Callable[..., Any]


def test_convert_says_what_it_did(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    result = invoke("convert", example_path, tmp_path / "out")
    assert result.exit_code == 0 and result.stderr == ""
    report = conversion.convert(example_path, tmp_path / "again")
    for figure in (report.qk.factored, report.qk.fused, report.vo.factored, report.vo.fused):
        assert f"{figure:,}" in result.stdout
    assert "262 kB" in result.stdout and "largest rounding error" in result.stdout
    assert f"wrote {tmp_path / 'out'}\n" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(report.files)


def test_convert_hands_its_options_on(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    chosen = ["--form", "fused", "--vo", "factored", "--dtype", "float32"]
    result = invoke("convert", example_path, tmp_path / "out", *chosen, "--json", "-")
    report = json.loads(result.stdout)
    assert (report["qk"]["form"], report["vo"]["form"], report["dtype"]) == ("fused", "factored", "float32")
    assert report["out"] == str(tmp_path / "out") and not report["dry_run"]
    assert "wrote" in result.stderr


def test_a_dry_run_writes_nothing(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    result = invoke("convert", example_path, tmp_path / "out", "--dry-run", "--qk", "fused")
    assert result.exit_code == 0 and "nothing was written" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["verify EXAMPLE --prefill 16 --decode 6 --batch 2", "bench EXAMPLE --context 8 --repetitions 3"],
)
def test_quiet_also_keeps_libraries_quiet(command: str, example_path: Path) -> None:
    """In a process of its own: torchao, where it is installed, warns when transformers imports it."""
    words = [str(example_path) if word == "EXAMPLE" else word for word in command.split()]
    result = run([sys.executable, "-m", "mla_convert"], "--quiet", *words)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_quiet_gives_the_loggers_back(invoke: Invoke, example_path: Path) -> None:
    names = ("torchao", "torch.utils._pytree")
    levels = [logging.getLogger(name).level for name in names]
    seen: list[int] = []

    def noted(*_: Any, **__: Any) -> None:
        seen.extend(logging.getLogger(name).level for name in names)
        raise UsageError("seen enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "inspect_checkpoint", noted)
        assert invoke("--quiet", "inspect", example_path).exit_code == 2
    assert seen == [logging.ERROR, logging.ERROR]
    assert [logging.getLogger(name).level for name in names] == levels


def test_quiet_leaves_nothing_but_the_json_file(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    result = invoke("--quiet", "convert", example_path, tmp_path / "out", "--json", tmp_path / "report.json")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["layers"] == 4


def test_a_json_file_that_exists_stops_the_work(invoke: Invoke, example_path: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("mine", "utf-8")
    result = invoke("convert", example_path, tmp_path / "out", "--json", tmp_path / "report.json")
    assert result.exit_code == 2 and "nothing is overwritten" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_faulty_source_is_one_line(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("convert", tmp_path, tmp_path / "out")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {tmp_path} has no config.json") and result.stderr.count("\n") == 1


def test_verbose_says_where_the_error_arose(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("--verbose", "convert", tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")


def test_an_interrupted_run_exits_with_130(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", interrupted)
    result = invoke("convert", "a", tmp_path / "out")
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_a_fault_of_ours_keeps_its_traceback(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def faulty(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(conversion, "convert", faulty)
    assert isinstance(invoke("convert", "a", tmp_path / "out").exception, ZeroDivisionError)


def test_a_reader_that_goes_away_is_no_error(example_path: Path, tmp_path: Path) -> None:
    command = [*PROGRAMS["mla-convert"], "convert", str(example_path), str(tmp_path / "out"), "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in said and "BrokenPipe" not in said
