"""The command line: three ways to start it, what its help costs, its options and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mla_convert

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
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)


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
        (["convert", "a", "b", "--form", "melted"], "'auto', 'factored', 'fused'"),
        (["-q", "-v", "convert", "a", "b"], "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_exits_with_2_and_no_traceback(arguments: list[str], words: str) -> None:
    answer = run(PROGRAMS["mla-convert"], *arguments)
    assert answer.returncode == 2 and answer.stdout == ""
    assert words in " ".join(answer.stderr.split()) and "Traceback" not in answer.stderr
