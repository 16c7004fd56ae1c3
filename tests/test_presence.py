"""Who is at work in a folder: processes that ended are recognised, living ones are respected."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from snapshots import snapshot

from mla_convert import destination, presence, remains
from mla_convert.conversion import convert
from mla_convert.errors import UsageError
from mla_convert.presence import Presence, Process, look, this_process
from mla_convert.storage import AbsorbedCheckpoint


def write(file: pathlib.Path, process: Process) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**dataclasses.asdict(process), "nonce": "x"}))


def test_what_is_said_is_seen(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "lock.json"
    assert look(file) is None
    mine = Presence(file, launch="a")
    with pytest.raises(FileExistsError):
        Presence(file)
    mine.say(plan="p")
    seen = look(file)
    assert seen is not None and seen.alive and seen.nonce == mine.nonce
    assert (seen.process, seen.known) == (this_process(), {"launch": "a", "plan": "p"})
    mine.end()
    assert list(tmp_path.iterdir()) == []


def test_without_a_thread_nothing_is_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Presence(tmp_path / "lock.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"host": "a"}', b"\xff"])
def test_a_file_that_says_nothing(tmp_path: pathlib.Path, text: bytes) -> None:
    (tmp_path / "lock.json").write_bytes(text)
    assert look(tmp_path / "lock.json") is None


def ended_process() -> Process:
    """A process of this machine that is no more."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return dataclasses.replace(this_process(), pid=child.pid)


HERE = this_process()
PROCESSES = {
    "this one": (HERE, True),
    "ended": (None, False),
    "of another machine of that name, or an earlier boot": (dataclasses.replace(HERE, boot="another"), True),
    "its number given to another": (dataclasses.replace(HERE, started="1"), False),
    "of another user": (dataclasses.replace(HERE, pid=1, started=presence._started(1) or ""), True),
    "of another machine": (dataclasses.replace(HERE, host="elsewhere"), True),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_the_living_and_the_dead(tmp_path: pathlib.Path, case: str) -> None:
    process, alive = PROCESSES[case]
    write(tmp_path / "lock.json", process or ended_process())
    seen = look(tmp_path / "lock.json")
    assert seen is not None and seen.alive == alive


@pytest.mark.parametrize("elsewhere", [{"host": "elsewhere"}, {"boot": "another", "pid": 1 << 30}])
def test_other_machines_are_told_by_age(
    elsewhere: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lock.json"
    write(file, dataclasses.replace(HERE, **elsewhere))
    seen = look(file)
    assert seen is not None and seen.alive
    old = time.time() - presence.DEAD_AFTER - 1
    os.utime(file, (old, old))
    seen = look(file)
    assert seen is not None and not seen.alive
    monkeypatch.setattr(presence, "BEAT", 0.01)
    mine = Presence(tmp_path / "mine.json")
    os.utime(mine.file, (old, old))
    for _ in range(500):
        time.sleep(0.01)
        if mine.file.stat().st_mtime > old + 1:
            break
    assert mine.file.stat().st_mtime > old + 1
    mine.end()


@pytest.mark.parametrize("case", PROCESSES)
def test_the_lock_of_a_conversion(example_path: pathlib.Path, tmp_path: pathlib.Path, case: str) -> None:
    process, alive = PROCESSES[case]
    lock = tmp_path / "out" / remains.INCOMPLETE / remains.LOCK
    write(lock, process or ended_process())
    if not alive:
        convert(example_path, tmp_path / "out")
        AbsorbedCheckpoint.open(tmp_path / "out")
        assert not lock.parent.exists()
        return
    before = snapshot(tmp_path)
    with pytest.raises(
        UsageError, match=r"another conversion is writing into .*out \(process \d+ on .*\); wait for it"
    ):
        convert(example_path, tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_a_lock_without_words_is_stale(example_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    lock = tmp_path / "out" / remains.INCOMPLETE / remains.LOCK
    lock.parent.mkdir(parents=True)
    lock.write_bytes(b"")
    convert(example_path, tmp_path / "out")
    assert destination.MANIFEST in snapshot(tmp_path / "out")
