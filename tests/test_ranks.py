"""Several processes on one conversion: the same bytes as one, and a rank that dies leaves what the next call finishes.

Ranks are threads here, which meet through the folder as processes do; test_launches.py starts real ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from interruptions import count_loads, noted
from rank_jobs import JOB, LAYERS, convert_alone, make_source
from snapshots import snapshot

from mla_convert import presence, ranks, remains, run, sidecar
from mla_convert.conversion import convert
from mla_convert.conversion_report import ConversionReport
from mla_convert.errors import MLAConvertError, OutputError, UsageError
from mla_convert.ranks import World, share_out, world_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_source(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def whole(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return convert_alone(source, tmp_path_factory.mktemp("whole"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PAUSE", 0.005)


def launch(
    source: pathlib.Path, out: pathlib.Path, size: int, *, options: dict[int, dict[str, Any]] | None = None
) -> list[ConversionReport | BaseException]:
    """What becomes of each rank of a launch."""

    def rank(number: int) -> ConversionReport:
        world = World(number, size, 1, launch="this")
        given = (options or {}).get(number, {})
        return convert(source, out, **(JOB | {"workers": 1, "world": world} | given))

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, number) for number in range(size)]
    return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_bytes_are_those_of_one_process(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    original = sidecar.read_operands

    def noted(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
        made.append(layer.spec.index)
        return original(checkpoint, layer, *rest)

    monkeypatch.setattr(sidecar, "read_operands", noted)
    reports = launch(source, tmp_path / "out", size)
    assert snapshot(tmp_path / "out") == whole
    assert sorted(made) == list(range(LAYERS))  # each layer by one rank
    for report in reports:
        assert isinstance(report, ConversionReport), report
        assert (report.layers, report.largest_error) == (LAYERS, 0.0)


def test_a_rank_without_work_that_looks_late(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files for five ranks: those that get none hear it from the lead, however soon the others have ended."""
    join, wait_until, here = ranks.join, ranks.wait_until, threading.local()

    def joining(temporary: pathlib.Path, world: World, plan: str) -> Any:
        here.late = world.rank >= 3
        return join(temporary, world, plan)

    def slowly(ready, late=None):  # type: ignore[no-untyped-def]
        if not getattr(here, "late", False) or ready.__name__ != "begun":
            return wait_until(ready, late)
        for _ in range(8):
            if ready():
                return None
            time.sleep(0.5)
        raise late()

    monkeypatch.setattr(ranks, "join", joining)
    monkeypatch.setattr(ranks, "wait_until", slowly)
    for report in launch(source, tmp_path / "out", 5):
        assert isinstance(report, ConversionReport), report
    assert snapshot(tmp_path / "out") == whole


def kill_at(monkeypatch: pytest.MonkeyPatch, layer: int, after: Callable[[], bool] = lambda: True) -> None:
    """The rank that comes to this layer ends there, as soon as ``after`` holds."""
    original = sidecar.read_operands
    number = layer

    def deadly(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
        if layer.spec.index == number:
            while not after():
                time.sleep(0.01)
            raise SystemExit(9)
        return original(checkpoint, layer, *rest)

    monkeypatch.setattr(sidecar, "read_operands", deadly)


def test_a_rank_that_dies_leaves_what_the_next_call_finishes(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        # The other two have done theirs by then: those that outlive their lead write nothing more.
        kill_at(patch, layer=3, after=lambda: noted(out) >= 4)
        lead, *others = launch(source, out, 3)
    assert isinstance(lead, OutputError) and "ended before its work was done; what is done is kept in" in str(lead)
    assert sorted(type(other).__name__ for other in others) == ["OutputError", "SystemExit"]
    assert [name for name in snapshot(out) if not name.startswith(remains.INCOMPLETE)] == []
    report = convert(source, out, **JOB)
    assert any("5 of 6 layers were done before" in note or "4 of 6 layers" in note for note in report.notes)
    assert snapshot(out) == whole


def test_another_number_of_ranks_finishes_it(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_at(patch, layer=5, after=lambda: noted(out) == 4)
        launch(source, out, 3)
    made = count_loads(monkeypatch)
    for report in launch(source, out, 2):
        assert isinstance(report, ConversionReport), report
    assert snapshot(out) == whole
    assert sorted(made) == [4, 5]  # whichever rank it is: all know what is done


def test_a_journal_without_a_line_costs_nothing(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was killed before the first line of its journal takes nothing from what the others have done."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "commit", lambda *arguments: (_ for _ in ()).throw(OutputError("the disk is full")))
        launch(source, out, 2)
    assert noted(out) == LAYERS
    (out / remains.INCOMPLETE / remains.PROGRESS.format(7)).touch()
    made = count_loads(monkeypatch)
    for report in launch(source, out, 3):
        assert isinstance(report, ConversionReport), report
    assert snapshot(out) == whole and made == []


class Survivor:
    """A launch of two whose rank 0 is killed while rank 1 is about to read its first layer, where it stays for now."""

    def __init__(self, source: pathlib.Path, out: pathlib.Path, patch: pytest.MonkeyPatch) -> None:
        self.here, self.go = threading.Event(), threading.Event()
        self._lock = out / remains.INCOMPLETE / remains.LOCK
        original, leave = sidecar.read_operands, run.Run.__exit__
        first = {0, 2}  # of each rank

        def read(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
            if layer.spec.index not in first:
                return original(checkpoint, layer, *rest)
            first.remove(layer.spec.index)
            if layer.spec.index == 0:  # the lead's
                self.here.wait(20)
                raise SystemExit(9)
            self.here.set()
            self.go.wait(20)
            return original(checkpoint, layer, *rest)

        def vanish(self: run.Run, *error: Any) -> None:
            self._held.close() if self.world.leads and error[0] is SystemExit else leave(self, *error)

        patch.setattr(sidecar, "read_operands", read)
        patch.setattr(run.Run, "__exit__", vanish)
        self._pool = concurrent.futures.ThreadPoolExecutor(3)
        options = JOB | {"dtype": "bfloat16", "max_shard_bytes": JOB["max_shard_bytes"] // 2, "workers": 1}
        worlds = [World(rank, 2, 1, launch="this") for rank in range(2)]
        lead, self._other = [self._pool.submit(convert, source, out, **options, world=world) for world in worlds]
        assert isinstance(lead.exception(), SystemExit)
        said = json.loads(self._lock.read_bytes())
        self._lock.write_text(json.dumps(said | {"started": "1"}))  # what a killed process's lock says
        self.nonce = said["nonce"]

    def submit(self, *args: Any, **options: Any) -> concurrent.futures.Future[Any]:
        """Begin another call, and wait until it has taken the lock, or ended."""
        call = self._pool.submit(convert, *args, **options)
        while not call.done() and presence.nonce_of(self._lock) in (self.nonce, None):
            time.sleep(0.001)
        return call

    def release(self) -> BaseException | None:
        """Let rank 1 go on; what becomes of it."""
        self.go.set()
        self._pool.shutdown(wait=True)
        return self._other.exception()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_rank_that_outlives_its_lead_writes_into_nobody_elses_parts(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The next call, of the same options or of others, waits for it; and it ends before it writes anything."""
    survivor = Survivor(source, tmp_path / "out", monkeypatch)
    begun = snapshot(tmp_path / "out" / remains.INCOMPLETE).keys()
    job: dict[str, Any] = {"form": "factored", "dtype": dtype, "max_shard_bytes": JOB["max_shard_bytes"] // 2}
    call = survivor.submit(source, tmp_path / "out", **job, workers=1)
    concurrent.futures.wait([call], timeout=0.3)  # time enough to do all of it
    assert not call.done() and snapshot(tmp_path / "out" / remains.INCOMPLETE).keys() == begun
    error = survivor.release()
    assert isinstance(error, OutputError) and "another conversion took over" in str(error)
    assert isinstance(call.result(), ConversionReport)
    convert(source, tmp_path / "one", **job)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "one")


def test_a_rank_that_stays_is_named(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = Survivor(source, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    with pytest.raises(UsageError, match=r"process \d+ on .*, of an earlier launch, is still writing into .*end it"):
        convert(source, tmp_path / "out", **JOB)
    assert isinstance(survivor.release(), OutputError)


def test_a_lead_that_was_taken_for_dead_writes_nothing_more(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept: meanwhile another one took the lock, and what is in the folder is its."""
    lock, original = tmp_path / "out" / remains.INCOMPLETE / remains.LOCK, sidecar.read_operands
    others = json.dumps({"nonce": "another's"})

    def read(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
        lock.write_text(others)
        return original(checkpoint, layer, *rest)

    monkeypatch.setattr(sidecar, "read_operands", read)
    with pytest.raises(OutputError, match="after this process was taken for dead"):
        convert(source, tmp_path / "out", **JOB)
    assert lock.read_text() == others and snapshot(lock.parent).keys() == {remains.LOCK, "progress-0.jsonl"}


def test_what_an_earlier_launch_left_is_no_word_of_this_one(
    source: pathlib.Path, tmp_path: pathlib.Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock and an answer of processes that are gone, of a launch of the same name."""
    out = tmp_path / "out"
    (out / remains.INCOMPLETE).mkdir(parents=True)
    with monkeypatch.context() as patch:
        gone = dataclasses.replace(presence.this_process(), started="1")
        patch.setattr(presence, "this_process", lambda: gone)
        patch.setattr(presence.Presence, "_beat", lambda self: None)
        lock = presence.Presence(out / remains.INCOMPLETE / remains.LOCK, launch="this")
        rank = presence.Presence(out / remains.INCOMPLETE / remains.RANK.format(1), answers=lock.nonce)
        lock.say(plan="another", ranks={"1": rank.nonce}, shares={"0": 0, "1": 1, "2": 1})
    launch(source, out, 2)
    assert snapshot(out) == whole


def test_ranks_that_do_not_come(source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", 0.05)
    for rank, message in ((0, r"of 3 ranks, \[1, 2\] did not come"), (2, "rank 2 waited for rank 0")):
        with pytest.raises(UsageError, match=message):
            convert(source, tmp_path / "out", world=World(rank, 3, launch="this"))
        assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_agree(source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    lead, other = launch(source, tmp_path / "out", 2, options={1: {"dtype": "float16"}})
    assert isinstance(lead, UsageError) and isinstance(other, UsageError)
    assert "rank 1 has other options, or another source, than rank 0" in str(other)
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_lead_ends_the_others(
    source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sidecar.read_operands

    def damaged(checkpoint, layer, *rest):  # type: ignore[no-untyped-def]
        if layer.spec.index in (0, 1):  # the first shard is the lead's
            time.sleep(0.1)
            raise UsageError("damaged on purpose")
        return original(checkpoint, layer, *rest)

    monkeypatch.setattr(sidecar, "read_operands", damaged)
    lead, other = launch(source, tmp_path / "out", 2)
    assert isinstance(lead, UsageError) and "on purpose" in str(lead)
    assert isinstance(other, MLAConvertError)
    assert not (tmp_path / "out").exists() or snapshot(tmp_path / "out") == {}


def test_shares() -> None:
    groups = [(0,), (1, 2), (3,), (4,)]
    sizes = {0: 5, 1: 4, 2: 4, 3: 1, 4: 0}
    assert share_out(sizes, groups, 1) == dict.fromkeys(range(5), 0)
    assert share_out(sizes, groups, 2) == {1: 0, 2: 0, 0: 1, 3: 1, 4: 1}
    assert share_out(sizes, groups, 9)[4] in range(9)


def test_the_world_comes_from_the_environment() -> None:
    assert world_of({}) == world_of({"RANK": "1"}) == World()
    launched = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert world_of(launched) == World(2, 4, 2, "/a/7")
    host = presence.this_process().host
    assert world_of(launched | {"MASTER_ADDR": "127.0.0.1"}).launch == f"/{host}/7"
    for bad in ({"RANK": "x"}, {"RANK": "4"}, {"RANK": "-1"}, {"LOCAL_WORLD_SIZE": "0"}):
        with pytest.raises(UsageError, match="let torchrun set them"):
            world_of(launched | bad)
