"""Several processes on one run, on one machine or many: who they are, and how they meet in the folder they write to.

They need nothing but that folder. The first (rank 0) leads: it holds the folder's lock, looks at what is done already,
and writes who does what into the lock. The others answer it, each in a file of its own, and begin when the lead has
repeated their answer; so nobody takes what an earlier launch left there for a word of this one. Whoever leads touches
nothing while a rank of an earlier lead still lives, and every rank writes only while its own lead has the lock: one
that outlives its lead ends when another takes over.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from mla_convert.errors import MLAConvertError, OutputError, UsageError
from mla_convert.journal import Progress, read_journals
from mla_convert.presence import Presence, Seen, look, nonce_of
from mla_convert.remains import LOCK, RANK

#: Seconds that ranks of one launch wait for each other to come, and between two looks at the folder.
PATIENCE = 600.0
PAUSE = 0.1


@dataclasses.dataclass(frozen=True)
class World:
    """This process's rank, how many there are, how many of them on this machine, and a name of their launch."""

    rank: int = 0
    size: int = 1
    local_size: int = 1
    launch: str = ""

    @property
    def leads(self) -> bool:
        """Whether this is the one that merges."""
        return self.rank == 0


def world_of(environment: Mapping[str, str]) -> World:
    """The world that torchrun, or accelerate, has put this process into; a process of its own without them."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return World()
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError as error:
        raise UsageError(f"RANK and WORLD_SIZE are to be whole numbers ({error}); let torchrun set them") from error
    if not 0 <= rank < size or local < 1:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={size}; ranks count from 0: let torchrun set them")
    address = environment.get("MASTER_ADDR", "")
    if address in ("", "localhost", "127.0.0.1", "::1"):
        address = socket.gethostname()
    parts = (environment.get("TORCHELASTIC_RUN_ID", ""), address, environment.get("MASTER_PORT", ""))
    return World(rank, size, local, "/".join(parts))


def hold(temporary: pathlib.Path, world: World) -> Presence:
    """Take the lock of a folder; UsageError where a process that is alive has it. A stale one is replaced."""
    file = temporary / LOCK
    while True:
        try:
            return Presence(file, launch=world.launch)
        except FileExistsError:
            seen = look(file)
            if seen is not None and seen.alive:
                raise UsageError(
                    f"another conversion is writing into {temporary.parent} ({seen.process}); wait for it, or choose "
                    "another OUT"
                ) from None
            file.unlink(missing_ok=True)


def share_out(sizes: Mapping[int, int], groups: Iterable[tuple[int, ...]], size: int) -> dict[int, int]:
    """A rank for every file: files of a group stay together, the largest groups go first to who has least.

    ``sizes`` are the bytes still to be made of each file.
    """
    loads = [0] * size
    ranks: dict[int, int] = {}
    for group in sorted(groups, key=lambda group: (-sum(sizes[file] for file in group), group)):
        rank = loads.index(min(loads))
        loads[rank] += sum(sizes[file] for file in group)
        ranks |= dict.fromkeys(group, rank)
    return ranks


def call(
    presence: Presence, temporary: pathlib.Path, world: World, plan: str, shares: Mapping[int, int], done: int = 0
) -> None:
    """The lead's part of the meeting: wait for an answer of every rank, then say who does what.

    ``done`` is the number of units that are done already, and noted in the lead's journal.
    """
    presence.say(plan=plan)
    here: dict[int, str] = {}

    def all_here() -> bool:
        for rank in range(1, world.size):
            seen = look(temporary / RANK.format(rank))
            if seen is not None and seen.alive and seen.known.get("answers") == presence.nonce:
                here[rank] = seen.nonce
        return len(here) == world.size - 1

    def late() -> MLAConvertError:
        missing = sorted(set(range(1, world.size)) - set(here))
        return UsageError(f"of {world.size} ranks, {missing} did not come; start all of them with the same command")

    wait_until(all_here, late)
    presence.say(plan=plan, ranks=here, shares=shares, done=done)


def outlive(temporary: pathlib.Path) -> None:
    """Wait until no rank of an earlier lead is at work, for the one that has just taken the lock.

    Such a rank ends by itself, since the lock is no longer its lead's (:func:`check_lead`). UsageError for one that
    does not.
    """
    living: list[Seen] = []

    def gone() -> bool:
        found = (look(file) for file in temporary.glob(RANK.format("*[0-9]")))
        living[:] = [seen for seen in found if seen is not None and seen.alive]
        return not living

    def late() -> MLAConvertError:
        who = ", ".join(str(seen.process) for seen in living)
        return UsageError(
            f"{who}, of an earlier launch, is still writing into {temporary.parent}; end it, and try again"
        )

    wait_until(gone, late)


def check_lead(temporary: pathlib.Path, nonce: str) -> None:
    """OutputError where the lock is no longer that of the lead with this ``nonce``."""
    if nonce_of(temporary / LOCK) != nonce:
        raise OutputError(
            f"{temporary.parent} is no longer this run's: rank 0 ended, or another conversion took over, after this "
            "process was taken for dead; run the same command again, it goes on from what is done"
        )


def join(temporary: pathlib.Path, world: World, plan: str) -> tuple[Presence, dict[int, int]]:
    """Another rank's part of the meeting: answer the lead, wait for its word; returns who does what.

    What it answered, the lead's nonce, is in the presence's ``known``, and so is what the lead says is ``done``.
    """
    own = temporary / RANK.format(world.rank)
    presence: Presence | None = None
    shares: dict[int, int] = {}

    def begun() -> bool:
        nonlocal presence, shares
        lead = look(temporary / LOCK)
        if lead is None or not lead.alive or lead.known.get("launch") != world.launch or "plan" not in lead.known:
            return False
        if lead.known["plan"] != plan:
            raise UsageError(f"rank {world.rank} has other options, or another source, than rank 0; start all alike")
        if presence is None or presence.known.get("answers") != lead.nonce:
            own.unlink(missing_ok=True)
            presence = Presence(own, answers=lead.nonce)
        shares = {int(file): rank for file, rank in lead.known.get("shares", {}).items()}
        presence.known["done"] = lead.known.get("done", 0)
        return bool(lead.known.get("ranks", {}).get(str(world.rank)) == presence.nonce)

    def late() -> MLAConvertError:
        return UsageError(f"rank {world.rank} waited for rank 0 of its launch, which did not begin; start all together")

    try:
        wait_until(begun, late)
    except BaseException:
        if presence is not None:
            presence.end()
        raise
    assert presence is not None
    return presence, shares


def hear(temporary: pathlib.Path, presence: Presence, plan: str) -> Progress:
    """What the lead has found done, and put into its journal: another rank's part, after :func:`join`.

    The lead waits for none of it, so that a rank which did it again would still be at it when all is renamed.
    """
    known = Progress()

    def heard() -> bool:
        nonlocal known
        check_lead(temporary, presence.known["answers"])
        found = read_journals(temporary, plan)
        known = found or known
        return found is not None  # or another rank has just made its journal, and not yet written the first line

    if presence.known.get("done"):
        wait_until(heard)
    return known


def heard(temporary: pathlib.Path, world: World) -> bool:
    """Whether every rank that lives has begun (:meth:`Presence.say`): only then may the lead's word go.

    One that has nothing to do would otherwise look for it when all is done and gone, and wait for a lead in vain.
    """
    others = (look(temporary / RANK.format(rank)) for rank in range(1, world.size))
    return all(seen is None or not seen.alive or "begun" in seen.known for seen in others)


def ended(temporary: pathlib.Path, rank: int) -> OutputError | None:
    """The error to be raised where the process of ``rank`` is no longer there."""
    seen = look(temporary / RANK.format(rank))
    if seen is not None and seen.alive:
        return None
    who = f"rank {rank}" if seen is None else f"rank {rank} ({seen.process})"
    return OutputError(
        f"{who} ended before its work was done; what is done is kept in {temporary}: run the same command again, it "
        "goes on from there"
    )


def lead_of(temporary: pathlib.Path) -> Seen | None:
    """The process that leads the run in a folder, if it is alive."""
    seen = look(temporary / LOCK)
    return seen if seen is not None and seen.alive else None


def wait_until(ready: Callable[[], bool], late: Callable[[], MLAConvertError] | None = None) -> None:
    """Ask until it is so; where ``late`` is given, raise the error it makes when that takes too long."""
    end = time.monotonic() + PATIENCE
    while not ready():
        if late is not None and time.monotonic() > end:
            raise late()
        time.sleep(PAUSE)


def launched() -> World:
    """The world of this process, from its environment."""
    return world_of(os.environ)
