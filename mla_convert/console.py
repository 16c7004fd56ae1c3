"""What every command shares: where words go, how errors end, and when numbers become JSON.

Rich is imported where it is used, so that importing this module stays cheap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mla_convert.errors import MLAConvertError, UsageError
from mla_convert.jsonable import jsonable
from mla_convert.paths import new_file

if TYPE_CHECKING:
    from rich.console import Console

LOGGER = logging.getLogger("mla_convert")

EXIT_CHECK_FAILED = 1
EXIT_FAULTY_INPUT = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE

STANDARD_OUTPUT = "-"


class Verbosity(enum.IntEnum):
    """How much a run says; the values are the package logger's levels."""

    QUIET = logging.ERROR
    NORMAL = logging.WARNING
    VERBOSE = logging.DEBUG

    @classmethod
    def choose(cls, *, quiet: bool, verbose: bool) -> Verbosity:
        """Raise UsageError when both are asked for."""
        if quiet and verbose:
            raise UsageError("--quiet and --verbose were both given; they exclude each other, leave one of them out")
        return cls.QUIET if quiet else cls.VERBOSE if verbose else cls.NORMAL


def make_console(*, stderr: bool, quiet: bool = False) -> Console:
    """A console made anew for each use, so that it follows a redirected ``sys.stdout`` or ``sys.stderr``."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet, highlight=False)
    if not console.is_terminal:
        console.width = 140  # in a file or a pipe nothing is gained by folding rows
    return console


def set_up_logging(verbosity: Verbosity) -> None:
    """Show the package's log on standard error; calling again replaces the handler."""
    from rich.logging import RichHandler

    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
    LOGGER.addHandler(RichHandler(console=make_console(stderr=True), show_path=verbosity == Verbosity.VERBOSE))
    LOGGER.setLevel(verbosity)


def print_anything() -> None:
    """Let standard output and error write what their encoding lacks as ``\\xe4``, rather than fail at a file's name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def error_boundary() -> Iterator[None]:
    """The one place where an error becomes a line on standard error and an exit code.

    Only faults of the input, the call or the system are caught; anything else is a fault of this
    program and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _fail(": ".join(["interrupted", *map(str, error.args)]), EXIT_INTERRUPTED)
    except BrokenPipeError:
        _silence_standard_output()
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except MLAConvertError as error:
        LOGGER.debug("where the error was raised", exc_info=error)
        _fail(str(error), EXIT_FAULTY_INPUT)
    except OSError as error:
        LOGGER.debug("where the error was raised", exc_info=error)
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{where}{error.strerror or error}", EXIT_FAULTY_INPUT)
    except (MemoryError, OverflowError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        LOGGER.debug("where the error was raised", exc_info=error)
        _fail(
            "there is not enough memory for this, or no thread left; free some, or ask for less at once (workers, "
            "sequences, tokens)",
            EXIT_FAULTY_INPUT,
        )


def _out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class for it on accelerators only; and a size that no number can hold is no smaller."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "start new thread", "overflow")
    return isinstance(error, MemoryError | OverflowError) or any(word in str(error) for word in words)


def _fail(message: str, code: int) -> None:
    from rich.text import Text

    # Not wrapped: one error stays one line in a log.
    line = Text.assemble(("error: ", "bold red"), _printable(message))
    make_console(stderr=True).print(line, soft_wrap=True)
    raise SystemExit(code)


def _printable(text: str) -> str:
    """A text on one line: line breaks and control characters, which names in a file may hold, as ``\\n``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _silence_standard_output() -> None:
    """Give the interpreter somewhere to flush to at exit; the reader of standard output has gone."""
    with contextlib.suppress(OSError, ValueError):  # standard output may be no real file, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclasses.dataclass(frozen=True)
class Output:
    """Where one command's results go: tables for a person, JSON for a program.

    ``json_target`` is a file to be made, ``-`` for standard output, or None. With ``-`` nothing but
    JSON reaches standard output, and the tables go to standard error.
    """

    verbosity: Verbosity = Verbosity.NORMAL
    json_target: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError, before any long work, for a JSON file that could not be written."""
        if self.json_target in (None, STANDARD_OUTPUT):
            return
        new_file(self.json_target, "--json")

    @property
    def console(self) -> Console:
        """The console for tables and remarks; silent with ``--quiet``."""
        return make_console(stderr=self.json_target == STANDARD_OUTPUT, quiet=self.verbosity == Verbosity.QUIET)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is left-aligned, the others, which hold figures, right-aligned."""
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for position, column in enumerate(columns):
            table.add_column(column, justify="right" if position else "left")
        for row in rows:
            table.add_row(*map(_printable, row))
        self.console.print(table, markup=False)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print names and values in two columns."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(name, Text(_printable(value)))
        self.console.print(grid)

    def notes(self, lines: Sequence[str]) -> None:
        """Print remarks, a line each, never folded, so that a path can be copied."""
        for line in lines:
            self.console.print(_printable(line), markup=False, soft_wrap=True)

    def json(self, payload: Mapping[str, Any]) -> None:
        """Write the command's result where ``--json`` asked for it; without ``--json``, nowhere."""
        text = json.dumps(jsonable(payload), indent=2, allow_nan=False) + "\n"
        if self.json_target == STANDARD_OUTPUT:
            sys.stdout.write(text)
            sys.stdout.flush()  # so that a reader that has gone is noticed here
        elif self.json_target is not None:
            with open(self.json_target, "x", encoding="utf-8") as file:
                file.write(text)

    @contextlib.contextmanager
    def progress(self, description: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar on standard error as a function of (done, total); only a terminal shows it."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = make_console(stderr=True)
        hidden = self.verbosity == Verbosity.QUIET or not console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, disable=hidden, transient=True) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as ``64,1024``; UsageError for anything but digits between commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"{option} {text}: whole numbers with commas between them are taken, for example 64,1024,4096")
    return [int(part) for part in parts]
