"""Pushing: what a conversion wrote, and nothing else, gets into the repository; what cannot be is said first."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
import pytest
import upload_server
from snapshots import snapshot

from mla_convert.conversion import convert
from mla_convert.errors import OutputError, UsageError

# The client's plain uploads, which the hub's own storage has replaced, still use an old spelling of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[upload_server.Hub]:
    with upload_server.serve() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_local")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        # The hub's own storage behind the API is not spoken here; the client then takes plain uploads.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.mark.parametrize("target", ["sidecar", "standalone"])
def test_the_files_are_in_the_repository(
    example_path: pathlib.Path, tmp_path: pathlib.Path, hub: upload_server.Hub, target: str
) -> None:
    (tmp_path / "out").mkdir()
    if target == "sidecar":
        (tmp_path / "out" / "notes.txt").write_text("mine")
    report = convert(example_path, tmp_path / "out", target=target, push="me/absorbed")
    expected = {name: data for name, data in snapshot(tmp_path / "out").items() if name in report.files}
    assert {name: data for name, data in hub.repos["me/absorbed"].items() if name != ".gitattributes"} == expected
    assert len(expected) == len(report.files)
    assert any(f"{hub.url}/me/absorbed" in note for note in report.notes)


@pytest.mark.parametrize("name", ["absorbed", "a/b/c", "", "me/..", "me/a b"])
def test_names_that_are_none(example_path: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name of a repository; give org/name"):
        convert(example_path, tmp_path / "out", push=name)
    assert list(tmp_path.iterdir()) == []


def test_a_repository_that_holds_files(
    example_path: pathlib.Path, tmp_path: pathlib.Path, hub: upload_server.Hub
) -> None:
    hub.repos["me/absorbed"] = {"model.safetensors": b"mine"}
    with pytest.raises(UsageError, match="it holds model.safetensors already, and nothing is overwritten"):
        convert(example_path, tmp_path / "out", push="me/absorbed")
    assert hub.repos["me/absorbed"] == {"model.safetensors": b"mine"} and list(tmp_path.iterdir()) == []


def test_a_dry_run_pushes_nothing(example_path: pathlib.Path, tmp_path: pathlib.Path, hub: upload_server.Hub) -> None:
    convert(example_path, tmp_path / "out", push="me/absorbed", dry_run=True)
    assert hub.repos == {}


def test_a_hub_that_refuses(example_path: pathlib.Path, tmp_path: pathlib.Path, hub: upload_server.Hub) -> None:
    hub.refuse["/api/repos/create"] = 403
    with pytest.raises(OutputError, match="refused or could not be reached .*403.*nothing was converted: log in"):
        convert(example_path, tmp_path / "out", push="me/absorbed")
    assert list(tmp_path.iterdir()) == []
    hub.refuse = {"/commit/": 400}
    with pytest.raises(OutputError, match=r"out is complete: push it again with `hf upload me/absorbed .*out`"):
        convert(example_path, tmp_path / "out", push="me/absorbed")
    assert "mla_manifest.json" in snapshot(tmp_path / "out")


def test_from_the_command_line(
    example_path: pathlib.Path, tmp_path: pathlib.Path, hub: upload_server.Hub, invoke: Callable[..., Any]
) -> None:
    result = invoke("convert", example_path, tmp_path / "out", "--push", "me/absorbed")
    assert result.exit_code == 0, result.stderr
    assert "mla_manifest.json" in hub.repos["me/absorbed"]


def test_a_dry_run_checks_the_name_and_says_that_the_push_was_not_tried(
    example_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    report = convert(example_path, tmp_path / "out", dry_run=True, push="me/thing")
    assert "whether me/thing takes a push was not tried" in report.notes
    with pytest.raises(UsageError, match="is no name of a repository"):
        convert(example_path, tmp_path / "out", dry_run=True, push="thing")
