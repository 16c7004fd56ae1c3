"""Launcher for a checkout: ``python cli.py …`` is the same program as ``mla-convert …``.

The repository root must not stay on ``sys.path``: its folder ``kernels`` would shadow Hugging
Face's package of that name, which transformers imports.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != _ROOT]


def main() -> None:
    import importlib.util

    if importlib.util.find_spec("mla_convert") is None:
        print("mla_convert is not installed for this Python; run `make demo`, or `pip install -e .`", file=sys.stderr)
        raise SystemExit(2)
    from mla_convert.cli import app

    app(prog_name="mla-convert")


if __name__ == "__main__":
    main()
