"""Where the benchmarks' figures go: a part of a measurement never takes the place of the whole."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import benchmarking
import pytest

SCRIPTS = sorted(path.stem for path in benchmarking.FOLDER.glob("*.py") if path.stem != "recording")
recording = benchmarking.script("recording")


def write(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=["one", "two"])
    parser.add_argument("--long-histories", type=int, nargs="+", default=[7])
    parser.add_argument("--folder")
    recording.add_json(parser)
    recording.write(parser, parser.parse_args(arguments), {"figures": 1}, aside=("folder",))


@pytest.fixture
def results(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of results of a script named speed.py."""
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/speed.py"])
    return tmp_path


@pytest.mark.parametrize("arguments", ["", "--only one two", "--long-histories 7", "--folder elsewhere"])
def test_the_whole_is_recorded(arguments: str, results: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(*arguments.split())
    assert json.loads((results / "speed.json").read_text("utf-8")) == {"figures": 1} and not capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--only one", "--only two one", "--long-histories 7 8 --only one"])
def test_a_part_is_not(arguments: str, results: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "speed.json").write_text("the whole")
    write(*arguments.split())
    assert (results / "speed.json").read_text() == "the whole"
    said = capsys.readouterr().out
    assert "speed.json stays as it is" in said and all(word in said for word in arguments.split() if "--" in word)


def test_a_part_goes_where_it_is_asked_to(results: pathlib.Path) -> None:
    write("--only", "one", "--json", str(results / "part.json"))
    assert [path.name for path in results.iterdir()] == ["part.json"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_records_here(name: str) -> None:
    text = (benchmarking.FOLDER / f"{name}.py").read_text("utf-8")
    assert text.count("recording.add_json(parser)") == text.count("recording.write(parser, ") == 1
    assert '"--json"' not in text and (benchmarking.RESULTS / f"{name}.json").is_file()
