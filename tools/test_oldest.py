"""Run the tests of patching under the oldest supported transformers; record the result when all are green.

    python tools/test_oldest.py [pytest arguments]

``make test-oldest`` makes the environment for it. A run of chosen tests records nothing.
"""

from __future__ import annotations

import datetime
import sys

import test_all

ROOT = test_all.ROOT
RECORD = ROOT / "benchmarks" / "results" / "test_oldest.md"
#: Tests that run patched models, of the families that the release has. Two kinds are left out: those of ``LatentCache``
#: alone compare it with the installed release's caches, whose ``reset`` was another in the oldest, and those of every
#: cache need some that it lacks (FP8) or cannot reorder, patched or not (quantized).
SUBJECTS = (
    "patch* keywords freshness generate generate_static generate_threads generate_training masks adapters offload "
    "quantized_projections versions families sidecar storage coded_sidecar cache_models parallel"
)


def tests() -> list[str]:
    """The files of the tests, from the root of the checkout."""
    found = [path for subject in SUBJECTS.split() for path in (ROOT / "tests").glob(f"test_{subject}.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def main(arguments: list[str]) -> int:
    tested = test_all.commit()
    code, closing = test_all.run_pytest(["-m", "not slow", *arguments, *tests()])
    if code == 0 and not arguments:
        today = datetime.datetime.now(datetime.UTC).date()
        record = test_all.report(closing, tested, today, "test-oldest", "every test of patching was green")
        RECORD.write_text(record, "utf-8")
        print(f"recorded in {RECORD.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
