"""Import this before any kernel module: Triton's kernels then run in its interpreter, on tensors of the CPU.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, those of its own library included. Other libraries may have
imported Triton by then, so its library's kernels are defined again here: the order in which test modules are imported
does not matter. Kernels can't be compiled in the same process; ``aot`` does that in others.

Its matrix products are summed in the same order in every row, as a GPU's are. It leaves them to the BLAS of NumPy, in
which a row's last bit depends, on some processors, on the place that the row has among the others.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402  # only with the variable set
import triton.language  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


def _interpret_library() -> None:
    again: dict[int, Any] = {}
    owners = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    for owner in [*owners, triton.language.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, triton.JITFunction):
                again.setdefault(id(value), triton.jit(value.fn))
                setattr(owner, name, again[id(value)])


def _dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    if a.data.dtype.kind != "f" or b.data.dtype.kind != "f" or a.data.ndim != 2:
        return _by_blas(self, a, b, d, *rest)
    product = np.einsum("mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_interpret_library()
_by_blas = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _dot
