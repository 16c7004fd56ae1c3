"""Does a model run at all, before it is patched? A config can be loaded and still not fit its model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.errors import CheckpointError, UsageError
from mla_convert.formats import count_nonfinite, plain
from mla_convert.patches.plain_copy import code_labels

_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_AGAIN = "take the config.json that belongs to the checkpoint"
_NAMED = 3


@torch.no_grad()
def try_out(model: Any, where: str) -> None:
    """Compute two tokens in evaluation mode, as all that follows will be.

    Raises:
        CheckpointError: naming ``where`` the model is from, if transformers fails at that.
        UsageError: where the model holds codes, and what multiplies by them does not run here.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        with evaluating(model):
            model(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if labels := code_labels(model):
            raise UsageError(
                f"{where} holds codes ({', '.join(labels)}), and cannot compute two tokens with them here, unpatched "
                f"as it is ({reason}): take a device and sizes that their library runs on, or the model's folder "
                "instead of the model, which is loaded in plain numbers"
            ) from error
        raise CheckpointError(
            f"transformers loads {where}, and cannot compute two tokens with it, unpatched as it is "
            f"({reason}): the config contradicts itself or the model; {_AGAIN}"
        ) from error


@contextlib.contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """``model`` in evaluation mode; each module goes back to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    set_mode: Any = model  # transformers leaves eval untyped
    set_mode.eval()
    try:
        yield model
    finally:
        for module in training:
            module.training = True


def refuse_nonfinite_logits(logits: Tensor, model: nn.Module, where: str) -> None:
    """CheckpointError where the original ``model`` itself gives NaN or infinite ``logits``: nothing compares with them.

    The weights that are damaged are named, the first few of them, with how many of their values are.
    """
    bad = int((~logits.isfinite()).sum())
    if bad:
        raise CheckpointError(
            f"{where}, unpatched as it is, gives {bad:,} NaN or infinite logits (of {logits.numel():,}) in "
            f"{plain(logits.dtype)}: {_cause(model)}"
        )


def _cause(model: nn.Module) -> str:
    """Which weights are NaN or infinite; or, if none is, what else there is."""
    tensors = {name: tensor for name, tensor in _tensors(model) if tensor.is_floating_point() and not tensor.is_meta}
    counts = {name: count for name, tensor in tensors.items() if (count := count_nonfinite(tensor.detach()))}
    if not counts:
        return f"all its weights are finite, so its config is damaged, or the dtype too narrow for it; {_AGAIN}"
    named = [f"{name} has {counts[name]:,} (of {tensors[name].numel():,})" for name in list(counts)[:_NAMED]]
    more = f", and {len(counts) - _NAMED} more tensors have some" if len(counts) > _NAMED else ""
    return f"NaN or infinite weights: {', '.join(named)}{more}; the checkpoint is damaged, fetch it again"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are stored with them (a router's bias is one)."""
    yield from model.named_parameters()
    stored = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
