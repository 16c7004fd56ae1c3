"""Whether code runs, or is being traced into a graph."""

from __future__ import annotations

import torch


def being_traced() -> bool:
    """Whether this very call is being traced by ``torch.compile`` or ``torch.export``.

    ``torch.compiler.is_compiling()`` is true in every thread while one of them compiles, and may turn false in the
    middle of another thread's step.
    """
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
