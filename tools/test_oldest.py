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
#: Tests that run patched models, of the families that the release has. Those of ``LatentCache`` alone are left out:
#: they compare it with the installed release's caches, whose ``reset`` was another in the oldest.
SUBJECTS = (
    "patch* keywords freshness generate generate_* masks adapters offload quantized_projections versions families* "
    "sidecar storage coded_sidecar cache_models parallel"
)
#: Of these the slow tests run too: several processes, and each family with each cache and original attention.
THOROUGH = "families* generate_families parallel"


def tests(subjects: str) -> list[str]:
    """The files of the tests, from the root of the checkout."""
    found = {path for subject in subjects.split() for path in (ROOT / "tests").glob(f"test_{subject}.py")}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def main(arguments: list[str]) -> int:
    tested = test_all.commit()
    runs = [
        test_all.run_pytest(["-m", which, *arguments, *tests(subjects)])
        for which, subjects in (("not slow", SUBJECTS), ("slow", THOROUGH))
    ]
    nothing_chosen = 5  # by the arguments, in one of the two
    code = max(0 if code == nothing_chosen and arguments else code for code, _ in runs)
    closing = "; ".join(closing for _, closing in runs)
    if code == 0 and not arguments:
        today = datetime.datetime.now(datetime.UTC).date()
        record = test_all.report(closing, tested, today, "test-oldest", "every test of patching was green")
        RECORD.write_text(record, "utf-8")
        print(f"recorded in {RECORD.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
