"""Units on several threads: all are done and noted, memory is bounded, one error ends everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from mla_convert.journal import Record, WrittenBlock
from mla_convert.work import Block, Loaded, Made, Unit, default_workers, run_units


def unit(key: str, tasks: int, *, memory: int = 1, load: Callable[[], None] = lambda: None) -> Unit:
    """A unit whose tasks each make one block of their number."""

    def loaded() -> Loaded:
        load()
        made = [lambda n=n: Made([Block(0, n, torch.tensor([n]))], known=n) for n in range(tasks)]
        return Loaded(made, lambda known: {"known": known})

    return Unit(key, (0,), memory, loaded)


def write(block: Block) -> WrittenBlock:
    return WrittenBlock(block.file, block.start, 8, int(block.tensor))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_everything_is_done_and_noted_in_order(workers: int) -> None:
    found: dict[str, Record] = {}
    threads = torch.get_num_threads()
    units = [unit(str(count), count) for count in (3, 0, 1, 40, 2)]
    run_units(units, write, workers=workers, memory=2, done=lambda unit, record: found.update({unit.key: record}))
    assert set(found) == {"3", "0", "1", "40", "2"}
    for key, record in found.items():
        assert record.data == {"known": list(range(int(key)))}
        assert [block.checksum for block in record.blocks] == list(range(int(key)))
    assert torch.get_num_threads() == threads


def test_products_take_one_thread_each() -> None:
    seen: set[int] = set()
    units = [unit(str(n), 1, load=lambda: seen.add(torch.get_num_threads())) for n in range(4)]
    run_units(units, write, workers=2, memory=9, done=lambda *_: None)
    assert seen == {1}


@pytest.mark.parametrize("pool", ["mla-convert_", "mla-convert-writing_"])
def test_threads_that_cannot_start_end_the_run(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith(pool):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_units([unit("a", 2)], write, workers=2, memory=9, done=lambda *_: None)


@pytest.mark.parametrize(("memory", "most"), [(1, 1), (20, 2), (1000, 4)])
def test_memory_is_bounded(memory: int, most: int) -> None:
    lock, held, peak = threading.Lock(), 0, 0

    def load() -> None:
        nonlocal held, peak
        with lock:
            held += 1
            peak = max(peak, held)
        time.sleep(0.01)

    def done(*_: object) -> None:
        nonlocal held
        held -= 1

    run_units([unit(str(n), 1, memory=10, load=load) for n in range(12)], write, workers=3, memory=memory, done=done)
    assert 1 <= peak <= most


@pytest.mark.parametrize("place", ["load", "make", "write", "done"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_error_ends_everything(place: str, error: type[BaseException]) -> None:
    begun: list[str] = []

    def fail(at: str) -> None:
        begun.append(at)
        if at == place:
            raise error("on purpose")

    def failing(block: Block) -> WrittenBlock:
        fail("write")
        return write(block)

    def loaded() -> Loaded:
        fail("load")

        def make() -> Made:
            fail("make")
            return Made([Block(0, 0, torch.tensor([1]))])

        return Loaded([make], lambda known: {})

    units = [Unit(str(n), (0,), 1, loaded) for n in range(200)]
    threads = threading.active_count()
    with pytest.raises(error, match="on purpose"):
        run_units(units, failing, workers=2, memory=4, done=lambda *_: fail("done"))
    assert begun.count("load") < 20 and threading.active_count() == threads


@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_wait_for_the_disk_within_bounds(workers: int) -> None:
    """A slow disk stops what computes before it has filled the memory; each block is let go when it is written."""
    lock, held, peak = threading.Lock(), 0, 0
    writing: set[str] = set()

    def count(change: int) -> None:
        nonlocal held, peak
        with lock:
            held += change
            peak = max(peak, held)

    def make() -> Made:
        count(1)
        return Made([Block(0, 0, torch.tensor([1]))], release=lambda: count(-1))

    def slowly(block: Block) -> WrittenBlock:
        writing.add(threading.current_thread().name)
        assert held
        time.sleep(0.002)
        return write(block)

    units = [Unit(str(n), (0,), 1, lambda: Loaded([make] * 20, lambda known: {})) for n in range(3)]
    run_units(units, slowly, workers=workers, memory=9, done=lambda *_: None)
    assert held == 0 and 3 <= peak <= workers + 3
    assert len(writing) == 2 and all("writing" in name for name in writing)


def test_default_workers() -> None:
    assert 1 <= default_workers() <= 16
    assert default_workers(10_000) == 1
