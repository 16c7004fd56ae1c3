"""What was measured, entry by entry, in one JSON file that a later run goes on from."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

#: The entry that says what the figures belong to: it must be the same when a run goes on.
MACHINE = "machine"


class OutOfStep(Exception):
    """The file that is there cannot be gone on with."""


class DeviceLost(Exception):
    """The GPU's context of a process is lost; nothing more can run there."""


class Skipped(Exception):
    """Not tried, by a process whose GPU context was lost before."""


class Results:
    """Entries by name; what is there is not measured again, unless it failed, and nothing starts past the deadline."""

    def __init__(self, path: pathlib.Path, deadline: float) -> None:
        self.path = path
        self.deadline = deadline
        self.entries: dict[str, Any] = _read(path)
        self.left_out: list[str] = []
        self.lost: str | None = None

    def begin(self, machine: dict[str, Any]) -> None:
        """Keep what the figures belong to.

        Raises:
            OutOfStep: where the file holds figures of something else.
        """
        held = self.entries.setdefault(MACHINE, machine)
        if held != machine:
            other = ", ".join(f"{k} {held.get(k)} (now {machine.get(k)})" for k in machine if held.get(k) != machine[k])
            raise OutOfStep(f"{self.path} holds figures of another machine or kernel: {other}; name another file")
        self.save()

    def done(self, name: str) -> bool:
        """Whether an entry is there and did not fail."""
        return name in self.entries and not failed(self.entries[name])

    def measure(self, name: str, work: Callable[[], Any]) -> None:
        """Run ``work`` and keep what it returns under ``name``; an error is kept as its text."""
        if self.done(name):
            return
        if self.lost or time.monotonic() > self.deadline:
            self.left_out.append(name)
            return
        started = time.monotonic()
        try:
            found = work()
        except MemoryError as error:  # the problem is too large for this machine
            found = {"left_out": str(error)}
        except Exception as error:  # whatever it is, the next entry may be fine
            found = failure(error)
            self.lost = lost_device()
        self.keep(name, found | {"took_seconds": round(time.monotonic() - started, 3)})

    def measure_apart(self, work: Callable[[Any], Any], jobs: Iterable[tuple[str, Any]], workers: int) -> None:
        """Run ``work(argument)`` for each (name, argument), in ``workers`` processes where there are several.

        Compiling is what takes the time, and one process compiles one kernel at once.
        """
        waiting = [(name, argument) for name, argument in jobs if not self.done(name)]
        if workers < 2:
            for name, argument in waiting:
                self.measure(name, lambda argument=argument: work(argument))
            return
        if not waiting or time.monotonic() > self.deadline:
            self.left_out += [name for name, _ in waiting]
            return
        context = multiprocessing.get_context("spawn")
        # One thread each: what is expected is computed on the CPU, and every process would take all cores.
        threads: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, **threads) as pool:
            futures = {pool.submit(carefully, work, argument): name for name, argument in waiting}
            self._collect(futures)
            for future in futures:
                future.cancel()
        self.left_out += [name for name, _ in waiting if name not in self.entries]

    def _collect(self, futures: dict[concurrent.futures.Future[Any], str]) -> None:
        """Keep what is ready until the deadline, or until a process is lost: what the others say is then in doubt."""
        try:
            for future in concurrent.futures.as_completed(futures, max(0.0, self.deadline - time.monotonic())):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    self.lost = f"a process that checked cases ended: {error}"
                elif not isinstance(error, Skipped):
                    self.keep(futures[future], future.result() if error is None else failure(error))
                if isinstance(error, DeviceLost):
                    self.lost = str(error)
                if self.lost:
                    return
        except TimeoutError:
            pass

    def keep(self, name: str, found: Any) -> None:
        """Add an entry, print it, and write the file."""
        self.entries[name] = found
        print(name, json.dumps(found), flush=True)
        self.save()

    def save(self, summary: dict[str, Any] | None = None) -> None:
        """Write the file in one step."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"summary": summary or {}, "entries": self.entries}, indent=1) + "\n")
        temporary.replace(self.path)


_LOST: list[str] = []
#: What PyTorch raises when a GPU reports an error; not there before 2.9.
_ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())


def carefully(work: Callable[[Any], Any], argument: Any) -> Any:
    """``work(argument)``, in one of several processes; after an error of the GPU the process tries nothing more.

    Its context is lost, and each of the jobs that wait would fail for no reason of its own.

    Raises:
        DeviceLost: by the job that lost the context.
        Skipped: by every later one.
    """
    if _LOST:
        raise Skipped(_LOST[0])
    try:
        return work(argument)
    except Exception as error:
        if not isinstance(error, _ACCELERATOR_ERROR) and lost_device() is None:
            raise
        _LOST.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        raise DeviceLost(_LOST[0]) from None


def lost_device() -> str | None:
    """After an error: why the GPU's context of this process can do nothing more; None where it can."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return None


def failure(error: BaseException) -> dict[str, str]:
    """An entry for an error."""
    return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def failed(entry: dict[str, Any]) -> bool:
    """Whether an entry is one of :func:`failure`; a figure may have the name "error" too."""
    return isinstance(entry.get("error"), str)


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text("utf-8"))["entries"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutOfStep(f"{path} is not a file of this check ({type(error).__name__}); name another file") from error
    return dict(entries)
