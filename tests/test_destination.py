"""Where a conversion writes, and that nothing that is there is changed."""

from __future__ import annotations

import collections
import pathlib
import shutil

import pytest
from snapshots import snapshot

from mla_convert import destination
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import SidecarError, UsageError
from mla_convert.storage import AbsorbedCheckpoint


@pytest.fixture(params=["example", "fp8", "native"])
def source(request: pytest.FixtureRequest) -> pathlib.Path:
    return request.getfixturevalue(f"{request.param}_path")  # type: ignore[no-any-return]


def test_out_equal_to_the_source_leaves_the_source_alone(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    own = tmp_path / "source"
    shutil.copytree(source, own)
    (own / "README.md").write_text("the model's own card")
    before = snapshot(own)
    link = tmp_path / "link"
    link.symlink_to(own)
    report = convert(own, link)
    assert report.out == str(own / "mla_absorbed")
    after = snapshot(own)
    assert {name: data for name, data in after.items() if not name.startswith("mla_absorbed/")} == before
    assert {name.removeprefix("mla_absorbed/") for name in after} - set(before) == set(report.files) - {"README.md"}
    assert "mla_absorbed/README.md" in after
    AbsorbedCheckpoint.open(own).check_source(Checkpoint.open(own))


def test_a_readme_that_is_there_stays(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "data.csv").write_text("1,2")
    report = convert(example_path, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine" and (tmp_path / "data.csv").read_text() == "1,2"
    assert "README.md" not in report.files
    assert any("already has a README.md" in note for note in report.notes)


def files(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "not ours")


OCCUPIED = {
    "another model": (files("model.safetensors", "config.json"), r"holds a model \(config.json\)"),
    "a model's shards": (files("model-00001-of-00002.safetensors"), r"holds a model \(model-00001"),
    "a model's index": (files("model.safetensors.index.json"), "holds a model"),
    "pickled weights": (files("pytorch_model.bin"), "holds a model"),
    "a config": (files("config.json"), "holds a model"),
    "weights": (files("mla_manifest.json"), "already holds absorbed weights .* nothing is overwritten"),
    "a shard of our name": (files("mla_absorbed-00001-of-00001.safetensors"), "already holds mla_absorbed-00001"),
    "a shard of another count": (files("mla_absorbed-00007-of-00009.safetensors"), "already holds mla_absorbed-00007"),
    "an index of our name": (files("mla_absorbed.safetensors.index.json"), "already holds mla_absorbed.safetensors.i"),
}


@pytest.mark.parametrize("case", OCCUPIED)
def test_occupied_folders_are_refused_and_not_touched(
    example_path: pathlib.Path, tmp_path: pathlib.Path, case: str
) -> None:
    content, message = OCCUPIED[case]
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=message):
            convert(example_path, tmp_path, dry_run=dry_run)
    assert snapshot(tmp_path) == before


def test_a_second_conversion_is_refused(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    convert(example_path, tmp_path / "out")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="already holds absorbed weights"):
        convert(example_path, tmp_path / "out", form="fused")
    assert snapshot(tmp_path) == before


def test_out_below_or_at_a_file(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/out", "file/a/b"):
        with pytest.raises(UsageError, match="file is a file; OUT must be a folder"):
            convert(example_path, tmp_path / out)
    assert snapshot(tmp_path) == {"file": b"mine"}


def test_links_that_go_in_a_circle(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in ("loop", "loop/out"):
        with pytest.raises(UsageError, match="OUT .*loop.* cannot be followed"):
            convert(example_path, tmp_path / out)
    for out in (f"long{'g' * 300}", "deep/" * 2000):
        with pytest.raises((UsageError, SidecarError), match="File name too long"):
            convert(example_path, tmp_path / out)
    assert [file.name for file in tmp_path.iterdir()] == ["loop"]


def test_no_permission(example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The user who runs the tests may be allowed everything, so the answer of the system is given here.
    monkeypatch.setattr(destination.os, "access", lambda path, mode: pathlib.Path(path) != tmp_path)
    with pytest.raises(UsageError, match="may not be written to by this user"):
        convert(example_path, tmp_path / "a" / "b")
    assert snapshot(tmp_path) == {}


def test_no_space(example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    needed = convert(example_path, tmp_path / "out", dry_run=True).bytes_out
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage(10**12, 0, needed))
    with pytest.raises(UsageError, match=r"needs 1.31 MB and its disk has 262 kB free"):
        convert(example_path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
