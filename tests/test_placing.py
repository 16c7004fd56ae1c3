"""What goes with a model: which files those are, and that they are on the disk before the model is complete."""

from __future__ import annotations

import os
import pathlib

import pytest
from variants import small_checkpoint

from mla_convert import destination, disk
from mla_convert.conversion import convert
from mla_convert.placing import companions


def test_models_inside_the_source_do_not_come_along(tmp_path: pathlib.Path) -> None:
    """Without their weights they would be of no use; what belongs to the source does come along."""
    source = small_checkpoint(tmp_path / "source")
    (source / "docs/en").mkdir(parents=True)
    (source / "docs/en/usage.md").write_text("so")
    (source / "LICENSE").write_text("free")
    mine = {"LICENSE", "docs/en/usage.md"}
    convert(source, source / "one", target="standalone", form="factored")
    assert (source / "one/mla_absorbed/mla_manifest.json").is_file() and (source / "one/docs/en/usage.md").is_file()
    convert(source, source / "docs/two", form="factored")
    small_checkpoint(source / "docs/three")
    (source / "four" / destination.INCOMPLETE).mkdir(parents=True)  # of a run that ended half way
    (source / "four/LICENSE").write_text("free")
    assert set(companions(source)) == mine
    report = convert(source, tmp_path / "out", target="hf")
    assert mine < set(report.files)
    made = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert made == set(report.files)


@pytest.mark.parametrize("link", ["auto", "copy"])
def test_companions_reach_the_disk_before_their_names(
    tmp_path: pathlib.Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that gets a name was flushed before the first of them got it, a link or a copy alike."""
    source, out = small_checkpoint(tmp_path / "source"), tmp_path / "out"
    (source / "LICENSE").write_text("free")
    (source / "LICENSE").chmod(0o444)
    events: list[str] = []
    fsync, move = os.fsync, disk.move

    def noted_fsync(handle: int) -> None:
        events.append(pathlib.Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def noted_move(here: pathlib.Path, there: pathlib.Path) -> None:
        events.append(f"moved {here.name}")
        move(here, there)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(disk, "move", noted_move)
    convert(source, out, target="standalone", link=link, form="factored")
    first = next(place for place, event in enumerate(events) if event.startswith("moved "))
    moved = {event.removeprefix("moved ") for event in events if event.startswith("moved ")}
    assert {"LICENSE.part", "model.safetensors.part"} < moved <= set(events[:first])


def test_names_that_look_alike_stay_apart(tmp_path: pathlib.Path) -> None:
    """In the temporary folder they stand side by side."""
    source, names = small_checkpoint(tmp_path / "source"), ("a/b.txt", "a+b.txt", "a%2Fb.txt")
    (source / "a").mkdir()
    for name in names:
        (source / name).write_text(name)
    convert(source, tmp_path / "out", target="hf")
    assert [(tmp_path / "out" / name).read_text() for name in names] == list(names)
