"""Import this before any kernel module: Triton's kernels then run in its interpreter, on tensors of the CPU.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, those of its own library included. Other libraries may have
imported Triton by then, so its library's kernels are defined again here: the order in which test modules are imported
does not matter. Kernels can't be compiled in the same process; ``aot`` does that in others.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402  # only with the variable set
import triton.language  # noqa: E402


def _interpret_library() -> None:
    again: dict[int, Any] = {}
    owners = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for owner in [*owners, triton.language.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, triton.JITFunction):
                again.setdefault(id(value), triton.jit(value.fn))
                setattr(owner, name, again[id(value)])


_interpret_library()
