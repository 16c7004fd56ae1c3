"""The demonstration: one run of all of it, what it shows, and what it does when something is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_convert import demo
from mla_convert.demo import DemoReport
from mla_convert.errors import UsageError
from mla_convert.storage import AbsorbedCheckpoint

Invoke = Callable[..., Any]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the run said."""
    return []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> DemoReport:
    """One run."""
    with pytest.MonkeyPatch.context() as quicker:
        quicker.setattr(demo, "REPETITIONS", 3)
        return demo.demo(tmp_path_factory.mktemp("demo") / "out", say=lines.append)


def test_everything_is_done(made: DemoReport, lines: list[str]) -> None:
    assert made.passed and made.failures == []
    assert [form.form for form in made.forms] == ["factored", "fused"]
    for form in made.forms:
        assert form.verification.rule == "strict" and form.verification.passed
        assert form.verification.absorbed == form.timing.patch.weights_from == form.conversion.out
        assert form.timing.patch.qk_form == form.timing.patch.vo_form == form.form == form.verification.qk_form
        assert [row.context for row in form.timing.contexts] == [64, 1024, 4096]
        assert form.text == made.text and len(made.text) > 20
    assert len(lines) == 9 and lines[0].endswith(str(demo.example_folder()))


def test_its_files_are_a_store_each(made: DemoReport) -> None:
    assert {Path(path) for path in made.files} == {p for p in Path(made.folder).rglob("*") if p.is_file()}
    for form in ("factored", "fused"):
        store = AbsorbedCheckpoint.open(Path(made.folder) / form)
        assert {layer.qk for layer in store.layers.values()} == {form}


@pytest.fixture
def shown(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the command with a report that is there already."""

    def show(report: DemoReport, *arguments: str) -> Any:
        def ready(out: str | None, *, say: Callable[[str], None]) -> DemoReport:
            say(f"said on the way to {out}")
            return report

        monkeypatch.setattr(demo, "demo", ready)
        return invoke("demo", *arguments)

    return show


def test_the_command_ends_with_a_table_and_paths(made: DemoReport, shown: Callable[..., Any]) -> None:
    result = shown(made, "--out", "o")
    assert result.exit_code == 0 and result.stderr == ""
    assert "said on the way to o" in result.stdout and made.text.splitlines()[-1] in result.stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert cells == made.rows()
    assert [row[:1] + row[2:4] for row in cells] == [["factored", "yes", "yes"], ["fused", "yes", "yes"]]
    assert [form.conversion.dtype for form in made.forms] == ["bfloat16", "float32"]
    assert [line.strip() for line in result.stdout.splitlines()[-len(made.files) :]] == list(made.files)


def test_the_command_as_json(made: DemoReport, shown: Callable[..., Any]) -> None:
    result = shown(made, "--json", "-")
    read = json.loads(result.stdout)
    assert read["passed"] and read["files"] == list(made.files)
    assert [form["form"] for form in read["forms"]] == ["factored", "fused"]
    for part in ("conversion", "verification", "timing"):
        assert read["forms"][1][part]
    assert "said on the way" in result.stderr


@pytest.mark.parametrize("broken", ["tokens", "logits"])
def test_a_failure_is_said_and_exits_with_1(made: DemoReport, shown: Callable[..., Any], broken: str) -> None:
    first, second = made.forms
    if broken == "tokens":
        second = dataclasses.replace(second, same_tokens=False, text="nonsense")
    else:
        stage = dataclasses.replace(second.verification.stages[0], failures=("a logit is nonsense",))
        stages = (stage, *second.verification.stages[1:])
        second = dataclasses.replace(second, verification=dataclasses.replace(second.verification, stages=stages))
    result = shown(dataclasses.replace(made, forms=(first, second)))
    assert result.exit_code == 1
    assert "NO" in result.stdout and "nonsense" in result.stdout


def test_other_tokens_are_noticed(made: DemoReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "verify", lambda *_: made.forms[0].verification)
    monkeypatch.setattr(demo, "bench", lambda *_, **__: made.forms[0].timing)
    model = demo.load_original(demo.example_folder(), dtype=torch.float32)
    wanted = demo.generate(model)
    assert len(wanted) == demo.NEW_TOKENS
    other = wanted.clone()
    other[-1] += 1
    for ids, same in [(wanted, True), (other, False)]:
        form = demo._try(model, "factored", tmp_path / str(same), ids, lambda line: None)
        assert (form.same_tokens, form.passed, form.text) == (same, same, made.text)


def test_one_thread_for_a_while() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), demo._one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(demo._new_folder(None)) for _ in range(3)] == ["mla-demo", "mla-demo-2", "mla-demo-3"]
    (tmp_path / "mine").write_text("mine", "utf-8")
    for taken in ("mla-demo", "mine"):
        with pytest.raises(UsageError, match=f"{taken} is there already"):
            demo.demo(taken)
    result = invoke("demo", "--out", "no/folder")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no/folder cannot be made (No such file or directory): ")
    assert (tmp_path / "mine").read_text("utf-8") == "mine" and not list((tmp_path / "mla-demo").iterdir())
