"""A run that fails or is killed anywhere leaves nothing that loads, the next one finishes it, others' files stay."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch
from interruptions import OPERATIONS, SHARD_BYTES, Stop, count_loads, job, killed, no_space, noted, stopping_at
from snapshots import snapshot

from mla_convert import destination, journal, remains
from mla_convert.checkpoint import Checkpoint
from mla_convert.conversion import convert
from mla_convert.errors import MLAConvertError, OutputError, SidecarError, UsageError
from mla_convert.storage import AbsorbedCheckpoint


@pytest.fixture(scope="module")
def steps(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many operations a whole run takes."""
    with pytest.MonkeyPatch.context() as patch:
        begun = stopping_at(0, patch, Stop)
        job(example_path, tmp_path_factory.mktemp("steps") / "out")
    assert set(begun) == set(OPERATIONS)
    assert begun[-2:] == ["move", "sync_folder"]
    return len(begun)


@pytest.fixture(scope="module")
def whole(example_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run leaves."""
    out = tmp_path_factory.mktemp("whole") / "out"
    job(example_path, out)
    return snapshot(out)


def places(example_path: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Source and OUT: a new folder, one with a file of somebody's, and the source itself."""
    yield example_path, tmp_path / "made" / "out"
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    yield example_path, used
    source = tmp_path / "source"
    source.mkdir()
    for name, data in snapshot(example_path).items():
        (source / name).write_bytes(data)
    yield source, source


def final(folder: pathlib.Path) -> dict[str, bytes]:
    """Everything but the temporary folder."""
    return {name: data for name, data in snapshot(folder).items() if destination.INCOMPLETE not in name}


def test_a_failed_run_leaves_what_was_there(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the job itself: nothing could be gone on with."""
    for number, (source, out) in enumerate(places(example_path, tmp_path)):
        before, folders = snapshot(tmp_path), set(tmp_path.rglob("*"))
        for step in range(1 + number, steps, 3):
            with monkeypatch.context() as patch:
                stopping_at(step, patch, Stop)
                with pytest.raises(Stop):
                    job(source, out)
            assert snapshot(tmp_path) == before, step
            assert set(tmp_path.rglob("*")) == folders, step


@pytest.mark.parametrize("kind", [KeyboardInterrupt, no_space])
def test_a_stopped_run_is_gone_on_with(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[], BaseException],
) -> None:
    """A full disk, or Ctrl-C: one error, nothing under a final name, and what was done is done once."""
    expected, message = (OutputError, "No space left on device.*nothing there passes for complete")
    if isinstance(kind(), KeyboardInterrupt):
        expected, message = (KeyboardInterrupt, "^$|what is done is kept in .*; the same command goes on from there")
    for number, (source, out) in enumerate(places(example_path, tmp_path)):
        before, folders = snapshot(tmp_path), set(tmp_path.rglob("*"))
        for step in range(1 + number, steps, 4):
            with monkeypatch.context() as patch:
                begun = stopping_at(step, patch, kind)
                with pytest.raises(expected, match=message):
                    job(source, out)
            left = out if source != out else out / destination.FOLDER
            done = noted(left)
            assert not (left / destination.MANIFEST).exists()
            if "move" not in begun:
                assert final(tmp_path) == before
            if not done:
                assert set(tmp_path.rglob("*")) == folders, step
            with monkeypatch.context() as patch:
                loads = count_loads(patch)
                job(source, out)
            assert len(loads) == 4 - done, step
            made = {name: data for name, data in snapshot(tmp_path).items() if name not in before}
            assert {str((tmp_path / name).relative_to(left)): data for name, data in made.items()} == whole
            for name in made:
                (tmp_path / name).unlink()
            for folder in sorted(set(tmp_path.rglob("*")) - folders, reverse=True):
                folder.rmdir()


def test_a_killed_run_leaves_nothing_that_loads_and_is_finished(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in range(1, steps + 1):
        out = tmp_path / str(step)
        killed(example_path, out, monkeypatch, step)
        if step == steps:  # the manifest was in place: the weights are complete
            AbsorbedCheckpoint.open(out).check_source(Checkpoint.open(example_path))
            break
        with pytest.raises(SidecarError, match=r"interrupted conversion .*run the same conversion again"):
            AbsorbedCheckpoint.open(out)
        done = noted(out)
        with monkeypatch.context() as patch:
            loads = count_loads(patch)
            job(example_path, out)
        assert len(loads) == 4 - done
        assert snapshot(out) == whole, step


def test_a_run_killed_twice_is_finished(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first, second in itertools.product((12, steps // 2, steps - 4), (3, 9, 14)):
        out = tmp_path / f"{first}-{second}"
        killed(example_path, out, monkeypatch, first)
        killed(example_path, out, monkeypatch, second)
        job(example_path, out)
        assert snapshot(out) == whole


def test_kept_parts_are_verified(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that lost what it had taken: the layer is done again."""
    out = tmp_path / "out"
    killed(example_path, out, monkeypatch, steps - 8)
    part = remains.part(out, "mla_absorbed-00001-of-00002.safetensors")
    data = bytearray(part.read_bytes())
    data[-5:] = b"\0\0\0\0\0"
    part.write_bytes(data)
    loads = count_loads(monkeypatch)
    job(example_path, out)
    assert loads == [1] and snapshot(out) == whole


def test_no_resume_starts_afresh(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    killed(example_path, out, monkeypatch, steps - 3)
    loads = count_loads(monkeypatch)
    job(example_path, out, resume=False)
    assert len(loads) == 4 and snapshot(out) == whole


@pytest.mark.parametrize("options", [dict(form="fused"), dict(dtype="float32"), dict(max_shard_bytes=10**9)], ids=str)
def test_other_options_start_afresh_and_say_so(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    out = tmp_path / "out"
    killed(example_path, out, monkeypatch, steps - 3)
    report = convert(example_path, out, **options)
    assert any("a run with other options, or of another source, had left" in note for note in report.notes)
    convert(example_path, tmp_path / "expected", **options)
    assert snapshot(out) == snapshot(tmp_path / "expected")


def test_another_version_starts_afresh(
    example_path: pathlib.Path,
    tmp_path: pathlib.Path,
    steps: int,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may round, choose or place in its own way: no file holds layers of two."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(journal, "__version__", "0.0.9")
        killed(example_path, out, monkeypatch, steps - 3)
    loads = count_loads(monkeypatch)
    job(example_path, out)
    assert len(loads) == 4 and snapshot(out) == whole


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_products_of_another_width_start_afresh(
    example_path: pathlib.Path, tmp_path: pathlib.Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where float32 products may lose bits they are formed in float64, and round to other numbers now and then."""
    out = tmp_path / "out"
    torch.set_float32_matmul_precision(precision)
    try:
        with monkeypatch.context() as patch:
            stopping_at(20, patch, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                job(example_path, out, form="fused")
    finally:
        torch.set_float32_matmul_precision("highest")
    done = noted(out)
    loads = count_loads(monkeypatch)
    job(example_path, out, form="fused")
    assert done and len(loads) == (4 - done if precision == "highest" else 4)


def test_what_was_done_before_is_said(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "out", []
    killed(example_path, out, monkeypatch, 12)
    report = convert(example_path, out, max_shard_bytes=SHARD_BYTES, progress=lambda *done: calls.append(done))
    (note,) = [note for note in report.notes if "were done before" in note]
    before = int(note.split()[0])
    assert 0 < before < 4 and calls == [(done, 4) for done in range(before + 1, 5)]


def test_a_source_that_changes_under_the_run(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in snapshot(example_path).items():
        (source / name).write_bytes(data)

    def change(done: int, total: int) -> None:
        if done == 2:
            os.utime(source / "model-00002-of-00003.safetensors")
            os.utime(source / "model-00003-of-00003.safetensors")

    with pytest.raises(MLAConvertError, match=r"model-0000.* changed while it was read; wait until nothing"):
        convert(source, tmp_path / "out", progress=change, workers=1)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changed_in_between_starts_afresh(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name, data in snapshot(example_path).items():
        (source / name).write_bytes(data)
    killed(source, out, monkeypatch, steps - 3)
    os.utime(source / "model-00001-of-00003.safetensors")
    loads = count_loads(monkeypatch)
    job(source, out)
    assert len(loads) == 4


def test_what_is_left_beside_complete_weights_goes(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the manifest got its name: loading cleans up, and so does the conversion that is refused."""
    for clean_up in ("load", "convert"):
        out = tmp_path / clean_up
        killed(example_path, out, monkeypatch, steps)
        before = final(out)
        assert (out / destination.INCOMPLETE / remains.JOURNAL).is_file()
        for dry_run in (True, False) if clean_up == "convert" else ():
            assert (out / destination.INCOMPLETE).is_dir()
            with pytest.raises(UsageError, match="already holds absorbed weights"):
                convert(example_path, out, dry_run=dry_run)
        if clean_up == "load":
            AbsorbedCheckpoint.open(out)
        assert snapshot(out) == before and not (out / destination.INCOMPLETE).exists()


def test_files_of_others_are_told_from_remains(
    example_path: pathlib.Path, tmp_path: pathlib.Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption somebody puts another file where a renamed shard was: it is not removed."""
    out = tmp_path / "out"
    killed(example_path, out, monkeypatch, steps - 3)
    shard = sorted(out.glob("*.safetensors"))[0]
    shard.write_bytes(b"somebody's")
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"already holds mla_absorbed-00001-of-00002.safetensors, and no mla_mani"):
            convert(example_path, out, dry_run=dry_run)
    remains.remove_remains(out, destination.MANIFEST)
    assert snapshot(out) == {"mla_absorbed-00001-of-00002.safetensors": b"somebody's"}


def test_somebodys_files_in_the_temporary_folder_stay(
    example_path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed(example_path, out, monkeypatch, 12)
    mine = out / destination.INCOMPLETE / "notes.txt"
    mine.write_text("mine")
    before = snapshot(out)
    with pytest.raises(UsageError, match="holds files that are not of an interrupted conversion; remove it"):
        convert(example_path, out)
    assert mine.read_text() == "mine"
    assert {name: data for name, data in before.items() if "lock" not in name} == {
        name: data for name, data in snapshot(out).items() if "lock" not in name
    }


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
    assert events[: count + 1] == ["file"] * (count + 1)  # the list of renames too
    assert events[count + 1 :] == ["folder", *report.files[:-1], "folder", "mla_manifest.json", "folder"]
