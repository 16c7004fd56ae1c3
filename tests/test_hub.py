"""A checkpoint on the hub: read by ranges, patiently and once, from a server on this machine; and what goes wrong."""

from __future__ import annotations

import collections
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest
from hub_client import NAME, assert_same_files, needed_bytes, turn_to
from hub_server import COMMIT, Hub
from huggingface_hub import constants

import mla_convert
from mla_convert import destination, hub_ranges
from mla_convert import hub as hub_module
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, UsageError
from mla_convert.hub import HubPath
from mla_convert.hub_snapshots import local_folder
from mla_convert.inspection import inspect_checkpoint
from mla_convert.units import format_bytes


@pytest.mark.parametrize("form", ["factored", "fused"])
def test_the_same_bytes_and_not_many_more_than_needed(hub: Hub, tmp_path: pathlib.Path, form: str) -> None:
    served = hub.repositories[NAME]
    report = convert(NAME, tmp_path / "out", form=form)
    convert(served, tmp_path / "local", form=form)
    assert_same_files(tmp_path / "out", tmp_path / "local")
    assert report.source == f"{NAME}@{COMMIT}"
    names = {name for layer in report_sources(tmp_path / "out") for name in layer}
    assert sum(hub.sent.values()) <= 1.1 * needed_bytes(served, names)
    assert hub.sent_weights() < sum(file.stat().st_size for file in served.glob("*.safetensors"))


def report_sources(out: pathlib.Path) -> list[list[str]]:
    return [layer["sources"] for layer in json.loads((out / "mla_manifest.json").read_text())["layers"]]


FAULTS: dict[str, list[str | int]] = {
    "drops": ["drop", "drop", "drop"],
    "busy": [429, 503, 500, 503, 502],
    "truncates": ["truncate"] * 20,
    "everything": ["drop", 503, "truncate", 429, "truncate", "drop", 503, "truncate"] * 2,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_connection(hub: Hub, tmp_path: pathlib.Path, name: str) -> None:
    """What arrived of a range that broke off is not asked for again."""
    hub.faults, hub.api_faults = list(FAULTS[name]), [503, "drop", 429]
    hub.file_faults = [503] if name == "everything" else []  # the client itself waits a second there
    convert(NAME, tmp_path / "out", workers=1)
    assert not hub.faults and not hub.api_faults and not hub.file_faults
    served = hub.repositories[NAME]
    convert(served, tmp_path / "local")
    assert_same_files(tmp_path / "out", tmp_path / "local")
    names = {name for layer in report_sources(tmp_path / "out") for name in layer}
    assert sum(hub.sent.values()) <= 1.1 * needed_bytes(served, names)


def test_weights_on_another_host(hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub answers with another address, which is followed, and which the token is not sent to."""
    hub.token, hub.elsewhere = "hf_secret", True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    convert(NAME, tmp_path / "out")
    convert(hub.repositories[NAME], tmp_path / "local")
    assert_same_files(tmp_path / "out", tmp_path / "local")
    assert hub.tokens == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


def test_offline_with_a_snapshot_alone(hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE, and nothing but what `hf download` left in the client's cache."""
    huggingface_hub.snapshot_download(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    before = hub.requests
    assert not (tmp_path / "assets").exists()
    convert(NAME, tmp_path / "out", form="fused")
    assert hub.requests == before
    convert(hub.repositories[NAME], tmp_path / "local", form="fused")
    assert_same_files(tmp_path / "out", tmp_path / "local")


def test_a_path_on_the_hub_reads_and_touches_no_disk(hub: Hub, tmp_path: pathlib.Path) -> None:
    """Everything that a path on a disk can do is either done with the repository, or refused."""
    Checkpoint.open(NAME)
    path, served = HubPath(f"{NAME}@{COMMIT}"), hub.repositories[NAME]
    text, expected = path / "README.md", (served / "README.md").read_text()
    for _ in range(2):  # from the hub, then from the client's cache
        with text.open() as as_text, text.open("rb") as as_bytes:
            assert (as_text.read(), as_bytes.read()) == (expected, expected.encode())
        assert (text.read_text(), text.read_text("utf-8"), text.read_bytes()) == (expected, expected, expected.encode())
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in served.iterdir())
    assert text.stat().st_size == len(expected) and text.exists() and not text.is_dir() and path.is_dir()
    for mode in ("w", "r+", "ab", "x"):
        with pytest.raises(io.UnsupportedOperation, match=f"open with mode '{re.escape(mode)}' is not supported"):
            text.open(mode)
    known = {"cwd", "home", "from_uri"}
    for name in set(dir(pathlib.Path)) - set(dir(pathlib.PurePath)) - known:
        assert name.startswith("_") or name in vars(HubPath), name
    for name in ("glob", "rglob", "write_text", "unlink", "mkdir", "touch", "samefile"):
        with pytest.raises(io.UnsupportedOperation, match=f"{name} is not supported"):
            getattr(text, name)("x")
    assert not (tmp_path / "org").exists()


def test_nothing_is_read_twice(hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(NAME, tmp_path / "a")
    sent = hub.sent_weights()
    convert(f"{NAME}@{COMMIT}", tmp_path / "b")
    assert hub.sent_weights() == sent
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    hub_module._listing.cache_clear()
    before = hub.requests
    for number, revision in enumerate(("", "@main", f"@{COMMIT}")):
        convert(NAME + revision, tmp_path / f"offline-{number}")
        assert_same_files(tmp_path / "a", tmp_path / f"offline-{number}")
    assert hub.requests == before
    with pytest.raises(CheckpointError, match="a part of org/example .* was not read before.*HF_HUB_OFFLINE=0"):
        convert(NAME, tmp_path / "more", form="fused")
    with pytest.raises(CheckpointError, match=r"offline .*nothing of org/other at main.*hf download org/other"):
        Checkpoint.open("org/other")


def test_without_a_connection_what_was_read_is_enough(
    hub: Hub, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(NAME, tmp_path / "a")
    turn_to("http://127.0.0.1:9", monkeypatch)  # nobody listens there
    convert(NAME, tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        Checkpoint.open("org/other")


def test_a_range_that_a_killed_run_left_is_gone_on_with(hub: Hub, tmp_path: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(NAME)
    kv_b = checkpoint.layers[0].kv_b
    expected = Checkpoint.open(hub.repositories[NAME]).read(kv_b)
    piece = checkpoint._tensors[kv_b].pieces[0]
    kept = hub_ranges.folder(NAME, COMMIT) / piece.file.name
    whole = (hub.repositories[NAME] / piece.file.name).read_bytes()[piece.start : piece.start + piece.nbytes]
    (kept / f"{piece.start}-{piece.nbytes}.part").write_bytes(whole[:1000])
    hub.ranges.clear()
    assert checkpoint.read(kv_b).equal(expected)
    assert hub.ranges == [(piece.file.name, piece.start + 1000, piece.nbytes - 1000)]
    assert pickle.loads(pickle.dumps(checkpoint)).read(kv_b).equal(expected)


def test_a_snapshot_in_the_client_s_cache(hub: Hub, tmp_path: pathlib.Path, invoke: Callable[..., Any]) -> None:
    """convert reads it instead of the hub; verify and load need it."""
    with pytest.raises(CheckpointError, match=r"no whole copy .*download it first: hf download org/example$"):
        local_folder(pathlib.Path(NAME))
    result = invoke("verify", f"{NAME}@v2")
    assert (result.exit_code, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert "hf download org/example --revision v2" in result.stderr
    result = invoke("bench", NAME)
    assert result.exit_code == 2 and "download it first" in result.stderr
    convert(NAME, tmp_path / "ranges")
    huggingface_hub.snapshot_download(NAME)
    sent = hub.sent_weights()
    shutil.rmtree(tmp_path / "assets")
    hub_module._listing.cache_clear()
    convert(NAME, tmp_path / "snapshot")
    assert hub.sent_weights() == sent
    assert_same_files(tmp_path / "ranges", tmp_path / "snapshot")
    folder = local_folder(pathlib.Path(NAME))
    assert folder.name == COMMIT and Checkpoint.open(folder).layout == "sharded"
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="download it first"):
        local_folder(pathlib.Path(NAME))


@pytest.mark.slow
def test_a_whole_copy_is_verified_and_timed_by_its_name(hub: Hub, invoke: Callable[..., Any]) -> None:
    huggingface_hub.snapshot_download(NAME)
    result = invoke("verify", NAME, "--prefill", "8", "--decode", "4", "--batch", "2", "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (0, True)
    result = invoke("bench", NAME, "--context", "16", "--repetitions", "3", "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["model"]) == (0, "org/example (deepseek_v3, 4 layers)")
    assert mla_convert.load(NAME).config.model_type == "deepseek_v3"


def test_what_needs_the_whole_model(hub: Hub, tmp_path: pathlib.Path) -> None:
    """A whole folder is made of a snapshot, and the repository itself is nowhere to write to."""
    with pytest.raises(CheckpointError, match="download it first: hf download org/example"):
        convert(NAME, tmp_path / "whole", target="standalone")
    with pytest.raises(UsageError, match="read in parts and not written to; give a folder of its own"):
        convert(NAME, NAME)
    with pytest.raises(UsageError, match="read in parts"):
        convert(Checkpoint.open(NAME), tmp_path / "whole", target="hf")
    assert not (tmp_path / "org").exists() and not (tmp_path / "whole").exists()


def test_a_folder_wins(hub: Hub, tmp_path: pathlib.Path) -> None:
    shutil.copytree(hub.repositories[NAME], tmp_path / "org/example")
    assert isinstance(Checkpoint.open(NAME).path, type(pathlib.Path()))
    assert hub.requests == 0 and local_folder(pathlib.Path(NAME)) == pathlib.Path(NAME)


@pytest.mark.slow
def test_the_environment(hub: Hub, tmp_path: pathlib.Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, as the hub client takes them, in a process of its own."""
    hub.token = "hf_secret"
    given = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    program = [sys.executable, "-m", "mla_convert", "convert", NAME]
    first = subprocess.run([*program, "out"], env=given, cwd=tmp_path, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    assert any((tmp_path / "home" / "assets").rglob("*.safetensors")) and (tmp_path / "home" / "hub").is_dir()
    before = hub.requests
    given |= {"HF_HUB_OFFLINE": "1"}
    again = subprocess.run([*program, "again"], env=given, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and hub.requests == before
    assert_same_files(tmp_path / "out", tmp_path / "again")


def test_inspect_of_absorbed_weights_on_the_hub(
    hub: Hub, tmp_path: pathlib.Path, example_path: pathlib.Path, invoke: Callable[..., Any]
) -> None:
    convert(example_path, tmp_path / "absorbed", vo="fused")
    hub.repositories["org/absorbed"] = tmp_path / "absorbed"
    result = invoke("inspect", "org/absorbed", "--json", "-")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["source"], report["problems"]) == (0, None, [])
    local = json.loads(json.dumps(inspect_checkpoint(tmp_path / "absorbed").to_dict()))["absorbed"]
    assert report["absorbed"] == local | {"folder": f"org/absorbed@{COMMIT}"}
    assert "hf download org/absorbed" in report["notes"][0]


def test_cards_name_the_repository_whatever_is_written(hub: Hub, tmp_path: pathlib.Path) -> None:
    """Whole folders are made of the client's snapshot, and so are codes that are measured or calibrated."""
    huggingface_hub.snapshot_download(NAME)
    for number, target in enumerate(("standalone", "hf", "native")):
        convert(NAME, tmp_path / target, target=target)
        card = (tmp_path / target / "README.md").read_text()
        assert f"---\nbase_model: {NAME}\nlicense: mit\n" in card, target
        assert (tmp_path / target / "README.source.md").is_file() and "README.source.md" in card
        assert number == 0 or f"The values of the original of {NAME}, unchanged" in card
    snapshot = local_folder(pathlib.Path(NAME))
    convert(snapshot, tmp_path / "of-snapshot")
    assert f"base_model: {NAME}\n" in (tmp_path / "of-snapshot/README.md").read_text()
    # a card of ours hands the name on, somebody else's card names what its own model was made from
    convert(tmp_path / "native", tmp_path / "back", target="hf")
    assert f"base_model: {NAME}\n" in (tmp_path / "back/README.md").read_text()


@pytest.mark.slow
def test_a_measured_sidecar_names_the_repository(hub: Hub, tmp_path: pathlib.Path) -> None:
    huggingface_hub.snapshot_download(NAME)
    convert(NAME, tmp_path / "out", quantize="int8", measure=True)
    assert f"---\nbase_model: {NAME}\nlicense: mit\n" in (tmp_path / "out/README.md").read_text()


def test_space_for_what_is_kept_of_the_hub(
    hub: Hub, tmp_path: pathlib.Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted on its own disk, or with OUT where both are on one; what is kept already is not."""
    plan = convert(NAME, tmp_path / "out", form="fused", dry_run=True)
    # headers came with the beginnings of files, in which a tensor may stand in part
    assert 0.9 * plan.bytes_in < plan.bytes_kept <= plan.bytes_in
    assert plan.kept_in is not None and plan.kept_in.startswith(str(tmp_path / "assets"))
    result = invoke("convert", NAME, tmp_path / "out", "--form", "fused", "--dry-run")
    for words in ("free on the disk", "kept of what is read", f"{format_bytes(plan.bytes_kept)} in"):
        assert words in result.stdout
    usage = collections.namedtuple("usage", "total used free")
    free = plan.bytes_out + plan.bytes_kept // 2 + (1 << 20)
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage(10**12, 0, free))
    with pytest.raises(UsageError, match=r"out needs .* and what is read from the hub .* in .*assets.* HF_HOME"):
        convert(NAME, tmp_path / "out", form="fused")
    other = pathlib.Path("/proc")  # a disk of its own, to stand for the cache's
    monkeypatch.setattr(destination, "_existing", lambda path: other if "assets" in str(path) else tmp_path)
    frees = {other: plan.bytes_kept - 1, tmp_path: 10**9}
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage(10**12, 0, frees[path]))
    with pytest.raises(UsageError, match=r"what is read from the hub is kept in .*assets.* set HF_HOME"):
        convert(NAME, tmp_path / "out", form="fused")
    assert not (tmp_path / "out").exists()
    frees[other] += 1
    convert(NAME, tmp_path / "out", form="fused")
    assert convert(NAME, tmp_path / "again", form="fused", dry_run=True).bytes_kept == 0


def test_inspect_reads_headers_alone(hub: Hub, invoke: Callable[..., Any]) -> None:
    result = invoke("inspect", NAME, "--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["path"] == f"{NAME}@{COMMIT}" and report["problems"] == []
    local = inspect_checkpoint(hub.repositories[NAME])
    assert report["source"] == json.loads(json.dumps(local.to_dict()["source"]))
    files = list(hub.repositories[NAME].glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    # A small share of each file is asked for at once, and may reach beyond its header.
    assert hub.sent_weights() <= headers + sum(file.stat().st_size for file in files) / 512
