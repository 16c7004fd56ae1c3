"""Run every test; when all are green, record date, commit and result in ``benchmarks/results/test_all.md``.

    python tools/test_all.py [pytest arguments]

A run of chosen tests (``-k``, ``-m``, ``--lf``, …) isn't everything and records nothing.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "test_all.md"
WHOLE_RUN = ("tests", "--nbmake")  # what the Makefile hands over, besides notebooks


def run_pytest(arguments: list[str]) -> tuple[int, str]:
    """Run pytest with its output shown as it comes; return its exit code and its closing line."""
    command = [sys.executable, "-m", "pytest", *arguments]
    closing = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line.strip(" =\n") or closing
    return process.returncode, closing


def commit() -> str:
    """The commit that was tested, marked when the working tree differed from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")


def report(
    closing: str, tested: str, today: datetime.date, target: str = "test-all", green: str = "every test was green"
) -> str:
    """The record as Markdown."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "triton"))
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"""# `make {target}`

Written by `make {target}` when {green}.

| | |
|---|---|
| date | {today.isoformat()} |
| commit | {tested} |
| result | {closing} |
| machine | {machine} |
| with | {versions} |
"""


def main(arguments: list[str]) -> int:
    tested = commit()
    code, closing = run_pytest(arguments)
    partial = [word for word in arguments if word not in WHOLE_RUN and not word.startswith("notebooks/")]
    if code == 0 and not partial:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(report(closing, tested, datetime.datetime.now(datetime.UTC).date()), "utf-8")
        print(f"recorded in {RECORD.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
