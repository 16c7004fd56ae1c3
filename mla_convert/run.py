"""One run over a job: take the folder, see what is done already, do the rest, give everything its name.

A job says which files are made of which units of work. A run that fails for a reason of its job removes what it made;
one that is stopped, or whose disk is full, keeps what is done, and so does one that is killed: the next run of the same
job verifies that and goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from mla_convert import journal, ranks
from mla_convert.destination import Goal, check_free_names, disk_errors, locked
from mla_convert.errors import MLAConvertError, OutputError
from mla_convert.job import Job
from mla_convert.journal import Journal, Record, WrittenBlock
from mla_convert.presence import Presence
from mla_convert.ranks import World
from mla_convert.remains import INCOMPLETE, LOCK, refuse_others, remove_remains, remove_unbegun, take_back
from mla_convert.work import Block, Unit, default_workers, run_units
from mla_convert.writing import Staging, make_folders

_SPARE_MEMORY = 1 << 26


class Run:
    """A run of ``job`` in ``goal``'s folder; a context manager.

    :meth:`work` does this process's share, :meth:`gather` waits for the others'; then the lead commits, and the others
    :meth:`wait` for it.
    """

    def __init__(self, goal: Goal, job: Job, *, resume: bool = True, world: World | None = None) -> None:
        self.goal, self.job = goal, job
        self.world = world or World()
        self.staging = Staging(goal, job.files)
        self.records: dict[str, Record] = {}
        #: What the caller should know, and nobody asked for.
        self.notes: list[str] = []
        self._resume = resume
        self._synced: set[int] = set()
        self._shares: Mapping[int, int] = {}
        self._temporary = goal.folder / INCOMPLETE
        self._made: list[pathlib.Path] = []
        self._held = contextlib.ExitStack()
        self._journal: Journal | None = None
        self._presence: Presence | None = None
        self._finished = False

    def __enter__(self) -> Run:
        try:
            with disk_errors(self.goal.folder):
                if self.world.leads:
                    self._lead()
                else:
                    self._presence, self._shares = ranks.join(self._temporary, self.world, self.job.plan)
                    done = ranks.hear(self._temporary, self._presence, self.job.plan)
                    self.records, self._synced = done.records, done.synced
                self._journal = Journal(self._temporary, self.world.rank, self.job.plan)
                if self._presence is not None and not self.world.leads:
                    self._presence.say(begun=True)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.world.leads and not self._finished:
            kept = bool(self.records) and isinstance(error, KeyboardInterrupt | OutputError)
            if kept and isinstance(error, KeyboardInterrupt):
                error.args = (f"what is done is kept in {self._temporary}; the same command goes on from there",)
            if not kept:
                with contextlib.suppress(OSError, MLAConvertError):
                    self._check_lead()  # what is there may be another's by now
                    remove_remains(self.goal.folder, self.goal.marker, keep_lock=True)
        self._leave()

    def _lead(self) -> None:
        folder = self.goal.folder
        self._made = make_folders(folder)
        self._held.enter_context(locked(folder))
        self._temporary.mkdir(exist_ok=True)
        self._presence = ranks.hold(self._temporary, self.world)
        ranks.outlive(self._temporary)
        refuse_others(folder)
        self._take_up()
        check_free_names(self.goal)
        left = Counter({file: 0 for file in range(len(self.job.files))})
        for unit in self.job.units:
            if unit.key not in self.records:
                left[unit.files[0]] += unit.memory
        self._shares = ranks.share_out(left, self.job.groups(), self.world.size)
        if self.world.size > 1:
            ranks.call(self._presence, self._temporary, self.world, self.job.plan, self._shares, len(self.records))

    def _take_up(self) -> None:
        """Go on from what an interrupted run of the same job left; remove what another job's, or any, left."""
        folder = self.goal.folder
        remove_unbegun(self._temporary)
        there = any(file.name != LOCK for file in self._temporary.iterdir())
        found = journal.read_journals(self._temporary, self.job.plan) if self._resume else None
        if found is None:
            if there and self._resume:
                self.notes.append("what a run with other options, or of another source, had left there was removed")
            remove_remains(folder, self.goal.marker, keep_lock=True)
            return
        take_back(folder)
        with concurrent.futures.ThreadPoolExecutor(default_workers()) as pool:
            records = [found.records[unit.key] for unit in self.job.units if unit.key in found.records]
            holding = pool.map(lambda record: journal.holds(record, self.staging.parts), records)
            self.records = {record.unit: record for record, holds in zip(records, holding, strict=True) if holds}
        redone = {file for unit in self.job.units if unit.key not in self.records for file in unit.files}
        self._synced = found.synced - redone
        journal.rewrite(self._temporary, self.job.plan, journal.Progress(self.records, self._synced))
        if self.records:
            self.notes.append(
                f"{len(self.records)} of {len(self.job.units)} {self.job.noun} were done before, and not done again"
            )

    def work(self, workers: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Do what is left of this process's share; ``progress`` is called with the units done and their number."""
        mine = [file for file, rank in self._shares.items() if rank == self.world.rank]
        units = [unit for unit in self.job.units if unit.files[0] in mine and unit.key not in self.records]
        left = Counter(file for unit in units for file in unit.files)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            syncs = [pool.submit(self._sync, file) for file in mine if not left[file] and file not in self._synced]

            def done(unit: Unit, record: Record) -> None:
                self._note(unit, record)
                left.subtract(unit.files)
                syncs.extend(pool.submit(self._sync, file) for file in unit.files if not left[file])
                if progress is not None:
                    progress(len(self.records), len(self.job.units))

            try:
                run_units(units, self._write, workers=workers, memory=2 * self.job.largest + _SPARE_MEMORY, done=done)
            finally:
                self.job.release()
            for sync in syncs:
                sync.result()

    def _check_lead(self) -> None:
        """Before anything is written: that the folder is still this run's."""
        assert self._presence is not None
        with disk_errors(self.goal.folder):
            ranks.check_lead(self._temporary, self._presence.known.get("answers", self._presence.nonce))

    def _write(self, block: Block) -> WrittenBlock:
        self._check_lead()
        return self.staging.write(block)

    def _note(self, unit: Unit, record: Record) -> None:
        assert self._journal is not None
        self._check_lead()
        with disk_errors(self.goal.folder):
            self._journal.add(record)
        self.records[unit.key] = record

    def _sync(self, file: int) -> None:
        assert self._journal is not None
        self._check_lead()
        self.staging.sync(file)
        with disk_errors(self.goal.folder):
            self._journal.synced(file)
        self._synced.add(file)

    def gather(self) -> dict[str, dict[str, Any]]:
        """What every unit's maker wants to know of it, by unit, when all ranks have done their work; the lead's."""

        def all_done() -> bool:
            if self.world.size > 1:
                found = journal.read_journals(self._temporary, self.job.plan) or journal.Progress()
                self.records |= found.records
                self._synced |= found.synced
            missing = {self._shares[file] for file in range(len(self.job.files)) if file not in self._synced}
            for rank in missing:
                if error := ranks.ended(self._temporary, rank):
                    raise error
            return not missing and ranks.heard(self._temporary, self.world)

        with disk_errors(self.goal.folder):
            ranks.wait_until(all_done)
        return {unit.key: self.records[unit.key].data for unit in self.job.units}

    def commit(self, texts: Mapping[str, str], others: Sequence[str] = ()) -> list[str]:
        """Give everything its name (:meth:`Staging.commit`); returns the names."""
        self._check_lead()
        names = self.staging.commit(texts, others)
        self._finished = True
        return names

    def wait(self) -> None:
        """Wait until the lead has committed; another rank's part."""

        def committed() -> bool:
            if self._temporary.exists() and ranks.lead_of(self._temporary) is not None:
                return False
            if not (self.goal.folder / self.goal.marker).exists():
                raise OutputError("rank 0 ended before it had put the parts together; run the same command again")
            return True

        with disk_errors(self.goal.folder):
            ranks.wait_until(committed)

    def _leave(self) -> None:
        if self._presence is not None:
            self._presence.end()
        if self.world.leads:
            with contextlib.suppress(OSError):
                self._temporary.rmdir()
            for folder in self._made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        self._held.close()
