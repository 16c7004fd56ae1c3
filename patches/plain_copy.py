"""Another model with the same numbers, in another dtype: codes become the plain weights that they mean."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla_convert.absorption import FLOAT_DTYPES
from mla_convert.errors import PatchError, UsageError
from mla_convert.formats import plain
from mla_convert.patches.forms import PLAIN_TENSORS, Projection, Reader, kinds
from mla_convert.patches.quantized import CODES
from mla_convert.patches.sources import effective_weight

_SHARD = "torch.distributed.tensor.DTensor"
#: Dtypes of buffers that count or select, and of no weight.
_NO_WEIGHT = (torch.int64, torch.bool)


def coded_modules(model: nn.Module) -> dict[str, tuple[nn.Module, Reader]]:
    """The projections anywhere in ``model`` that hold codes of a known form, by name, each with its reader."""
    found = {}
    for name, module in model.named_modules():
        reader = next((reader for reader in CODES if reader.holds(module)), None)
        if reader is not None:
            found[name] = (module, reader)
    return found


def code_labels(model: nn.Module) -> tuple[str, ...]:
    """What codes the projections of ``model`` hold, for people: a label for each form."""
    return tuple(sorted({reader.label for _, reader in coded_modules(model).values()}))


def plain_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of ``model`` in ``dtype``, whose coded projections are plain ``nn.Linear`` with their effective weights.

    What transformers would keep in float32 when loading stays as it is. The codes themselves are not copied.

    Raises:
        UsageError: the model holds codes that cannot be read.
    """
    check_numbers(model)
    memo: dict[int, object] = {id(m): _plain_linear(name, m) for name, (m, _) in coded_modules(model).items()}
    other = copy.deepcopy(model, memo)
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in other.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    return other


def check_numbers(model: nn.Module) -> None:
    """Refuse a model with weights that are not plain numbers, nor codes that this package can read.

    Raises:
        UsageError: naming the first of them, and what to do.
    """
    known = tuple(f"{name}." for name in coded_modules(model))
    for name, tensor in _stored(model):
        sound = kinds(tensor)[0] in (*PLAIN_TENSORS, _SHARD) and tensor.dtype in FLOAT_DTYPES
        if not sound and not name.startswith(known):
            what = plain(tensor.dtype) if kinds(tensor)[0] in PLAIN_TENSORS else f"a {kinds(tensor)[0]}"
            raise UsageError(
                f"{name} is {what}, codes of a form that cannot be read in a model in memory; known are projections "
                f"that are {', '.join(reader.label for reader in CODES)}: verify the model's folder instead "
                "(mla_convert.verify(folder)), which is loaded in plain numbers"
            )


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers stored with them that could be weights."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.dtype not in _NO_WEIGHT:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _plain_linear(name: str, module: Projection) -> nn.Linear:
    """``nn.Linear`` in float32 with the weight [out, in] that the codes of ``module`` mean, and its bias."""
    try:
        weight = effective_weight(name, module, torch.float32)
    except PatchError as error:
        raise UsageError(
            f"{error}; verify the model's folder instead (mla_convert.verify(folder)), which is loaded in plain numbers"
        ) from error
    bias = getattr(module, "bias", None)
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    linear.train(module.training)
    return linear
