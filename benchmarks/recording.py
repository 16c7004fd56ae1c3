"""Where a benchmark's figures go: into the file that README and notes quote, when all was measured and nothing less.

No benchmark itself. Every script adds ``--json`` here and hands its result over here, so that a part of a measurement,
or one under other conditions, never takes the place of the whole.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option ``--json FILE``."""
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="where to write the result; by default the script's file in results/, and with other options nowhere",
    )


def write(
    parser: argparse.ArgumentParser, args: argparse.Namespace, result: Any, *, aside: tuple[str, ...] = ()
) -> None:
    """``result`` as JSON into ``--json``, or where no option differs from its default into the script's own file.

    ``aside`` names options that change nothing of what is measured.
    """
    given = {name: value for name, value in vars(args).items() if name not in ("json", *aside)}
    changed = sorted(name for name, value in given.items() if value != parser.get_default(name))
    own = RESULTS / f"{pathlib.Path(sys.argv[0]).stem}.json"
    if args.json is None and changed:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        print(f"{own.name} stays as it is, since {options} measured something else; --json FILE keeps this")
        return
    (args.json or own).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
