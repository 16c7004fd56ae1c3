"""``python -m mla_convert …`` is the same program as ``mla-convert …``."""

import importlib.util
import os
import sys


def leave_checkout() -> None:
    """Drop the working directory from ``sys.path`` when it is this package's own checkout.

    ``python -m`` puts it first, and there the folder ``kernels`` would shadow Hugging Face's
    package of that name, which transformers imports.
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.isfile(os.path.join(root, "pyproject.toml")):
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != root]


def main() -> None:
    leave_checkout()
    if importlib.util.find_spec("mla_convert.kernels") is None:
        print(
            "this checkout of mla_convert is not installed for this Python; run `make demo`, or `pip install -e .` (or "
            "`mla-convert`, elsewhere than in the checkout, where another copy is installed)",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from mla_convert.cli import app

    app(prog_name="mla-convert")


if __name__ == "__main__":
    main()
