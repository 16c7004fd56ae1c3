"""What every target that writes a whole folder has to hold."""

from __future__ import annotations

import collections
import concurrent.futures
import pathlib
import shutil
from typing import Any

import pytest
from interruptions import vanish
from snapshots import snapshot
from variants import (
    small_checkpoint,
)

from mla_convert import destination, disk, journal
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import CheckpointError, SidecarError, UsageError
from mla_convert.ranks import World
from mla_convert.storage import AbsorbedCheckpoint


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_whole_models_go_into_empty_folders(example_path: pathlib.Path, tmp_path: pathlib.Path, target: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    for out, message in (("source", "is SOURCE itself, which is never changed"), ("used", "holds notes.txt; a whole")):
        with pytest.raises(UsageError, match=message):
            convert(source, tmp_path / out, target=target)
    convert(source, tmp_path / "out", target=target)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"out holds .*; a whole model goes into a new or empty folder"):
        convert(source, tmp_path / "out", target=target)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_the_source_stays_as_it_is(example_path: pathlib.Path, tmp_path: pathlib.Path, target: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(example_path, source)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()}
    plan = convert(source, tmp_path / "out", target=target, dry_run=True)
    assert not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", target=target)
    assert (plan.bytes_in, plan.bytes_out) == (report.bytes_in, report.bytes_out)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in source.iterdir()} == before
    assert set(report.files) == set(snapshot(tmp_path / "out")) and report.files[-1] == "config.json"
    assert report.files[0].endswith(".safetensors")


class Stop(BaseException):
    """Ends a run anywhere."""


@pytest.mark.parametrize("target", ["standalone", "hf", "native"])
def test_whole_folders_are_complete_or_do_not_load(
    tmp_path: pathlib.Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at every rename, as by Ctrl-C: nothing loads, and the next call finishes it."""
    source = small_checkpoint(tmp_path / "source")
    (source / "LICENSE").write_text("free")
    (source / "assets/img").mkdir(parents=True)
    (source / "assets/img/note.txt").write_text("a picture")
    convert(source, tmp_path / "whole", target=target)
    whole, names = snapshot(tmp_path / "whole"), len(snapshot(tmp_path / "whole"))
    move = disk.move
    for stop in range(names):
        out, moved = tmp_path / f"out-{stop}", []

        def stopping(a: pathlib.Path, b: pathlib.Path, moved: list[str] = moved, stop: int = stop) -> None:
            if len(moved) == stop:
                raise KeyboardInterrupt
            moved.append(b.name)
            move(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "move", stopping)
            with pytest.raises(KeyboardInterrupt, match="the same command goes on from there"):
                convert(source, out, target=target)
        assert "config.json" not in moved
        with pytest.raises(CheckpointError, match=r"has no config.json"):
            Checkpoint.open(out)
        with pytest.raises(UsageError, match="out-.* holds mine.txt"):
            (out / "mine.txt").write_text("mine")
            convert(source, out, target=target)
        (out / "mine.txt").unlink()
        report = convert(source, out, target=target)
        assert any("were done before" in note for note in report.notes)
        assert snapshot(out) == whole
        assert not (out / ".mla_absorbed.incomplete").exists()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["note.txt", "config.json"])
def test_folders_within_a_folder(
    tmp_path: pathlib.Path, name: str, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level that is made goes again with a run that fails, and is taken up after one that was killed."""
    source, out = small_checkpoint(tmp_path / "source"), tmp_path / "out"
    (source / "assets/img").mkdir(parents=True)
    (source / "assets/img/note.txt").write_text("a picture")
    move = disk.move

    def stopping(here: pathlib.Path, there: pathlib.Path) -> None:
        if there.name == name:
            raise Stop
        move(here, there)

    for killed in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(disk, "move", stopping)
            if killed:
                vanish(patch)
            with pytest.raises(Stop):
                convert(source, out, target="hf")
        assert out.exists() == (out / "assets/img").is_dir() == killed
    convert(source, out, target="hf", resume=resume)
    assert (out / "assets/img/note.txt").read_text() == "a picture"


def test_folders_of_others_are_in_the_way(tmp_path: pathlib.Path) -> None:
    (tmp_path / "out/assets").mkdir(parents=True)
    with pytest.raises(UsageError, match="out holds assets; a whole model goes into a new or empty folder"):
        convert(small_checkpoint(tmp_path / "source"), tmp_path / "out", target="hf")


def test_every_level_of_folders_reaches_the_disk(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is complete: a name that the disk has is of no use in a folder that it lost."""
    source, out = small_checkpoint(tmp_path / "source"), tmp_path / "out"
    (source / "assets/img").mkdir(parents=True)
    (source / "assets/img/note.txt").write_text("a picture")
    synced: list[str] = []
    sync = disk.sync_folder

    def noted(folder: pathlib.Path) -> None:
        if not (out / "config.json").exists():
            synced.append(folder.relative_to(out).as_posix())
        sync(folder)

    monkeypatch.setattr(disk, "sync_folder", noted)
    convert(source, out, target="hf")
    assert sorted(synced) == [".", destination.INCOMPLETE, "assets", "assets/img"]


@pytest.mark.parametrize(
    "options", [dict(target="hf", max_shard_bytes=300_000), dict(target="native", parts=4)], ids=str
)
def test_ranks_write_a_layout_together(
    example_path: pathlib.Path, tmp_path: pathlib.Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has files of its own to write, and the bytes are those of one process."""

    def rank(number: int) -> None:
        world = World(number, 2, 1, "this")
        convert(example_path, tmp_path / "out", world=world, workers=1, **options)

    records: list[tuple[str, str]] = []
    add = journal.Journal.add

    def noted(self: journal.Journal, record: journal.Record) -> None:
        records.append((self._file.name, record.unit))
        add(self, record)

    monkeypatch.setattr(journal.Journal, "add", noted)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    shares = collections.Counter(file for file, _ in records)
    assert set(shares) == {"progress-0.jsonl", "progress-1.jsonl"}
    assert max(shares.values()) <= 2 * min(shares.values())
    assert len({unit for _, unit in records}) == len(records)
    convert(example_path, tmp_path / "one", **options)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "one")


def test_a_half_done_standalone_folder_has_no_absorbed_weights_without_its_manifest(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = disk.move

    def stopping(a: pathlib.Path, b: pathlib.Path) -> None:
        if b.name == "mla_manifest.json":
            raise KeyboardInterrupt
        move(a, b)

    monkeypatch.setattr(disk, "move", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(example_path, tmp_path / "out", target="standalone")
    with pytest.raises(SidecarError, match="holds an interrupted conversion"):
        AbsorbedCheckpoint.open(tmp_path / "out")
