"""What is no path, or one that the system will not follow or read, is one error of ours that names it."""

from __future__ import annotations

import io
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import models
import pytest

import mla_convert
from mla_convert.checkpoint import Checkpoint
from mla_convert.cli import app
from mla_convert.console import Output
from mla_convert.demo import demo
from mla_convert.errors import CheckpointError, MLAConvertError, SidecarError, UsageError
from mla_convert.paths import new_file, path_of, resolved
from mla_convert.storage import AbsorbedCheckpoint


@pytest.mark.parametrize("given", [3, None, b"folder", "", "a\0b", ["folder"], 1.5], ids=repr)
def test_no_path(given: Any, example_path: pathlib.Path) -> None:
    model = models.deepseek_v3()
    calls: list[Callable[[], object]] = [
        lambda: path_of(given, "OUT"),
        lambda: mla_convert.convert(given, "out"),
        lambda: mla_convert.convert(example_path, given),
        lambda: mla_convert.load(given),
        lambda: mla_convert.verify(given),
        lambda: mla_convert.bench(given),
        lambda: Checkpoint.open(given),
        lambda: AbsorbedCheckpoint.open(given),
    ]
    if given is not None:
        calls += [
            lambda: mla_convert.patch(model, given),
            lambda: mla_convert.verify(model, given),
            lambda: mla_convert.verify(example_path, prompts=given, batch=2),
            lambda: demo(given),
        ]
    for call in calls:
        with pytest.raises(UsageError, match="path|takes a transformers model or a checkpoint folder"):
            call()
    with pytest.raises(mla_convert.errors.PatchError, match="not patched"):
        mla_convert.unpatch(model)


def folder_instead(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def loop_instead(file: pathlib.Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


@pytest.mark.parametrize("spoil", [folder_instead, loop_instead])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"])
def test_files_of_a_checkpoint_that_cannot_be_read(
    example_path: pathlib.Path, tmp_path: pathlib.Path, name: str, spoil: Callable[[pathlib.Path], None]
) -> None:
    shutil.copytree(example_path, tmp_path / "source")
    spoil(tmp_path / "source" / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") if spoil is folder_instead else None):
        Checkpoint.open(tmp_path / "source")


@pytest.mark.parametrize("spoil", [folder_instead, loop_instead])
def test_files_of_absorbed_weights_that_cannot_be_read(
    example_path: pathlib.Path, tmp_path: pathlib.Path, spoil: Callable[[pathlib.Path], None]
) -> None:
    report = mla_convert.convert(example_path, tmp_path / "whole")
    for name in report.files:
        if name != "README.md":
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            spoil(tmp_path / name / name)
            with pytest.raises(SidecarError, match=name):
                AbsorbedCheckpoint.open(tmp_path / name)


def test_what_the_system_refuses(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user who runs the tests may be allowed everything, so the answer of the system is given here."""

    def refuse(path: pathlib.Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=f"{example_path} cannot be read .Permission denied"):
        Checkpoint.open(example_path)
    monkeypatch.undo()
    for long in ("x" * 300, "x/" * 3000):
        for call in (Checkpoint.open, AbsorbedCheckpoint.open, mla_convert.load, mla_convert.verify):
            with pytest.raises(MLAConvertError, match="File name too long"):
                call(tmp_path / long)  # type: ignore[operator]


def test_links_are_followed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert resolved(tmp_path / "link" / "more", "OUT") == tmp_path / "missing" / "more"
    assert resolved(tmp_path / "file" / "more", "OUT") == tmp_path / "file" / "more"
    with pytest.raises(UsageError, match="OUT .*loop.*cannot be followed"):
        resolved(tmp_path / "loop" / "more", "OUT")


def test_new_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert new_file(tmp_path / "new.json", "--json") == tmp_path / "new.json"
    (tmp_path / "link").symlink_to("missing")
    with pytest.raises(UsageError, match="--json .*link: it exists already"):
        new_file(tmp_path / "link", "--json")
    with pytest.raises(UsageError, match="--json is '', which is no path"):
        Output(json_target="")
    with pytest.raises(UsageError, match="there is no folder"):
        new_file(tmp_path / "none" / "new.json", "--json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="may not be written to"):
        new_file(tmp_path / "new.json", "--json")
    with pytest.raises(UsageError, match="cannot be made"):
        demo(tmp_path / "link" / "none")


def run_printing(encoding: str, arguments: list[object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Exit code, output and errors of the program where both are written in ``encoding``."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", streams[0])
        patch.setattr("sys.stderr", streams[1])
        with pytest.raises(SystemExit) as left:
            app([str(argument) for argument in arguments])
        for stream in streams:
            stream.flush()
    printed = [stream.buffer.getvalue().decode(encoding) for stream in streams]  # type: ignore[attr-defined]
    return left.value.code or 0, *printed  # type: ignore[return-value]


@pytest.mark.usefixtures("invoke")  # puts the logging back
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_names_that_the_terminal_cannot_print(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Such a name is printed escaped, and the weights are written all the same; so are a help text and an error."""
    out = tmp_path / "größer →\udcff\nzweite Zeile"
    code, printed, errors = run_printing(encoding, ["convert", example_path, out], monkeypatch)
    assert code == 0 and "\\udcff" in printed and not errors
    AbsorbedCheckpoint.open(out)
    code, printed, errors = run_printing(encoding, ["convert", out / "→", "x"], monkeypatch)
    assert code == 2 and errors.count("\n") == 1 and "there is no folder" in errors and not printed
    assert run_printing(encoding, ["bench", "--help"], monkeypatch)[0] == 0
