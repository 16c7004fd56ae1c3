"""Which process is at work in a folder: a file that names it, kept fresh while it lives.

The file says host, boot, process number and start of the process, so that on the same machine a process that has ended
is recognised, even where its number was given to another. On other machines, and in containers that count processes
anew, only the file's age can tell: its owner touches it every few seconds. A machine of the same name is another one
unless it is of the same boot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import socket
import sys
import tempfile
import threading
import uuid
from typing import Any

#: Seconds between two touches, and the age at which the process of another machine is taken for dead.
BEAT = 5.0
DEAD_AFTER = 60.0


@dataclasses.dataclass(frozen=True)
class Process:
    """A process, as far as it can be told from all others.

    ``boot`` says where and since when its number ``pid`` counts; ``started`` is in the system's own count.
    """

    host: str
    boot: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The process that calls."""
    return Process(socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()) or "")


class Presence:
    """The file that says that this process is at work; touched by a thread until :meth:`end`.

    ``known`` is what else stands in it. ``nonce`` is a text that no other run has. FileExistsError where there is one.
    """

    def __init__(self, file: pathlib.Path, **known: Any) -> None:
        self.file = file
        self.nonce = secrets.token_hex(8)
        self.known = known
        self._ended = threading.Event()
        self._replace(exclusive=True)
        try:
            threading.Thread(target=self._beat, name="mla-convert-presence", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            self.end()
            raise

    def say(self, **known: Any) -> None:
        """Add to what stands in the file."""
        self.known |= known
        self._replace(exclusive=False)

    def end(self) -> None:
        """Remove the file, if it is still this one's."""
        self._ended.set()
        with contextlib.suppress(OSError):
            if nonce_of(self.file) == self.nonce:
                self.file.unlink()

    def _replace(self, *, exclusive: bool) -> None:
        text = json.dumps({**dataclasses.asdict(this_process()), "nonce": self.nonce, **self.known}).encode()
        if exclusive:
            # Complete from its first moment on: others may read it at any time.
            temporary = self.file.with_name(f"{self.file.name}.{self.nonce}")
            temporary.write_bytes(text)
            try:
                os.link(temporary, self.file)
            except OSError as error:
                if isinstance(error, FileExistsError):
                    raise
                with self.file.open("xb") as stream:  # a file system without links
                    stream.write(text)
            finally:
                temporary.unlink()
        else:
            temporary = self.file.with_name(f"{self.file.name}.{self.nonce}")
            temporary.write_bytes(text)
            temporary.replace(self.file)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.file)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a presence file says: the process, its nonce, whatever else it told, and whether it is still there."""

    process: Process
    nonce: str
    known: dict[str, Any]
    alive: bool


def look(file: pathlib.Path) -> Seen | None:
    """What stands in a presence file; None where there is none, or one that says nothing (a run that had no time to).

    Raises OSError where the folder cannot be read.
    """
    try:
        found = json.loads(file.read_bytes())
        process = Process(**{field.name: found.pop(field.name) for field in dataclasses.fields(Process)})
        nonce = found.pop("nonce")
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return Seen(process, nonce, found, _alive(process, file))


def nonce_of(file: pathlib.Path) -> str | None:
    """The nonce in a presence file; None where :func:`look` sees nothing."""
    try:
        return str(json.loads(file.read_bytes())["nonce"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _alive(process: Process, file: pathlib.Path) -> bool:
    here = this_process()
    if (process.host, process.boot) == (here.host, here.boot) and sys.platform != "win32":
        return _runs(process)
    return _age(file) < DEAD_AFTER


def _runs(process: Process) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    started = _started(process.pid)
    return not (started and process.started) or started == process.started


def _age(file: pathlib.Path) -> float:
    """Seconds since the file was touched, by the clock of the machine that keeps it."""
    try:
        with tempfile.TemporaryFile(dir=file.parent, prefix=f"{file.name}.") as now:
            return os.fstat(now.fileno()).st_mtime - file.stat().st_mtime
    except OSError:
        return 0.0  # where nothing can be written nothing is taken for dead


def _boot() -> str:
    """The machine since it was started, and the namespace that its processes are numbered in, where it has such."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return hex(uuid.getnode())


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where the system does not say."""
    try:
        # The name, in brackets, may hold anything; the fields after it are numbers, the 22nd of all being the start.
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
