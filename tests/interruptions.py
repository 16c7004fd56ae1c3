"""Ending a conversion at any operation on the disk, by an error or as a killed process ends."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import pathlib
from collections.abc import Callable

import pytest

from mla_convert import destination, disk, presence, run, sidecar
from mla_convert.conversion import convert

SHARD_BYTES = 150_000  # two shards for the example
OPERATIONS = ("make_file", "write_at", "append_line", "write_text", "sync", "sync_folder", "move")
ENDED = dataclasses.replace(presence.this_process(), started="1")  # its number has been given to this one


class Stop(BaseException):
    """Stands for whatever ends a run; no handler takes it for an ordinary error."""


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def stopping_at(
    number: int, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException], *, for_good: bool = False
) -> list[str]:
    """Make the ``number``-th operation on the disk fail, ``for_good`` all after it too; returns those begun."""
    begun: list[str] = []
    places = itertools.count(1)  # counts right when several threads begin at once

    def wrap(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def operation(*arguments: object) -> None:
            begun.append(name)
            place = next(places)
            if place == number or (for_good and place > number):
                raise error()
            original(*arguments)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(disk, name, wrap(name, getattr(disk, name)))
    return begun


def vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end as a killed process does: nothing is cleaned up, and the lock names a process that is gone."""
    monkeypatch.setattr(run.Run, "__exit__", lambda self, *error: self._held.close())
    monkeypatch.setattr(run.Run, "_leave", lambda self: self._held.close())
    monkeypatch.setattr(presence, "this_process", lambda: ENDED)
    monkeypatch.setattr(presence.Presence, "_beat", lambda self: None)


def job(source: pathlib.Path, out: pathlib.Path, **options: object) -> None:
    """The conversion that is interrupted; one worker, so that operations of two layers hardly mix.

    Notes in the journal and syncs come from other threads: what was done before an operation differs from run to run.
    """
    convert(source, out, max_shard_bytes=SHARD_BYTES, workers=1, **options)  # type: ignore[arg-type]


def noted(folder: pathlib.Path) -> int:
    """Layers that the journals in a folder say are done."""
    texts = [file.read_text() for file in (folder / destination.INCOMPLETE).glob("progress-*.jsonl")]
    return sum('"unit"' in line for text in texts for line in text.splitlines())


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are read from now on."""
    loads: list[int] = []
    original = sidecar.read_operands

    def counted(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
        loads.append(layer.spec.index)
        return original(checkpoint, layer, *rest)

    monkeypatch.setattr(sidecar, "read_operands", counted)
    return loads


def killed(source: pathlib.Path, out: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As after kill -9: the run stops before one operation and cleans up nothing."""
    with monkeypatch.context() as patch:
        vanish(patch)
        stopping_at(step, patch, Stop, for_good=True)  # its other threads write nothing more either
        with pytest.raises(Stop):
            job(source, out)
