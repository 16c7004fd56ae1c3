"""Run units of work on several threads at once, within a bound of memory.

Reading, products, hashing and writing all leave Python's lock, so that threads overlap them. Each task computes on one
thread: how many there are decides when a block is made, never what is in it. What is made is written by threads that
do nothing else, since they wait for the disk.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_convert.journal import Record, WrittenBlock

_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
#: More threads by default would hold more memory than the bound that the package promises.
_MOST_WORKERS = 16
#: Threads that write: the disk has the next block when it ends with one.
_WRITERS = 2


@dataclasses.dataclass(frozen=True)
class Block:
    """Values (any strides, on any device) that stand in a planned file from byte ``start`` on.

    ``made`` says that they are products, which take longer to make than to write, and not copies.
    """

    file: int
    start: int
    tensor: Tensor
    made: bool = False


@dataclasses.dataclass(frozen=True)
class Made:
    """What a task has made: blocks to be written, and what is to be known of them.

    ``release`` is called when they have been written.
    """

    blocks: Sequence[Block]
    known: Any = None
    release: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A unit whose inputs are in memory: the tasks that are left, and what to remember of it.

    ``remember`` is called with what the tasks want to be known, in their order, and returns plain values for JSON;
    ``release`` when the inputs are no longer needed.
    """

    tasks: Sequence[Callable[[], Made]]
    remember: Callable[[list[Any]], dict[str, Any]]
    release: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Unit:
    """Work that is done, noted and, after an interruption, repeated as a whole: a layer, or a tensor.

    ``files`` are the numbers of the files it writes to, ``memory`` the bytes of its inputs.
    """

    key: str
    files: tuple[int, ...]
    memory: int
    load: Callable[[], Loaded]


def default_workers(processes: int = 1) -> int:
    """One for each core that this process may use, which ``processes`` of them share, up to 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, cores // processes), _MOST_WORKERS)


class _Flight:
    """A unit under way."""

    def __init__(self, unit: Unit, pool: _Pool, write: Callable[[Block], WrittenBlock]) -> None:
        self.unit = unit
        self.error: BaseException | None = None
        self.record: Record | None = None
        self._pool = pool
        self._write = write
        self._loaded: Loaded | None = None
        self._made: dict[int, tuple[list[WrittenBlock], Any]] = {}
        pool.submit(self, self._load)

    def _load(self) -> None:
        loaded = self._loaded = self.unit.load()
        for number, task in enumerate(loaded.tasks):
            self._pool.submit(self, self._make, number, task)
        self._land_when_all_are_made(len(loaded.tasks))

    def _make(self, number: int, task: Callable[[], Made]) -> None:
        self._pool.write(self, self._keep, number, task())

    def _keep(self, number: int, made: Made) -> None:
        self._made[number] = [self._write(block) for block in made.blocks], made.known
        made.release()
        loaded = self._loaded
        if loaded is not None:
            self._land_when_all_are_made(len(loaded.tasks))

    def _land_when_all_are_made(self, count: int) -> None:
        with self._pool.lock:  # two threads may both see the last task done: the first to take the inputs lands
            if len(self._made) < count or self._loaded is None:
                return
            loaded, self._loaded = self._loaded, None
        made = [self._made[number] for number in range(count)]
        blocks = tuple(block for written, _ in made for block in written)
        self.record = Record(self.unit.key, blocks, loaded.remember([known for _, known in made]))
        loaded.release()
        self._pool.landed.put(self)


class _Pool:
    """Threads that compute on one core each, and threads that write what those have made.

    An error of any task comes to ``landed`` with its flight. Each of the writing threads has one block at hand at most,
    and one more may wait for them: then what computes waits, so that blocks do not fill the memory.
    """

    def __init__(self, workers: int) -> None:
        self.lock = threading.Lock()
        self.landed: queue.SimpleQueue[_Flight] = queue.SimpleQueue()
        self._stopped = False
        self._executor = concurrent.futures.ThreadPoolExecutor(
            workers, "mla-convert", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._writers = concurrent.futures.ThreadPoolExecutor(_WRITERS, "mla-convert-writing")
        self._room = threading.Semaphore(_WRITERS + 1)

    def submit(self, flight: _Flight, task: Callable[..., None], *arguments: Any) -> None:
        """Have ``task`` done for ``flight``, unless an error has ended that or the whole run before."""
        try:
            self._executor.submit(self._guarded, flight, task, *arguments)
        except RuntimeError:
            if not self._stopped:  # else shut down in between: nobody waits for this task
                raise

    def write(self, flight: _Flight, task: Callable[..., None], *arguments: Any) -> None:
        """The same by a thread that writes; waits until there is room."""

        def leaving_room() -> None:
            try:
                self._guarded(flight, task, *arguments)
            finally:
                self._room.release()

        self._room.acquire()
        self._writers.submit(leaving_room)

    def _guarded(self, flight: _Flight, task: Callable[..., None], *arguments: Any) -> None:
        if self._stopped or flight.error is not None:
            return
        try:
            task(*arguments)
        except BaseException as error:
            flight.error = error
            self.landed.put(flight)

    def stop(self) -> None:
        """Begin nothing more, and wait for what has begun; what computes first, since it may wait for what writes."""
        self._stopped = True
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[_Pool]:
    threads = torch.get_num_threads()
    pool = _Pool(workers)
    try:
        yield pool
    finally:
        pool.stop()
        torch.set_num_threads(threads)


def _trim() -> None:
    """Return freed memory to the system; glibc keeps blocks of up to 32 MB, of every thread, for later."""
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def run_units(
    units: Sequence[Unit],
    write: Callable[[Block], WrittenBlock],
    *,
    workers: int,
    memory: int,
    done: Callable[[Unit, Record], None],
) -> None:
    """Load each unit, do its tasks, hand their blocks to ``write``, and then the unit with its record to ``done``.

    ``write`` is called from several threads, ``done`` from the caller's, in the order in which units end. The inputs of
    units under way stay within ``memory`` bytes, except that there is always one. The first error ends everything.
    """
    waiting = collections.deque(units)
    flying: dict[str, _Flight] = {}
    with _pool(workers) as pool:
        while waiting or flying:
            held = sum(flight.unit.memory for flight in flying.values())
            while waiting and (not flying or (len(flying) <= workers and held + waiting[0].memory <= memory)):
                unit = waiting.popleft()
                held += unit.memory
                flying[unit.key] = _Flight(unit, pool, write)
            flight = pool.landed.get()
            if flight.error is not None:
                raise flight.error
            assert flight.record is not None
            _trim()
            done(flying.pop(flight.unit.key).unit, flight.record)
