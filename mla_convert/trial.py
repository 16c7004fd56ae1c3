"""Does a model run at all, before it is patched? A config can be loaded and still not fit its model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_convert.errors import CheckpointError
from mla_convert.formats import plain

_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_AGAIN = "take the config.json that belongs to the checkpoint"


@torch.no_grad()
def try_out(model: Any, where: str) -> None:
    """Compute two tokens; CheckpointError, naming ``where`` the model is from, if transformers fails at that."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers loads {where}, and cannot compute two tokens with it, unpatched as it is "
            f"({type(error).__name__}: {reason}): the config contradicts itself or the model; {_AGAIN}"
        ) from error


def refuse_nonfinite_logits(logits: Tensor, where: str) -> None:
    """CheckpointError where the original itself gives NaN or infinite ``logits``: there is nothing to compare with."""
    bad = int((~logits.isfinite()).sum())
    if bad:
        raise CheckpointError(
            f"{where}, unpatched as it is, gives {bad:,} NaN or infinite logits (of {logits.numel():,}) in "
            f"{plain(logits.dtype)}: its weights or its config are damaged; fetch it again, or {_AGAIN}"
        )
