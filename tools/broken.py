"""Break each feature on purpose, and see that its tests notice.

    python tools/broken.py [--row N] [--jobs N]

Each row of ``broken_families`` and ``broken_features`` is a feature, a change of the package that breaks it, and tests
that must turn red under the change; before, all these tests must be green as things stand. A whole run in which every
row turns red is recorded in ``benchmarks/results/broken.md``; a row that stays green makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import pytest
import test_all
from broken_changes import Change, Row
from broken_families import FAMILY_ROWS
from broken_features import FEATURE_ROWS

ROOT = test_all.ROOT
RECORD = ROOT / "benchmarks" / "results" / "broken.md"
ROWS: tuple[Row, ...] = FAMILY_ROWS + FEATURE_ROWS
#: Seconds that one row may take, beside others.
LIMIT = 300


def place(where: str) -> tuple[Any, str]:
    """What holds the function that ``where`` names, and its name there."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    holder: Any = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    return holder, name


def apply(change: Change) -> None:
    """Put the change in the place of the original; an AttributeError where there is none."""
    where, make = change
    holder, name = place(where)
    setattr(holder, name, make(getattr(holder, name)))


class Failures:
    """A plugin of pytest that collects which tests failed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.append(report.nodeid)


def is_of(node: str, test: str) -> bool:
    """Whether a test that ran is the one named, one of its parameters, or in the file named."""
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def run(tests: list[str], changes: tuple[Change, ...]) -> tuple[int, list[str], str]:
    """pytest in this process: its exit code, the tests that failed, and what it printed."""
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.chdir(ROOT)
    for change in changes:
        apply(change)
    failures, printed = Failures(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main(
            ["-q", "-p", "no:cacheprovider", "--capture=no", "--assert=plain", *tests], plugins=[failures]
        )
    return int(code), failures.found, printed.getvalue()


def give_up(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT} seconds")


def judge(number: int) -> tuple[int, list[str], float, str]:
    """Row ``number`` (−1: nothing broken): the tests that are not as they should be, seconds, and what was printed."""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    begun = time.monotonic()
    if number < 0:
        every = list(dict.fromkeys(test for row in ROWS for test in row.tests))
        code, failed, printed = run(every, ())
        return number, failed if code in (0, 1) else every, time.monotonic() - begun, printed
    row = ROWS[number]
    code, failed, printed = run(list(row.tests), row.changes)
    green = [test for test in row.tests if code != 1 or not any(is_of(node, test) for node in failed)]
    return number, green, time.monotonic() - begun, printed


def prepare() -> None:
    """Import what every row needs, once: rows are forks of this process."""
    for name in ("transformers.generation.utils", "transformers.models.deepseek_v3.modeling_deepseek_v3"):
        importlib.import_module(name)
    for row in ROWS:
        for where, _ in row.changes:
            place(where)


def table(seconds: dict[int, float]) -> str:
    """What was broken and noticed, as Markdown."""
    lines = ["| feature | broken on purpose | tests that turn red | s |", "|---|---|---|---|"]
    for number, row in enumerate(ROWS):
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in row.tests)
        lines.append(f"| {row.feature} | {row.how} | {tests} | {seconds[number]:.0f} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, action="append", help=f"one row, from 0 to {len(ROWS) - 1}")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="rows at once")
    options = parser.parse_args(arguments)
    chosen = options.row if options.row is not None else [-1, *range(len(ROWS))]
    tested = test_all.commit()
    prepare()
    wrong, seconds, begun = [], {}, time.monotonic()
    # A fork for each row: no change of one reaches another, and nothing is imported twice.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for number, unlike, took, printed in pool.imap_unordered(judge, chosen, chunksize=1):
            seconds[number] = took
            feature = "nothing broken" if number < 0 else ROWS[number].feature
            print(f"{number:3} {'WRONG' if unlike else 'as it should be':15} {took:5.0f} s  {feature}", flush=True)
            if unlike:
                wrong.append(number)
                print(printed if number < 0 or options.row else f"    still green: {', '.join(unlike)}", flush=True)
            elif options.row:
                print(printed)
    if wrong:
        print(f"{len(wrong)} rows are not as they should be: {sorted(wrong)}")
        return 1
    if options.row is None:
        closing = f"{len(ROWS)} features broken, each noticed, in {time.monotonic() - begun:.0f} s"
        today = datetime.datetime.now(datetime.UTC).date()
        head = test_all.report(closing, tested, today, "broken", "every broken feature was noticed by its tests")
        RECORD.write_text(f"{head}\n{table(seconds)}\n", "utf-8")
        print(f"recorded in {RECORD.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
