"""The error boundary, the places where output goes, and what becomes JSON."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
from pathlib import Path

import pytest
import torch

from mla_convert import console
from mla_convert.console import Output, Verbosity
from mla_convert.errors import CheckpointError, UsageError
from mla_convert.jsonable import jsonable
from mla_convert.units import format_bytes

NO_MEMORY = (
    "there is not enough memory for this, or no thread left; free some, or ask for less at once (workers, sequences, "
    "tokens)"
)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (CheckpointError("[bold] shard 2 is missing"), 2, "error: [bold] shard 2 is missing\n"),
        (CheckpointError("no folder a\nb\x1b[2J"), 2, "error: no folder a\\nb\\x1b[2J\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/locked"), 2, "error: /locked: Permission denied\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: No space left on device\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, f"error: {NO_MEMORY}\n"),
        (RuntimeError("std::bad_alloc"), 2, f"error: {NO_MEMORY}\n"),
        (RuntimeError("can't start new thread"), 2, f"error: {NO_MEMORY}\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_one_line_and_a_code(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, console.error_boundary():
        raise error
    assert caught.value.code == code
    output = capsys.readouterr()
    assert output.err == words and output.out == ""


def test_a_long_message_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), console.error_boundary():
        raise CheckpointError("word " * 100 + "end")
    assert capsys.readouterr().err.count("\n") == 1


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), console.error_boundary():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [(Verbosity.QUIET, ["e"]), (Verbosity.NORMAL, ["w", "e"]), (Verbosity.VERBOSE, ["d", "w", "e"])],
    ids=lambda value: value.name if isinstance(value, Verbosity) else "",
)
def test_logging_says_as_much_as_was_asked(
    verbosity: Verbosity, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.LOGGER, "handlers", [])
    monkeypatch.setattr(console.LOGGER, "level", logging.NOTSET)
    for _ in range(2):  # a second call must not double the lines
        console.set_up_logging(verbosity)
    logger = logging.getLogger("mla_convert.anything")
    logger.debug("<d>")
    logger.warning("<w>")
    logger.error("<e>")
    output = capsys.readouterr()
    assert [letter for letter in "dwe" for _ in range(output.err.count(f"<{letter}>"))] == shown
    assert output.out == ""


def test_quiet_and_verbose_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        Verbosity.choose(quiet=True, verbose=True)


def show(output: Output) -> None:
    output.table("Sides", ["side", "numbers"], [["key [C]", "1,024"]])
    with output.progress("layers") as progress:
        progress(1, 2)
    output.json({"answer": 1})


def test_without_json_the_table_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show(Output())
    output = capsys.readouterr()
    assert "key [C]" in output.out and "1,024" in output.out and "answer" not in output.out
    assert output.err == ""


def test_json_alone_is_on_standard_output_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    show(Output(json_target="-"))
    output = capsys.readouterr()
    assert json.loads(output.out) == {"answer": 1}
    assert "key [C]" in output.err


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    show(Output(json_target=str(target)))
    assert json.loads(target.read_text("utf-8")) == {"answer": 1}
    assert "key [C]" in capsys.readouterr().out


def test_quiet_leaves_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show(Output(Verbosity.QUIET, "-"))
    output = capsys.readouterr()
    assert json.loads(output.out) == {"answer": 1} and output.err == ""


def test_a_json_file_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match="nothing is overwritten"):
        Output(json_target=str(tmp_path / "there.json"))
    with pytest.raises(UsageError, match="no folder"):
        Output(json_target=str(tmp_path / "nowhere" / "report.json"))


def test_plain_values() -> None:
    @dataclasses.dataclass
    class Result:
        path: Path
        dtype: torch.dtype
        error: float
        names: tuple[str, ...]
        layers: dict[int, float]

    result = Result(Path("a/b"), torch.bfloat16, math.nan, ("x",), {3: math.inf})
    expected = {"path": "a/b", "dtype": "torch.bfloat16", "error": None, "names": ["x"], "layers": {"3": None}}
    assert jsonable(result) == expected
    assert jsonable([True, 1, 0.5, None, "text"]) == [True, 1, 0.5, None, "text"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (5_611_352, "5.61 MB"),
        (2**50, "1.13 PB"),
    ],
)
def test_bytes_are_given_in_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_sizes_that_no_memory_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for rows in (1 << 60, 1 << 62, 1 << 70):
        with pytest.raises(SystemExit), console.error_boundary():
            torch.arange(rows)
        assert NO_MEMORY in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="shape"), console.error_boundary():
        torch.empty(2).view(3)
