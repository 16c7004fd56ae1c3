"""Readers of what bitsandbytes and torchao have saved; the table is in :mod:`mla_convert.readers`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from mla_convert.errors import FormatError
from mla_convert.readers import Codes, finish, library


def bnb_int8(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``bitsandbytes-int8``: ``SCB`` holds the largest magnitude of each row."""
    largest = codes.scale("SCB", may_be_zero=True)
    # In this order each value is rounded twice at most; the exact quotient of a row may not be a float32.
    return finish(codes, codes.tensors["weight"].to(torch.float32) * largest[:, None] / 127, dtype)


def bnb_4bit(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``bitsandbytes-4bit`` (nf4 and fp4, nested or not), by bitsandbytes itself."""
    functional = library("bitsandbytes.functional")
    parts = {suffix.removeprefix("weight."): tensor for suffix, tensor in codes.tensors.items() if suffix != "weight"}
    with _their_errors(codes, "bitsandbytes"):
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        state.dtype = torch.float32
        weight = functional.dequantize_4bit(codes.tensors["weight"], state)
    return finish(codes, weight, dtype)


def torchao(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``torchao``: tensor subclasses that were taken apart for safetensors, put together by torchao itself."""
    support = library("torchao.prototype.safetensors.safetensors_support")
    module = codes.name.removesuffix("weight")
    said = codes.metadata.get(codes.name)
    if said is None:
        raise FormatError(
            f"the file of {codes.name} says nothing of it in its metadata, without which torchao's parts mean nothing; "
            "save the model again with save_pretrained"
        )
    tensors = {module + suffix: tensor for suffix, tensor in codes.tensors.items()}
    with _their_errors(codes, "torchao"):
        whole, _ = support.unflatten_tensor_state_dict(
            tensors, {codes.name: said, "tensor_names": json.dumps([codes.name])}
        )
        weight = whole[codes.name].dequantize()
    return finish(codes, weight, dtype)


@contextlib.contextmanager
def _their_errors(codes: Codes, name: str) -> Iterator[None]:
    """What a library raises for tensors that it cannot put together, as one error of ours."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FormatError(
            f"{codes.name} cannot be read by {name} ({reason}): the checkpoint is damaged, or from another version "
            f"of {name}"
        ) from error
