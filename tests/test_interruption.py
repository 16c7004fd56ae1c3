"""A run that fails or is killed anywhere leaves nothing that loads, and nothing of anybody else's is touched."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from snapshots import snapshot

from mla_convert import destination, writing
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import SidecarError, UsageError
from mla_convert.storage import AbsorbedCheckpoint

SHARD_BYTES = 150_000  # two shards for the example


def first_shard(folder: pathlib.Path) -> pathlib.Path:
    return sorted(folder.glob("*.safetensors"))[0]


OPERATIONS = ("_write", "_sync", "_sync_folder", "_move")


class Stop(BaseException):
    """Stands for whatever ends a run; no handler takes it for an ordinary error."""


def vanish(writer: writing.SidecarWriter) -> None:
    """What a killed process does: its files are closed, and nothing is cleaned up."""
    if writer._stream is not None:
        writer._stream.close()


def stopping_at(number: int, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]) -> list[str]:
    """Make the ``number``-th write, flush or rename of the writer fail; returns the list of those begun."""
    begun: list[str] = []

    def wrap(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def operation(*arguments: object) -> None:
            begun.append(name)
            if len(begun) == number:
                raise error()
            original(*arguments)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(writing, name, wrap(name, getattr(writing, name)))
    return begun


@pytest.fixture(scope="module")
def steps(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many operations a whole run takes."""
    with pytest.MonkeyPatch.context() as patch:
        begun = stopping_at(0, patch, Stop)
        convert(example_path, tmp_path_factory.mktemp("steps") / "out", max_shard_bytes=SHARD_BYTES)
    assert set(begun) == set(OPERATIONS)
    assert begun[-2:] == ["_move", "_sync_folder"]
    return len(begun)


def places(example_path: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path, pathlib.Path]]:
    """Source and OUT: a new folder, one with a file of somebody's, and the source itself."""
    yield "new", example_path, tmp_path / "made" / "out"
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    yield "used", example_path, used
    source = tmp_path / "source"
    source.mkdir()
    for name, data in snapshot(example_path).items():
        (source / name).write_bytes(data)
    yield "source", source, source


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, lambda: OSError(errno.ENOSPC, "No space left on device")])
def test_a_failed_run_leaves_what_was_there(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], BaseException],
) -> None:
    disk = isinstance(kind(), OSError)
    expected, message = (SidecarError, "No space left on device.*nothing usable") if disk else (type(kind()), None)
    for _, source, out in places(example_path, tmp_path):
        before = snapshot(tmp_path)
        folders = set(tmp_path.rglob("*"))
        for number in range(1, steps):
            with monkeypatch.context() as patch:
                stopping_at(number, patch, kind)
                with pytest.raises(expected, match=message):
                    convert(source, out, max_shard_bytes=SHARD_BYTES)
            assert snapshot(tmp_path) == before, number
            assert set(tmp_path.rglob("*")) == folders, number
        convert(source, out, max_shard_bytes=SHARD_BYTES)
        AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(source))


def test_a_killed_run_leaves_nothing_that_loads_and_is_cleaned_up(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after kill -9: the run stops before any one operation and cleans up nothing."""
    for name, source, out in places(example_path, tmp_path):
        clean = tmp_path / f"clean-{name}"
        convert(source, clean, max_shard_bytes=SHARD_BYTES)
        for number in range(1, steps + 1):
            before = snapshot(tmp_path)
            with monkeypatch.context() as patch:
                stopping_at(number, patch, Stop)
                patch.setattr(writing.SidecarWriter, "_abandon", vanish)
                with pytest.raises(Stop):
                    convert(source, out, max_shard_bytes=SHARD_BYTES)
            if number == steps:  # the manifest was in place: the weights are complete
                folder = AbsorbedCheckpoint.open(out).path
                AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(source))
                made = {file: data for file, data in snapshot(tmp_path).items() if file not in before}
                assert {str((tmp_path / file).relative_to(folder)): data for file, data in made.items()} == snapshot(
                    clean
                )
                assert not (folder / destination.INCOMPLETE).exists()
                break
            left = snapshot(tmp_path)
            assert before.items() <= left.items()
            with pytest.raises(SidecarError, match=r"interrupted conversion .*run the same conversion again"):
                AbsorbedCheckpoint.open(out)
            convert(source, out, max_shard_bytes=SHARD_BYTES)
            made = {file: data for file, data in snapshot(tmp_path).items() if file not in before}
            folder = AbsorbedCheckpoint.open(out).path
            assert {str((tmp_path / file).relative_to(folder)): data for file, data in made.items()} == snapshot(clean)
            for file in made:
                (tmp_path / file).unlink()


KILLED = """
import os, signal, sys
from mla_convert import writing
from mla_convert.conversion import convert
move = writing._move
def stop(source, target):
    if target.name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    move(source, target)
writing._move = stop
convert(sys.argv[1], sys.argv[2], max_shard_bytes=150_000)
"""


def test_kill_9_between_two_renames(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    script = [sys.executable, "-c", KILLED, str(example_path), str(out), "mla_absorbed.safetensors.index.json"]
    killed = subprocess.run(script, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {file.name for file in out.iterdir()}
    assert "mla_absorbed-00001-of-00002.safetensors" in left and "mla_manifest.json" not in left
    with pytest.raises(SidecarError, match="interrupted conversion"):
        AbsorbedCheckpoint.open(out)
    convert(example_path, out)  # in one shard this time: the two renamed ones have to go
    assert {file.name for file in out.glob("*.safetensors")} == {"mla_absorbed-00001-of-00001.safetensors"}
    AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(example_path))


def interrupt(
    source: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch, operation: str, count: int
) -> None:
    """Leave the remains of a run that ended before the ``count``-th ``operation``."""
    original, begun = getattr(writing, operation), []

    def stop(*arguments: object) -> None:
        begun.append(arguments)
        if len(begun) == count:
            raise Stop
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, operation, stop)
        patch.setattr(writing.SidecarWriter, "_abandon", vanish)
        with pytest.raises(Stop):
            convert(source, out, max_shard_bytes=SHARD_BYTES)


def test_what_is_left_beside_complete_weights_goes(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the manifest got its name: loading cleans up, and so does the conversion that is refused."""
    for clean_up in ("load", "convert"):
        out = tmp_path / clean_up
        interrupt(example_path, out, monkeypatch, "_sync_folder", 3)
        before = {name: data for name, data in snapshot(out).items() if not name.startswith(destination.INCOMPLETE)}
        assert (out / destination.INCOMPLETE / destination.JOURNAL).is_file()
        for dry_run in (True, False) if clean_up == "convert" else ():
            assert (out / destination.INCOMPLETE).is_dir()
            with pytest.raises(UsageError, match="already holds absorbed weights"):
                convert(example_path, out, dry_run=dry_run)
        if clean_up == "load":
            AbsorbedCheckpoint.open(out)
        assert snapshot(out) == before and not (out / destination.INCOMPLETE).exists()


def test_files_of_others_are_told_from_remains(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption somebody puts another file where a renamed shard was: it is not removed."""
    out = tmp_path / "out"
    interrupt(example_path, out, monkeypatch, "_move", 3)
    first_shard(out).write_bytes(b"somebody's")
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"already holds mla_absorbed-00001-of-00002.safetensors, and no mla_mani"):
            convert(example_path, out, dry_run=dry_run)
    destination.remove_remains(out)
    assert snapshot(out) == {"mla_absorbed-00001-of-00002.safetensors": b"somebody's"}


def test_somebodys_files_in_the_temporary_folder_stay(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(example_path, out, monkeypatch, "_write", 4)
    mine = out / destination.INCOMPLETE / "notes.txt"
    mine.write_text("mine")
    with pytest.raises(UsageError, match="holds files that are not of an interrupted conversion; remove it"):
        convert(example_path, out)
    assert mine.read_text() == "mine"


def test_a_file_that_appears_meanwhile_is_not_replaced(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"

    def appear(done: int, total: int) -> None:
        (out / "mla_absorbed-00001-of-00001.safetensors").write_text("mine")

    with pytest.raises(UsageError, match="appeared during the conversion"):
        convert(example_path, out, progress=appear)
    assert snapshot(out) == {"mla_absorbed-00001-of-00001.safetensors": b"mine"}


def test_two_conversions_into_one_folder(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out, refused = tmp_path / "out", []

    def again(done: int, total: int) -> None:
        with pytest.raises(UsageError, match="another conversion is writing into") as caught:
            convert(example_path, out)
        refused.append(caught)

    convert(example_path, out, progress=again)
    assert len(refused) == 4
    AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(example_path))


def test_data_reach_the_disk_before_their_names(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is flushed before the first rename, the folder before the manifest's name and after it."""
    events: list[str] = []
    fsync, rename = os.fsync, pathlib.Path.rename

    def noted_fsync(handle: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def noted_rename(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        events.append(target.name)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(pathlib.Path, "rename", noted_rename)
    report = convert(example_path, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    count = len(report.files)
    assert events[: count + 1] == ["file"] * (count + 1)  # the journal too
    assert events[count + 1 :] == ["folder", *report.files[:-1], "folder", "mla_manifest.json", "folder"]
