"""Messages name options as the caller wrote them: Python's way in a call, dashes on the command line."""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer.main
from conftest import ROOT

from mla_convert.cli import app
from mla_convert.cli_options import Form
from mla_convert.wording import as_typed, option

Invoke = Callable[..., Any]


@pytest.mark.parametrize(
    ("name", "value", "called", "typed"),
    [
        ("qk_bits", 5, "qk_bits=5", "--qk-bits 5"),
        ("group_size", "48", "group_size='48'", "--group-size 48"),
        ("form", Form.fused, "form='fused'", "--form fused"),
        ("measure", True, "measure=True", "--measure"),
        ("resume", False, "resume=False", "--no-resume"),
        ("contexts", [64, 128], "contexts=[64, 128]", "--context 64,128"),
        ("push", "no name", "push='no name'", "--push 'no name'"),
        ("parts", None, "parts=None", "--parts None"),
    ],
)
def test_an_option_and_its_value(name: str, value: Any, called: str, typed: str) -> None:
    assert option(name, value) == called and option(name) == name
    with as_typed():
        assert option(name, value) == typed and option(name) == typed.split()[0].replace("--no-", "--")
    assert option(name, value) == called


def sources() -> Iterator[pathlib.Path]:
    for room in ("mla_convert", "kernels", "patches"):
        yield from sorted((ROOT / room).glob("*.py"))


def typed_options() -> set[str]:
    """Every option of every command, without its dashes."""
    command: Any = typer.main.get_command(app)
    options = {o for each in command.commands.values() for parameter in each.params for o in parameter.opts}
    return {o.removeprefix("--") for o in options if o.startswith("--")}


def test_what_is_called_an_option_is_one() -> None:
    """A word in ``option("…")`` that the command line lacks would be advice that nobody can follow."""
    named = set()
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option":
                named |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    assert {"group_size", "contexts", "backend", "push"} <= named
    with as_typed():
        assert {option(name).removeprefix("--") for name in named} <= typed_options()


def texts(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_no_message_spells_an_option_itself() -> None:
    """Words such as ``parts=`` in the text of an error would not be what somebody typed."""
    names = "|".join(sorted(name.replace("-", "_") for name in typed_options()))
    spelled = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and re.search(r"Error$", getattr(node.func, "id", "")):
                found = [text for text in texts(node) if re.search(rf"(?<![\w.])({names}|contexts)=", text)]
                spelled += [f"{file.name}:{node.lineno}: {text}" for text in found]
    assert not spelled


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("convert EXAMPLE OUT --workers 0", "--workers 0; a run needs a whole number of threads"),
        ("convert EXAMPLE OUT --parts 2", "--parts 2 belongs to --target native, and this is sidecar"),
        ("convert EXAMPLE OUT --link copy", "--link copy belongs to --target standalone, and this is sidecar"),
        ("convert EXAMPLE OUT --target native --parts 0", "--parts 0; a native checkpoint has"),
        ("convert EXAMPLE OUT --target native --parts 3", "--parts 3: "),
        ("convert EXAMPLE OUT --target native --qk-bits 8", "--qk-bits 8: --target native keeps every value"),
        ("convert EXAMPLE OUT --target hf --form fused", "--form fused: --target hf keeps every value"),
        ("convert EXAMPLE OUT --form fused --qk factored --vo auto", "--form fused was asked for, and --qk factored"),
        ("convert EXAMPLE OUT --device nowhere", "--device nowhere cannot be used here"),
        ("convert EXAMPLE OUT --push nobody", "--push nobody is no name of a repository"),
        ("convert EXAMPLE OUT --base-model 'a b'", "--base-model 'a b' is no name of a model on the hub"),
        ("convert EXAMPLE OUT --calibrate no-text", "--calibrate and --measure are about quantized weights"),
        ("verify EXAMPLE --prefill 0", "--prefill 0; at least 2 are needed"),
        ("verify EXAMPLE --decode 1", "--decode 1; at least 3 are needed"),
        ("verify EXAMPLE --prefill 9000000", "--prefill 9000000 and --decode 48 take 9,000,048 positions"),
        ("verify EXAMPLE --dtype bfloat16 --batch 2", "--batch 2 times --decode 64 gives 128 positions"),
        ("verify EXAMPLE --backend nothing", "--backend nothing is not known"),
        ("verify EXAMPLE --backend triton", "--backend triton "),
        ("bench EXAMPLE --repetitions 1", "--repetitions 1 gives no quartiles"),
        ("bench EXAMPLE --batch 0", "--batch 0 leaves no sequence to decode"),
        ("bench EXAMPLE --context 5000", "--context 5000: this model has"),
        ("bench EXAMPLE --plot plot.xyz", "--plot plot.xyz: the name's ending"),
    ],
)
def test_the_command_line_names_what_was_typed(
    arguments: str,
    words: str,
    invoke: Invoke,
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    places = {"EXAMPLE": str(example_path), "OUT": str(tmp_path / "out")}
    result = invoke(*(places.get(word, word) for word in shlex.split(arguments)))
    assert result.exit_code == 2, result.output
    assert words in result.stderr and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
